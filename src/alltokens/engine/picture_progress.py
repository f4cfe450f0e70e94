"""How far a pass over pictures is: a live line on a terminal, a plain line now and then everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich import progress as bars
from rich.console import Console

from alltokens.engine.progress import duration

SECONDS_BETWEEN_LINES = 10.0


class Pace:
    """How long the first pictures took, and how quickly the others came after them.

    One number for both would hide either: building a model, a GPU's first forward and starting workers take seconds,
    however few pictures there are. Called with how many are done, after each batch; the first call makes the start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._ended = clock()
        self._first: tuple[float, int] | None = None
        self._last = 0

    def __call__(self, done: int) -> None:
        self._first = self._first or (self._clock(), done)
        self._last = done

    def end(self) -> None:
        """All is written."""
        self._ended = self._clock()

    @property
    def seconds(self) -> float:
        """Altogether."""
        return self._ended - self._begun

    @property
    def to_first(self) -> float | None:
        """Seconds; None if there was nothing to do."""
        return None if self._first is None else self._first[0] - self._begun

    @property
    def after(self) -> float | None:
        """Pictures/s after the first ones; None if there were no others."""
        if self._first is None or self._last == self._first[1]:
            return None
        return (self._last - self._first[1]) / max(self._ended - self._first[0], 1e-9)


class PictureProgress:
    """Called with how many pictures are done, and of how many (None: not known).

    Pace and time left are reckoned from the first call on: what was done before it, in an earlier run perhaps, counts
    as done but not as speed. On stderr, so that what a command finds out can go into a pipe.
    """

    def __init__(
        self,
        what: str,
        *,
        quiet: bool = False,
        lines: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lines=False` shows nothing where there is no terminal."""
        self.what = what
        self._console = None if quiet else console or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._lines, self._clock = lines, clock
        self._first: tuple[float, int] | None = None
        self._said = clock()
        self._live: bars.Progress | None = None

    def __enter__(self) -> PictureProgress:
        if self._console is not None and self._console.is_terminal:
            columns = (
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(bar_width=None),
                bars.TextColumn("{task.fields[tail]}", markup=False),
            )
            self._live = bars.Progress(*columns, console=self._console, transient=True, expand=True)
            self._live.add_task(self.what, total=None, tail="starting")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, done: int, total: int | None) -> None:
        if self._console is None:
            return
        now = self._clock()
        self._first = self._first or (now, done)
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=done, total=total, tail=self._tail(now, done, total))
        elif self._lines and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self._console.print(f"{self.what}  {self._tail(now, done, total)}", soft_wrap=True)

    def _tail(self, now: float, done: int, total: int | None) -> str:
        parts = [f"{done:,} pictures" if total is None else f"{done:,} of {total:,} pictures"]
        assert self._first is not None
        seconds, counted = now - self._first[0], done - self._first[1]
        if seconds > 0 and counted > 0:
            pace = counted / seconds
            parts.append(f"{pace:,.0f} pictures/s" if pace >= 100 else f"{pace:.1f} pictures/s")
            if total is not None:
                parts.append(f"{duration((total - done) / pace)} left")
        return "  ".join(parts)
