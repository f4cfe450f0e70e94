"""Arms of a comparison, measured in turn in one run: time, ratio to the first arm, peak memory.

Clocks drift and neighbours come and go, so arms take turns, round after round, and a ratio is that of one round.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from alltokens.errors import UserError

Step = Callable[[], object]
Build = Callable[[], Step]  # an arm
FEWEST = 5  # rounds: for less, quartiles say nothing


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


class Timing(NamedTuple):
    """One arm's outcome."""

    milliseconds: Spread  # of one step
    ratio: Spread  # to the first arm, round by round
    peak_mib: float | None  # what a step takes with this arm alone on the device; None on a CPU


def compare(
    arms: Mapping[str, Build],
    device: torch.device,
    *,
    rounds: int,
    seconds: float = float("inf"),
    steps: int = 1,
    warmup: int = 2,
    clock: Callable[[], float] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Timing]:
    """Build every arm, let it take `warmup` steps that do not count, then time `steps` steps of each, `rounds` times.

    An arm is a function that builds its step. Each round begins with another arm. After `seconds` no further round
    begins, if there were FEWEST. `clock` is a CPU's: by time.process_time what neighbours take does not count.
    """
    check_rounds(rounds, steps)
    ready: dict[str, Step] = {}
    own_bytes: dict[str, int] = {}
    for name, build in arms.items():
        progress(f"warming up: {name}")
        before = allocated(device)
        ready[name] = _warmed_up(name, build, warmup)
        own_bytes[name] = allocated(device) - before
    return take_turns(
        {name: partial(measure, step, steps, device, clock or time.perf_counter) for name, step in ready.items()},
        rounds=rounds,
        seconds=seconds,
        own_bytes=own_bytes if device.type == "cuda" else None,
        progress=progress,
    )


def take_turns(
    turns: Mapping[str, Callable[[], tuple[float, int]]],
    *,
    rounds: int,
    seconds: float,
    own_bytes: Mapping[str, int] | None,
    progress: Callable[[str], None],
) -> dict[str, Timing]:
    """The rounds of `compare`: a turn gives an arm's (seconds of a step, bytes needed beyond its own)."""
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, int] = dict.fromkeys(names, 0)
    begun = time.perf_counter()
    for turn in range(rounds):
        if turn >= FEWEST and time.perf_counter() - begun > seconds:
            break
        progress(f"round {turn + 1} of {rounds}")
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken, extra = turns[name]()
            times[name].append(taken)
            peaks[name] = max(peaks[name], extra)
    return beside(times, own_bytes and {name: (own_bytes[name] + peaks[name]) / 2**20 for name in names})


def beside(seconds: Mapping[str, Sequence[float]], peak_mib: Mapping[str, float] | None = None) -> dict[str, Timing]:
    """What arms took round by round, each beside the first one."""
    base = next(iter(seconds.values()))
    return {
        name: Timing(
            spread([1e3 * value for value in taken]),
            spread([value / reference for value, reference in zip(taken, base, strict=True)]),
            (peak_mib or {}).get(name),
        )
        for name, taken in seconds.items()
    }


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles; of a single value, that value."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def device_name(device: torch.device) -> str:
    """What was measured on, as it goes into tables."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def check_rounds(rounds: int, steps: int) -> None:
    if rounds < 1 or steps < 1:
        raise UserError(f"rounds and steps must be at least 1, got {rounds} and {steps}")


def out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory did not do; libraries and compilers say it in words of their own."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
    )


def too_big(name: str) -> UserError:
    return UserError(f"{name!r} does not fit into the device's memory; try a smaller --batch")


def _warmed_up(name: str, build: Build, warmup: int) -> Step:
    try:
        step = build()
        for _ in range(warmup):
            step()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise too_big(name) from None
    return step


def measure(step: Step, count: int, device: torch.device, clock: Callable[[], float]) -> tuple[float, int]:
    """(Seconds of one step, bytes that it needs on top of what lies there between steps.)"""
    if device.type != "cuda":
        begin = clock()
        for _ in range(count):
            step()
        return (clock() - begin) / count, 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    resting = torch.cuda.memory_allocated(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / count, torch.cuda.max_memory_allocated(device) - resting


def allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
