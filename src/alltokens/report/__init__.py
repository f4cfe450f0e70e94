"""Ring 3: pictures of what labels, mixes and models do, and the pages that hold them.

`figures` are the drawing functions: data in, a matplotlib Figure out, no global state. `style` holds colours and the
few things that all drawings share, `show` finds the right drawing for a value (public as `alltokens.show`).

`write_report` (in `report_page`) makes the page of runs: `runs` reads what they logged, `run_pictures` looks at their
pictures with their weights, `sections` lists what stands on the page. `label_page` makes the page of a label store.
`html` holds what every page shares, the templates lie in `templates/`. A page is one file: nothing is fetched, and no
name of a user's becomes markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alltokens.report.report_page import ReportPage

__all__ = ["write_report"]


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    pictures: int | None = None,
    studies: Sequence[str | Path] = (),
    progress: Callable[[str], None] | None = None,
) -> ReportPage:
    """Write one HTML page about one run or several; see `report_page.write_report`."""
    from alltokens.report import report_page  # matplotlib and jinja2 take a second: not before they are needed

    return report_page.write_report(runs, out, pictures=pictures, studies=studies, progress=progress)
