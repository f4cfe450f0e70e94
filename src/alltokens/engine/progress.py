"""What a run shows while it goes on, and at its end: a live line on a terminal, plain lines everywhere else.

Only the main process of a run shows anything; the others, and library use, pass `quiet=True`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alltokens.errors import printable

if TYPE_CHECKING:
    from alltokens.engine.metrics import Scores


_GAP = 2  # blanks between the columns of a table
_WORDS = 24  # so wide may a column of words be where a terminal is narrow


def output_console(file: TextIO | None = None) -> Console:
    """Where text for people goes. Colours and wrapping on a terminal only; a pipe gets whole lines."""
    console = Console(file=file or sys.stdout, highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(file=console.file, width=1_000, no_color=True, emoji=False)


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    console: Console | None = None,
) -> None:
    """Print aligned columns; those in `numbers` to the right.

    Where a terminal is too narrow, words are folded, but for short names in the first column; numbers that have no room
    follow below, beside the columns that led to them.
    """
    console = console or output_console()
    lines = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    for part, columns in enumerate(_side_by_side(headers, lines, numbers, console.width)):
        if part:
            console.print()
        grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=any(headers), header_style="bold")
        for column in columns:
            name = column == 0 and max(map(len, (row[0] for row in lines)), default=0) <= console.width // 2
            grid.add_column(
                Text(headers[column]),
                justify="right" if column in numbers else "left",
                no_wrap=name or column in numbers,
                overflow="fold",
            )
        for line in lines:
            grid.add_row(*(Text(line[column]) for column in columns))
        if console.is_terminal:
            console.print(grid)
            continue
        with console.capture() as captured:
            console.print(grid)
        for line in captured.get().splitlines():  # without the blanks that fill a column up
            console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _side_by_side(
    headers: Sequence[str], lines: Sequence[Sequence[str]], numbers: Sequence[int], width: int
) -> list[list[int]]:
    """The columns of each part of a table that is no wider than `width`, if its words are folded.

    A column without a header belongs to the one before it.
    """
    widths = [max(len(row[column]) for row in (headers, *lines)) + _GAP for column in range(len(headers))]
    widths = [needed if column in numbers else min(needed, _WORDS) for column, needed in enumerate(widths)]
    leading = list(range(min(numbers, default=len(headers))))
    parts = [leading.copy()]
    begins = [column for column in range(len(leading), len(headers)) if headers[column] or column == len(leading)]
    for begin, end in pairwise([*begins, len(headers)]):
        if len(parts[-1]) > len(leading) and sum(widths[i] for i in [*parts[-1], *range(begin, end)]) > width + _GAP:
            parts.append(leading.copy())
        parts[-1] += range(begin, end)
    return parts


def closing_table(pairs: Sequence[tuple[str, str]], *, console: Console | None = None) -> None:
    """What a run came to, one line for each thing."""
    table(("", ""), pairs, console=console)


def duration(seconds: float) -> str:
    """0:07, 12:34, 1:02:03, 2 d 03:04:05"""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class Progress:
    """How far a run is. `step` once per log interval, `evaluated` after each evaluation, `line` for anything else.

    The time left is reckoned from the pace since the start, evaluation and checkpoints included.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` updates, of which `done` were done before this process began."""
        self.total = total
        self.done = done
        self._console = None if quiet else console or output_console()
        self._clock = clock
        self._started = clock()
        self._live: bars.Progress | None = None

    def __enter__(self) -> Progress:
        self._started = self._clock()
        if self._console is not None and self._console.is_terminal:
            columns = (
                bars.TextColumn("{task.fields[head]}", markup=False),
                bars.BarColumn(bar_width=None),
                bars.TextColumn("{task.fields[tail]}", markup=False),
            )
            self._live = bars.Progress(*columns, console=self._console, transient=True, expand=True)
            self._live.add_task("", total=self.total, completed=self.done, head="starting", tail="")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(
        self, *, update: int, epoch: int, loss: float, speed: float, rate: float, best: float | None = None
    ) -> None:
        """After `update` updates: loss of the interval, pictures a second, learning rate, best top-1 in percent."""
        if self._console is None:
            return
        found = f"  best {best:.2f} %" if best else ""
        left = self.seconds_left(update)
        shown = "" if left is None else f"  {duration(left)} left"
        tail = f"loss {loss:.4f}{found}  {speed:,.0f} pictures/s{shown}"
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=update, head=f"epoch {epoch}", tail=tail)
        else:
            self.line(f"epoch {epoch}  update {update}/{self.total}  rate {rate:.2e}  {tail}")

    def evaluated(self, *, epoch: int, train_loss: float, scores: Scores, best: float) -> None:
        """A line for each evaluation."""
        self.line(
            f"epoch {epoch}  top-1 {scores.top1:.2f} %  top-5 {scores.top5:.2f} %  loss {scores.loss:.4f}  "
            f"(training {train_loss:.4f})  best {best:.2f} %"
        )

    def line(self, text: str) -> None:
        """A line that stays, above the live one."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def seconds_left(self, update: int) -> float | None:
        """None before the first update of this process."""
        count = update - self.done
        return (self._clock() - self._started) / count * (self.total - update) if count > 0 else None
