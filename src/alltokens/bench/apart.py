"""Several comparisons in one run, the arms of some in processes of their own.

Compiling keeps one Python thread busy for a minute an arm, so arms that are compiled build and warm up at once, those
of several comparisons together, each in its process. Then one at a time is measured, as `compare` does it, on a device
that is otherwise idle: the others wait for a word of the parent, and hold little of its memory.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch

from alltokens.bench.timing import (
    Build,
    Step,
    Timing,
    allocated,
    check_rounds,
    compare,
    measure,
    out_of_memory,
    take_turns,
    too_big,
)
from alltokens.errors import TrainingFailed, UserError

T = TypeVar("T")
START = "spawn"  # a forked child cannot use a device that its parent has touched
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
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
    at_once = max(1, _cores() // 2) if at_once is None else at_once
    if at_once < 1:
        raise UserError(f"at_once must be at least 1, got {at_once}")
    found: dict[int, dict[str, Timing]] = {}
    apart = [place for place, comparison in enumerate(comparisons) if comparison.apart]
    for place, comparison in enumerate(comparisons):
        if not comparison.apart:
            torch._dynamo.reset()
            say = partial(_say, progress, comparison.title)
            found[place] = compare(comparison.arms, device, **pace._asdict(), progress=say)
    _free(device)  # what comparisons of this process leave in its allocator
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
    everyone: list[_Arm] = []
    found: list[dict[str, Timing]] = []
    try:
        with _surroundings(min(at_once, sum(len(comparison.arms) for comparison in group))):
            for comparison in group:
                for name, build in comparison.arms.items():
                    everyone.append(_Arm(comparison.title, name, build, device, pace.warmup))
        for crowded in _warm_up(everyone, at_once, progress):  # others had taken the memory: once more, alone
            if _warm_up([crowded], 1, progress):
                raise _NoRoom(crowded.name)
        left = list(everyone)
        for comparison in group:
            arms, left = left[: len(comparison.arms)], left[len(comparison.arms) :]
            found.append(_take_turns(comparison.title, arms, device, pace, progress))
            _end(arms)
    finally:
        _end(everyone)
    return found


def _warm_up(arms: Sequence[_Arm], at_once: int, progress: Callable[[str], None]) -> list[_Arm]:
    """Returns those for which the memory did not do."""
    waiting, busy, crowded = list(arms), list[_Arm](), list[_Arm]()
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
    title: str, arms: Sequence[_Arm], device: torch.device, pace: Pace, progress: Callable[[str], None]
) -> dict[str, Timing]:
    needed = MARGIN * sum(arm.warm.between_steps for arm in arms if arm.warm)
    keep = needed <= arms[0].asked("room")

    def turn(arm: _Arm) -> tuple[float, int]:
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


class _Warm(NamedTuple):
    own: int  # bytes that stay between steps
    between_steps: int  # that the allocator would keep besides


class _Arm:
    """The parent's side of a process."""

    def __init__(self, title: str, name: str, build: Build, device: torch.device, warmup: int) -> None:
        self.title, self.name = title, name
        self.warm: _Warm | None = None
        context: Any = multiprocessing.get_context(START)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, build, device, warmup, torch.get_num_threads()))
        self.process.start()
        other.close()

    def ask(self, what: str, *arguments: object) -> None:
        with suppress(ConnectionError):  # it has died; listening to it will say so
            self.pipe.send((what, arguments))

    def answer(self) -> Any:
        try:
            error, what = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise TrainingFailed(f"{self.title}: {self.name}: {self._fate()}") from None
        if error is UserError:
            raise UserError(what)
        if error is not None:
            raise TrainingFailed(f"{self.title}: {self.name} failed\n{what}")
        return what

    def asked(self, what: str, *arguments: object) -> Any:
        self.ask(what, *arguments)
        return self.answer()

    def _fate(self) -> str:
        self.process.join(10)
        code = self.process.exitcode
        return (
            f"its process ended {f'by signal {-code}' if code is not None and code < 0 else f'with exit code {code}'}"
        )


def _end(arms: Sequence[_Arm]) -> None:
    for arm in arms:
        arm.process.kill()
    for arm in arms:
        arm.process.join()
        arm.pipe.close()


class _Child:
    """The other side: what a process answers when it is asked."""

    def __init__(self, build: Build, device: torch.device, warmup: int) -> None:
        self.build, self.device, self.warmup = build, device, warmup
        self.step: Step | None = None
        self.cold = True  # the allocator holds nothing for the next step

    def warm_up(self) -> _Warm:
        if self.step is None:
            self.step = self.build()
        for _ in range(self.warmup):
            self.step()
        own = allocated(self.device)
        return _Warm(own, self._free())

    def room(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def turn(self, steps: int, keep: bool) -> tuple[float, int]:
        assert self.step is not None
        for _ in range(2 if self.cold else 1):  # the one before was another process's
            self.step()
        self.cold = False
        outcome = measure(self.step, steps, self.device, time.perf_counter)
        if not keep:
            self._free()
        return outcome

    def _free(self) -> int:
        self.cold = True
        return _free(self.device)


def _work(pipe: Connection, build: Build, device: torch.device, warmup: int, threads: int) -> None:
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    child = _Child(build, device, warmup)
    with suppress(EOFError, ConnectionError):
        while True:
            what, arguments = pipe.recv()
            pipe.send(_answer(getattr(child, what), arguments, device))


def _answer(method: Callable[..., object], arguments: Sequence[object], device: torch.device) -> tuple[Any, object]:
    """(Kind of error or None, what came of it); where memory does not do, nothing, and what was taken is free again."""
    try:
        return None, method(*arguments)
    except UserError as error:
        return UserError, str(error)
    except Exception as error:
        if not out_of_memory(error):
            return RuntimeError, traceback.format_exc()
    _free(device)
    return None, None


def _leave_with_the_parent() -> None:
    """A kill of the parent ends a child in the midst of compiling, too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _surroundings(busy: int) -> Iterator[None]:
    """What children are born into: their share of the cores to compile with, and interrupts left to the parent."""
    given = os.environ.get(COMPILE_THREADS)
    os.environ.setdefault(COMPILE_THREADS, str(max(1, _cores() // busy)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if given is None:
            del os.environ[COMPILE_THREADS]


def _free(device: torch.device) -> int:
    """Give back what the allocator keeps for later; how many bytes that was."""
    if device.type != "cuda":
        return 0
    gc.collect()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(progress: Callable[[str], None], title: str, text: str) -> None:
    progress(f"{title}: {text}")
