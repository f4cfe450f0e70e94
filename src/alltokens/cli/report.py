"""alltokens report: one HTML page of what became of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from alltokens.cli._options import Positional, asks_for_help, read, show_help, shown_as
from alltokens.errors import UserError

PROGRAM = "alltokens report"


@dataclass(frozen=True)
class Command:
    runs: Annotated[Positional[tuple[str, ...]], shown_as("RUN...")] = ()
    """The folders of one run or several; runs that differ by their seed alone are shown as mean with band."""
    out: Annotated[str, shown_as("FILE")] = "report.html"
    """The page: one HTML file that needs nothing but itself."""
    study: tuple[str, ...] = ()
    """Studies (.yaml) whose comparisons stand on the page too, out of the results.csv beside them."""
    pictures: int | None = None
    """How many validation pictures are looked at; the default is fewer for models that cost more, 0 is none."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "Curves, confusions, best and worst pictures, mixed samples and cost of runs.")
        return 0
    command = read(Command(), words, PROGRAM)
    if not command.runs:
        raise UserError(f"report on which runs? {PROGRAM} RUN... --out {command.out}")
    from alltokens.report.report_page import write_report

    page = write_report(
        command.runs,
        command.out,
        pictures=command.pictures,
        studies=command.study,
        progress=lambda what: print(what, file=sys.stderr),
    )
    counted = f"{page.runs} run{'s' if page.runs > 1 else ''}"
    print(f"wrote {page.file}: {counted}, {page.bytes / 1e6:.1f} MB")
    return 0
