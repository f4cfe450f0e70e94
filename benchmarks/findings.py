"""What studies found: each comparison beside the published one, judged by its interval alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from alltokens.study.student import Comparison
from alltokens.study.table import ENOUGH, Compared, interval, over_equal_seeds, signed

AGREES, CONTRADICTS, MISSED, SEEN, UNSEEN, OPEN, FEW = KINDS = (
    "Agrees with what was published",
    "Contradicts what was published",
    "Published, but not seen here, though one as large would probably have shown",
    "Seen here, with nothing published beside it",
    "Tried, and no difference seen, with nothing published beside it",
    "Undecided: too noisy for a difference as small as the published one",
    f"Fewer than {ENOUGH} seeds",
)
MEASURES = {"top1": "", "token_accuracy": ", token accuracy", "pointing": ", pointing", "token_iou": ", token IoU"}


class Finding(NamedTuple):
    kind: str  # one of KINDS
    verdict: str
    name: str
    numbers: str  # ours, and what was published
    of: tuple[str, ...]  # both arms' settings and the measure: studies that share arms share findings

    @property
    def text(self) -> str:
        return f"{self.name}: {self.numbers}: {self.verdict}."


def findings(one: Compared) -> list[Finding]:
    """Of top-1, once for each paper that has both arms; of token predictions where they were measured.

    Arms that have no two seeds in common with their baseline are not among them.
    """
    found: list[Finding] = []
    for arm in one.arms:
        if arm.baseline is None:
            continue
        other = one.arm(arm.baseline)
        both = {arm.arm, other.arm}
        papers = [
            (paper.top1[arm.arm] - paper.top1[other.arm], place)
            for place, paper in enumerate(one.study.plan.paper, 1)
            if both <= set(paper.top1)
        ]
        leaky = {one.study.arms[name].data.labels for name in both} & set(one.study.plan.leaks)
        leak = f" (labels {', '.join(sorted(map(str, leaky)))}: see the leak)" if leaky else ""
        for measure, words in MEASURES.items():
            test = over_equal_seeds(arm.rows, other.rows, measure)
            if test is None:
                continue
            name = f"{arm.arm} against {other.arm}{words}{leak}"
            of = (*sorted((arm.settings, other.settings)), measure)
            for published, place in papers if measure == "top1" and papers else [(None, 0)]:
                beside = "" if published is None else f"published {signed(published)} [{place}], "
                ours = f"here {signed(test.difference)} ({interval(test)}), n = {test.n}"
                found.append(Finding(*judge(test, published), name, beside + ours, of))
    return found


def judge(test: Comparison, published: float | None) -> tuple[str, str]:
    """The kind of a finding and its words. Of few seeds nothing is claimed, whatever they say."""
    if test.n < ENOUGH:
        return FEW, f"undecided, of fewer than {ENOUGH} seeds nothing is claimed"
    if test.low > 0 or test.high < 0:
        decided = "the interval leaves zero out"
        if published is None:
            return SEEN, decided
        if test.difference * published > 0:
            return AGREES, f"{decided}, in the published direction"
        return CONTRADICTS, f"{decided}, in the opposite direction"
    zero = f"zero lies in the interval; a true difference of {test.detectable:.2f} would probably have shown"
    if published is None:
        return UNSEEN, zero
    if abs(published) >= test.detectable:
        return MISSED, f"{zero}, and the published one is no smaller"
    return OPEN, f"{zero}, and the published one is smaller"


def in_short(compared: Sequence[Compared]) -> list[str]:
    """All comparisons of enough seeds by what they came to; what studies share stands with the first of them."""
    lines_of: dict[str, list[str]] = {kind: [] for kind in KINDS}
    told: dict[tuple[str, ...], bool] = {}  # of each comparison, whether it has enough seeds
    for one in compared:
        new = [found for found in findings(one) if found.of not in told]
        told |= {found.of: found.kind != FEW for found in new}
        for found in new:
            lines_of[found.kind].append(f"- [{one.study.name}](#{one.study.name}), {found.name}: {found.numbers}")
    lines_of.pop(FEW)
    decided = sum(told.values())
    few = len(told) - decided
    if not decided:
        return [f"No comparison has {ENOUGH} seeds yet, so nothing is claimed."]
    lines = [
        f"{decided} comparisons of {ENOUGH} seeds or more; {few} more have fewer. Intervals are of 95 %: of twenty",
        "comparisons without any difference, one leaves zero out by chance. Numbers are percentage points, of top-1",
        "where nothing else is said; the papers [1], [2] are named below, with each study.",
    ]
    for kind, found in lines_of.items():
        if found:
            lines += ["", f"**{kind}**", "", *found]
    return lines
