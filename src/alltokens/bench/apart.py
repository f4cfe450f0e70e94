"""Several comparisons in one run, the arms of some in processes of their own.

Compiling keeps one Python thread busy for a minute an arm, so arms that are compiled build and warm up at once, those
of several comparisons together, each in its process. Then one at a time is measured, as `compare` does it, on a device
that is otherwise idle: the others wait for a word of the parent, and hold little of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import NamedTuple, TypeVar

import torch

from alltokens.bench.arm_process import ArmProcess, end, free, surroundings
from alltokens.bench.timing import Build, Timing, check_rounds, compare, take_turns, too_big
from alltokens.data.loader import default_workers
from alltokens.errors import UserError

T = TypeVar("T")
MARGIN = 1.1  # of memory, for what allocators lose between blocks


class Comparison(NamedTuple):
    title: str  # of its lines of progress
    arms: Mapping[str, Build]
    apart: bool = False  # every arm in a process of its own; it must be picklable then


class Pace(NamedTuple):
    """As in `compare`."""

    rounds: int
    seconds: float = math.inf
    steps: int = 1
    warmup: int = 2


def usual_pace(device: torch.device, rounds: int | None, usual: int = 20) -> Pace:
    """Of training steps: `usual` rounds unless others were asked for; on a CPU what a minute gives."""
    if device.type == "cuda":
        return Pace(usual if rounds is None else rounds, steps=5, warmup=10)
    return Pace(20, seconds=60) if rounds is None else Pace(rounds)


def compare_each(
    comparisons: Sequence[Comparison],
    device: torch.device,
    pace: Pace,
    *,
    at_once: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Timing]]:
    """The outcome of each comparison: first those of this process, then those that are apart.

    `at_once` is how many processes warm up at the same time (by default one for two cores), and how many live at the
    same time, unless a single comparison has more arms.
    """
    check_rounds(pace.rounds, pace.steps)
    at_once = default_workers(2) if at_once is None else at_once
    if at_once < 1:
        raise UserError(f"at_once must be at least 1, got {at_once}")
    found: dict[int, dict[str, Timing]] = {}
    apart = [place for place, comparison in enumerate(comparisons) if comparison.apart]
    for place, comparison in enumerate(comparisons):
        if not comparison.apart:
            torch._dynamo.reset()
            say = partial(_say, progress, comparison.title)
            found[place] = compare(comparison.arms, device, **pace._asdict(), progress=say)
    free(device)  # what comparisons of this process leave in its allocator
    if apart and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for group in _groups(apart, [len(comparisons[place].arms) for place in apart], at_once):
        outcomes = _measured([comparisons[place] for place in group], device, pace, at_once, progress)
        found |= zip(group, outcomes, strict=True)
    return [found[place] for place in range(len(comparisons))]


def _groups(members: Sequence[T], sizes: Sequence[int], most: int) -> Iterator[list[T]]:
    """Neighbours, as many as have `most` together, one at the least."""
    group: list[T] = []
    total = 0
    for member, size in zip(members, sizes, strict=True):
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(member)
        total += size
    if group:
        yield group


def _measured(
    group: Sequence[Comparison], device: torch.device, pace: Pace, at_once: int, progress: Callable[[str], None]
) -> list[dict[str, Timing]]:
    """Side by side if the device's memory does for what their arms hold as they wait, otherwise in halves."""
    try:
        return _side_by_side(group, device, pace, at_once, progress)
    except _NoRoom as error:
        if len(group) == 1:
            raise too_big(error.arm) from None
    half = len(group) // 2
    return [
        outcome for part in (group[:half], group[half:]) for outcome in _measured(part, device, pace, at_once, progress)
    ]


def _side_by_side(
    group: Sequence[Comparison], device: torch.device, pace: Pace, at_once: int, progress: Callable[[str], None]
) -> list[dict[str, Timing]]:
    everyone: list[ArmProcess] = []
    found: list[dict[str, Timing]] = []
    try:
        with surroundings(min(at_once, sum(len(comparison.arms) for comparison in group))):
            for comparison in group:
                for name, build in comparison.arms.items():
                    everyone.append(ArmProcess(comparison.title, name, build, device, pace.warmup))
        for crowded in _warm_up(everyone, at_once, progress):  # others had taken the memory: once more, alone
            if _warm_up([crowded], 1, progress):
                raise _NoRoom(crowded.name)
        left = list(everyone)
        for comparison in group:
            arms, left = left[: len(comparison.arms)], left[len(comparison.arms) :]
            found.append(_take_turns(comparison.title, arms, device, pace, progress))
            end(arms)
    finally:
        end(everyone)
    return found


def _warm_up(arms: Sequence[ArmProcess], at_once: int, progress: Callable[[str], None]) -> list[ArmProcess]:
    """Returns those for which the memory did not do."""
    waiting, busy, crowded = list(arms), list[ArmProcess](), list[ArmProcess]()
    ready = 0
    while waiting or busy:
        while waiting and len(busy) < at_once:
            arm = waiting.pop(0)
            progress(f"{arm.title}: warming up: {arm.name}")
            arm.ask("warm_up")
            busy.append(arm)
        heard = wait([arm.pipe for arm in arms])  # from those that are not busy only if they have died
        for arm in [arm for arm in arms if arm.pipe in heard]:
            arm.warm = arm.answer()
            busy.remove(arm)
            if arm.warm is None:
                crowded.append(arm)
            else:
                ready += 1
                progress(f"{arm.title}: ready: {arm.name} ({ready} of {len(arms)})")
    return crowded


def _take_turns(
    title: str, arms: Sequence[ArmProcess], device: torch.device, pace: Pace, progress: Callable[[str], None]
) -> dict[str, Timing]:
    needed = MARGIN * sum(arm.warm.between_steps for arm in arms if arm.warm)
    keep = needed <= arms[0].asked("room")

    def turn(arm: ArmProcess) -> tuple[float, int]:
        outcome = arm.asked("turn", pace.steps, keep)
        if outcome is None:
            raise _NoRoom(arm.name)
        return outcome

    return take_turns(
        {arm.name: partial(turn, arm) for arm in arms},
        rounds=pace.rounds,
        seconds=pace.seconds,
        own_bytes={arm.name: arm.warm.own for arm in arms if arm.warm} if device.type == "cuda" else None,
        progress=partial(_say, progress, title),
    )


class _NoRoom(Exception):
    """The device's memory does not do for this arm, with whatever else lies there."""

    def __init__(self, arm: str) -> None:
        super().__init__(arm)
        self.arm = arm


def _say(progress: Callable[[str], None], title: str, text: str) -> None:
    progress(f"{title}: {text}")
