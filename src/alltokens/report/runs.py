"""What the folders of runs say, and runs that differ by nothing but their seed taken together.

A *group* is the runs of one setting: its numbers are means over seeds, with their number n and standard deviation.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alltokens.engine.config import RunConfig
from alltokens.engine.loading import flatten, to_mapping
from alltokens.engine.run_folder import RunFolder, load_config, read_metrics
from alltokens.errors import UserError

SEED = "train.seed"
# These say what a run does to whom, not how: runs that differ in them alone are runs of one setting.
_NOT_A_SETTING = ("about.", "log.", "data.workers", "checkpoint.", SEED)
MOST_POINTS = 300  # of a curve on the page


class Line(NamedTuple):
    """A curve over epochs; with several seeds their mean, and the standard deviation around it."""

    x: list[float]
    y: list[float]
    spread: list[float] | None  # None for one run
    n: int  # runs


class Number(NamedTuple):
    mean: float
    spread: float | None  # the standard deviation over the runs; None for one run
    n: int


class RunRecord(NamedTuple):
    folder: Path
    name: str
    config: RunConfig
    facts: dict[str, Any]  # run.json
    updates: list[dict[str, Any]]  # metrics of training, a line for each interval
    evaluations: list[dict[str, Any]]

    @property
    def updates_per_epoch(self) -> float:
        if self.evaluations:
            return self.evaluations[-1]["update"] / self.evaluations[-1]["epoch"]
        return self.updates[-1]["update"] / self.updates[-1]["epoch"] if self.updates else 1.0

    @property
    def seconds(self) -> float:
        """Spent training, without evaluations."""
        return sum(self._seconds())

    def seconds_of_epochs(self) -> list[float]:
        """Of every complete epoch."""
        epochs: dict[int, float] = {}
        for line, seconds in zip(self.updates, self._seconds(), strict=True):
            epochs[line["epoch"]] = epochs.get(line["epoch"], 0.0) + seconds
        done = int(self.updates[-1]["update"] / self.updates_per_epoch + 1e-6) if self.updates else 0
        return [seconds for epoch, seconds in sorted(epochs.items()) if epoch <= done]

    def _seconds(self) -> list[float]:
        batch = self.config.train.batch_size
        starts = [0, *(line["update"] for line in self.updates)]
        return [
            (line["update"] - start) * batch / max(line["pictures_per_second"] or 0, 1e-9)
            for start, line in zip(starts, self.updates, strict=False)
        ]


class Group(NamedTuple):
    name: str
    runs: tuple[RunRecord, ...]

    @property
    def config(self) -> RunConfig:
        return self.runs[0].config

    @property
    def best(self) -> RunRecord:
        """The run with the highest top-1; pictures are made with its weights."""
        return max(self.runs, key=lambda run: max((scores_of(one)["top1"] for one in run.evaluations), default=-1.0))

    def number(self, value: Callable[[RunRecord], float | None]) -> Number | None:
        """One number of every run that has it, together."""
        found = [one for one in map(value, self.runs) if one is not None and math.isfinite(one)]
        if not found:
            return None
        return Number(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))

    def line(self, points: Callable[[RunRecord], Iterable[tuple[float, float | None]]]) -> Line | None:
        """One curve of every run, together: where several runs have a point, the mean of those."""
        values: dict[float, list[float]] = {}
        for run in self.runs:
            for x, y in points(run):
                if y is not None and math.isfinite(y):
                    values.setdefault(round(x, 6), []).append(y)
        if not values:
            return None
        x = sorted(values)
        y = [statistics.fmean(values[at]) for at in x]
        several = len(self.runs) > 1
        spread = [statistics.stdev(values[at]) if len(values[at]) > 1 else 0.0 for at in x] if several else None
        return _thinned(Line(x, y, spread, len(self.runs)))


def read_run(folder: Path) -> RunRecord:
    config = load_config(folder)
    facts_file = RunFolder(folder).facts_file
    facts = json.loads(facts_file.read_text(encoding="utf-8")) if facts_file.is_file() else {}
    metrics = read_metrics(folder)
    kinds = {kind: [line for line in metrics if line.get("kind") == kind] for kind in ("train", "evaluation")}
    return RunRecord(folder, folder.resolve().name, config, facts, kinds["train"], kinds["evaluation"])


def read_runs(folders: Sequence[str | Path]) -> list[RunRecord]:
    """The runs, each once, in the order in which they were named."""
    if not folders:
        raise UserError("a report wants at least one run folder")
    return [read_run(path) for path in {Path(one).resolve(): Path(one) for one in folders}.values()]


def grouped(records: Sequence[RunRecord]) -> list[Group]:
    """Runs of equal settings but for their seed are one group; the first run's place is its group's."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(json.dumps(settings(record.config), sort_keys=True, default=str), []).append(record)
    names: dict[str, int] = {}
    groups: list[Group] = []
    for runs in found.values():
        name = runs[0].name if len(runs) == 1 else _common_name([run.name for run in runs])
        names[name] = names.get(name, 0) + 1
        groups.append(Group(name if names[name] == 1 else f"{name} ({names[name]})", tuple(runs)))
    return groups


def settings(config: RunConfig) -> dict[str, Any]:
    """What makes a run: every setting, flat, without the seed and without what changes no number."""
    flat = flatten(to_mapping(config))
    return {name: value for name, value in flat.items() if not name.startswith(_NOT_A_SETTING)}


def differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """(setting, its value in every group) where they are not all equal."""
    all_settings = [settings(group.config) for group in groups]
    names = list(dict.fromkeys(name for one in all_settings for name in one))
    rows = [(name, [one.get(name) for one in all_settings]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def scores_of(evaluation: dict[str, Any]) -> dict[str, float]:
    """What counts of an evaluation: that of the averaged weights where the run keeps an average."""
    return {name: evaluation.get(f"average_{name}", evaluation[name]) for name in ("top1", "top5", "loss")}


def _common_name(names: Sequence[str]) -> str:
    """aligned-0, aligned-1, aligned-2 -> aligned"""
    start = names[0]
    for name in names[1:]:
        while not name.startswith(start):
            start = start[:-1]
    return re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", start) or names[0]


def _thinned(line: Line) -> Line:
    """At most MOST_POINTS points: means of as many neighbours as it takes."""
    step = -(-len(line.x) // MOST_POINTS)
    if step == 1:
        return line

    def means(values: list[float]) -> list[float]:
        return [statistics.fmean(values[at : at + step]) for at in range(0, len(values), step)]

    return Line(means(line.x), means(line.y), None if line.spread is None else means(line.spread), line.n)
