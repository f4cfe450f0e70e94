"""Rows -> the comparison of a study: what each arm came to, and how it differs from the arm it is compared with."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from alltokens.engine.progress import duration, table
from alltokens.errors import UserError
from alltokens.models.cost import short
from alltokens.study.plan import Study
from alltokens.study.results import Result, chosen, stale
from alltokens.study.student import CONFIDENCE, Comparison, paired, quantile

ENOUGH = 5  # seeds, below which nothing is claimed
NUMBERS = ("token_accuracy", "pointing", "token_iou")


class ArmResult(NamedTuple):
    """One line of a comparison."""

    arm: str
    settings: str
    rows: tuple[Result, ...]  # the good ones, by seed
    failures: tuple[Result, ...]
    baseline: str | None
    comparison: Comparison | None  # of top-1 with the baseline, over the seeds that both have
    stale: int  # rows that other settings of this arm left behind

    @property
    def n(self) -> int:
        return len(self.rows)

    def mean(self, name: str = "top1") -> float | None:
        values = self.values(name)
        return statistics.mean(values) if values else None

    def spread(self, name: str = "top1") -> float | None:
        """Standard deviation over seeds."""
        values = self.values(name)
        return statistics.stdev(values) if len(values) > 1 else None

    def median(self, name: str) -> float | None:
        """Of times and speeds: a run that compiled, or was kept waiting, does not move it."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def half_interval(self) -> float | None:
        """Half of the mean's own 95 % interval."""
        spread = self.spread()
        return None if spread is None else quantile((1 + CONFIDENCE) / 2, self.n - 1) * spread / self.n**0.5

    def values(self, name: str) -> list[float]:
        found = [getattr(row, name) for row in self.rows]
        return [float(value) for value in found if value is not None]


@dataclass(frozen=True)
class Compared:
    """A study with its results."""

    study: Study
    arms: tuple[ArmResult, ...]

    @property
    def n(self) -> int:
        return sum(arm.n for arm in self.arms)

    def arm(self, name: str) -> ArmResult:
        return next(arm for arm in self.arms if arm.arm == name)


def compare(study: Study, rows: Sequence[Result]) -> Compared:
    found = {arm: chosen(rows, study.settings(arm)) for arm in study.arms}
    arms: list[ArmResult] = []
    for arm, by_seed in found.items():
        good = {seed: row for seed, row in sorted(by_seed.items()) if row.status == "done"}
        bad = tuple(row for _, row in sorted(by_seed.items()) if row.status != "done")
        baseline = study.baseline_of(arm)
        comparison = None
        if baseline is not None:
            other = [row for row in found[baseline].values() if row.status == "done"]
            comparison = over_equal_seeds(tuple(good.values()), other)
        settings = study.settings(arm)
        behind = stale(rows, study.name, arm, settings)
        arms.append(ArmResult(arm, settings, tuple(good.values()), bad, baseline, comparison, behind))
    return Compared(study, tuple(arms))


def over_equal_seeds(ours: Sequence[Result], baseline: Sequence[Result], name: str = "top1") -> Comparison | None:
    """A number of two arms, over the seeds that both have."""
    theirs = {row.seed: getattr(row, name) for row in baseline}
    pairs = [(getattr(row, name), theirs.get(row.seed)) for row in ours]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    return paired([one for one, _ in both], [other for _, other in both])


Column = tuple[str, Callable[[ArmResult], str]]


def columns(compared: Compared) -> list[Column]:
    """Header and cell of each column that has something to show."""
    many: list[Column] = [
        ("n", lambda arm: str(arm.n)),
        ("failed", lambda arm: str(len(arm.failures) or "")),
        ("top-1 %", lambda arm: number(arm.mean(), 2)),
        ("sd", lambda arm: number(arm.spread(), 2)),
        ("pairs", lambda arm: _fewer_pairs(arm, compared)),
        ("difference", lambda arm: signed(arm.comparison.difference) if arm.comparison else ""),
        ("95 % interval", lambda arm: interval(arm.comparison)),
        ("p", lambda arm: probability(arm.comparison)),
        ("detectable", lambda arm: number(arm.comparison.detectable, 2) if arm.comparison else ""),
        ("token accuracy %", lambda arm: number(arm.mean("token_accuracy"), 1)),
        ("pointing %", lambda arm: number(arm.mean("pointing"), 1)),
        ("token IoU %", lambda arm: number(arm.mean("token_iou"), 1)),
        ("M parameters", lambda arm: "" if (it := arm.mean("parameters")) is None else short(it / 1e6)),
        ("GMACs", lambda arm: "" if (it := arm.mean("gmacs")) is None else short(it)),
        ("a run", lambda arm: "" if (it := arm.median("wall_seconds")) is None else duration(it)),
        ("pictures/s", lambda arm: "" if (it := arm.median("pictures_per_second")) is None else f"{it:,.0f}"),
    ]
    return [(head, cell) for head, cell in many if head == "n" or any(cell(arm) for arm in compared.arms)]


def _fewer_pairs(arm: ArmResult, compared: Compared) -> str:
    """The seeds that an arm and its baseline both have, where one has more: the difference is not that of the means."""
    if arm.comparison is None or arm.baseline is None:
        return ""
    return "" if arm.comparison.n == arm.n == compared.arm(arm.baseline).n else str(arm.comparison.n)


def print_table(compared: Compared) -> None:
    plan = compared.study.plan
    print(f"{compared.study.name}: {plan.about}" if plan.about else compared.study.name)
    shown = columns(compared)
    rows = [(arm.arm, *(cell(arm) for _, cell in shown)) for arm in compared.arms]
    heads = ("arm", *(head for head, _ in shown))
    table(heads, rows, numbers=tuple(range(1, len(heads))))
    for sentence in sentences(compared):
        print(sentence)


def sentences(compared: Compared) -> list[str]:
    """What must be said beside the numbers."""
    plan, said = compared.study.plan, []
    if not compared.n:
        said.append("This study has no results yet.")
    tested = [arm for arm in compared.arms if arm.comparison is not None]
    if tested:
        usual = compared.study.plan.baseline or next(iter(compared.study.arms))
        others = ", ".join(f"{arm.arm} to {arm.baseline}" for arm in tested if arm.baseline != usual)
        to = f"{usual} ({others})" if others else usual
        said.append(f"Differences are to {to}, over the seeds (pairs) that both have: paired t test.")
        said.append("Detectable: the true difference that this many seeds would have shown with a chance of 80 %.")
    if len(tested) >= 5:
        said.append(f"{len(tested)} comparisons: by chance alone one interval in twenty leaves zero out.")
    few = [arm.arm for arm in compared.arms if 0 < arm.n < ENOUGH]
    if few:
        said.append(f"Fewer than {ENOUGH} seeds, so no claim: {', '.join(few)}.")
    for arm in compared.arms:
        for row in arm.failures:
            said.append(f"FAILED: {arm.arm}, seed {row.seed}: {row.error}")
        if arm.stale:
            said.append(f"{arm.arm}: {arm.stale} rows were made with other settings and do not count.")
    used = {config.data.labels for config in compared.study.arms.values()}
    said += [f"Leak, labels {name}: {leak}" for name, leak in plan.leaks.items() if name in used]
    at_once = {row.side_by_side for arm in compared.arms for row in arm.rows if row.side_by_side}
    if at_once - {1}:
        low, high = min(at_once), max(at_once)
        count = f"{low}" if low == high else f"{low} to {high}"
        said.append(f"Times and pictures/s are medians, of one run among {count} that shared the device.")
    return said


CSV_COLUMNS = (
    *("study", "arm", "n", "failed", "top1", "sd", "baseline", "pairs", "difference", "low", "high", "p", "detectable"),
    *(*NUMBERS, "parameters", "gmacs", "wall_seconds", "pictures_per_second", "settings"),
)


def csv_rows(compared: Sequence[Compared]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for one in compared:
        for arm in one.arms:
            test = arm.comparison
            row: dict[str, object] = {"study": one.study.name, "arm": arm.arm, "n": arm.n, "failed": len(arm.failures)}
            row |= {"top1": arm.mean(), "sd": arm.spread(), "baseline": arm.baseline, "settings": arm.settings}
            if test is not None:
                row |= {"pairs": test.n, "difference": test.difference, "low": test.low, "high": test.high}
                row |= {"p": test.p, "detectable": test.detectable}
            for name in (*NUMBERS, "parameters", "gmacs"):
                row[name] = arm.mean(name)
            for name in ("wall_seconds", "pictures_per_second"):
                row[name] = arm.median(name)
            found.append(row)
    return found


def write_csv(compared: Sequence[Compared], file: Path) -> None:
    try:
        with file.open("w", encoding="utf-8", newline="") as opened:
            writer = csv.DictWriter(opened, CSV_COLUMNS, lineterminator="\n")
            writer.writeheader()
            for row in csv_rows(compared):
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def signed(value: float) -> str:
    return f"{value:+.2f}"


def interval(comparison: Comparison | None) -> str:
    return "" if comparison is None else f"{comparison.low:+.2f} to {comparison.high:+.2f}"


def probability(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    return "<0.001" if comparison.p < 0.0005 else f"{comparison.p:.3f}"
