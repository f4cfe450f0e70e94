"""`alltokens report`: what became of runs, in one HTML file that opens by double click."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alltokens.errors import UserError
from alltokens.explain.subject import open_run
from alltokens.models.cost import gmacs, parameter_count
from alltokens.report.html import write_page
from alltokens.report.run_pictures import (
    judge,
    labelled_pictures,
    mixes,
    overlays,
    picture_count,
    spread_out,
    validation_pictures,
)
from alltokens.report.runs import Group, grouped, read_runs
from alltokens.report.section_parts import Looked, Report
from alltokens.report.sections import SECTIONS
from alltokens.version import __version__

MOST_GROUPS = 4  # whose pictures are shown; numbers and curves are of all


class ReportPage(NamedTuple):
    file: Path
    runs: int
    settings: int  # groups of runs that differ by no more than their seed
    bytes: int


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    pictures: int | None = None,
    studies: Sequence[str | Path] = (),
    progress: Callable[[str], None] | None = None,
) -> ReportPage:
    """Write the page of one run or several; runs of equal settings but their seed are shown together.

    Confusions, samples and overlays come from the weights and the pictures of each setting's best run; where those are
    gone, the page says so. `pictures` is how many validation pictures are looked at (0: none, no weights are opened);
    by default fewer of a model that costs more. `progress` is told what is being done.
    The comparisons of `studies`, YAML files with their results beside them, come last.
    """
    if pictures is not None and pictures < 0:
        raise UserError(f"pictures must be at least 0, got {pictures}")
    from alltokens.study.page import report_section  # it draws with the report's own parts

    compared = [report_section(file) for file in studies]
    say = progress or (lambda what: None)
    groups = grouped(read_runs(runs))
    looked: list[Looked] = []
    for number, group in enumerate(groups):
        if pictures == 0:
            looked.append(Looked(group, reason="No pictures were asked for."))
        elif number >= MOST_GROUPS:
            looked.append(Looked(group, reason=f"Pictures are made for the first {MOST_GROUPS} settings only."))
        else:
            say(f"looking at the pictures of {group.best.name}")
            looked.append(_look(group, pictures))
    report = Report(groups, looked)
    sections: list[dict[str, Any]] = []
    for title, build in SECTIONS:
        html = build(report)
        if html is not None:
            anchor = re.sub(r"[^a-z]+", "-", title.lower())
            sections.append({"title": title, "anchor": anchor, "html": html})
    sections += [{"title": title, "anchor": f"study-{n}", "html": html} for n, (title, html) in enumerate(compared)]
    count = sum(len(group.runs) for group in groups)
    named = groups[0].name if len(groups) == 1 else f"{count} runs of {len(groups)} settings"
    size = write_page(
        "report.html",
        Path(out),
        heading=f"Report of {named}",
        about=_about(groups),
        sections=sections,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    return ReportPage(Path(out), count, len(groups), size)


def _look(group: Group, pictures: int | None) -> Looked:
    """All that needs the weights; what cannot be had is told in `reason`."""
    run = group.best
    try:
        subject = open_run(run.folder)
    except (UserError, OSError) as error:
        return Looked(group, reason=f"No pictures: {error}")
    net, names = subject.net, subject.class_names
    found = Looked(group, names, subject.colours, parameter_count(net), gmacs(net, subject.image_size))
    try:
        source = validation_pictures(subject)
        indices = spread_out(source, pictures or picture_count(subject))
        found = found._replace(judgement=judge(subject, source, indices))
        taught_by, store = labelled_pictures(subject, source)
        found = found._replace(mixes=mixes(subject, taught_by, store), labelled=store is not None)
        return found._replace(overlays=tuple(overlays(subject, taught_by, store)))
    except (UserError, OSError) as error:
        return found._replace(reason=f"The pictures of this run cannot be shown: {error}")


def _about(groups: Sequence[Group]) -> str:
    """Model, pictures, method: of all runs, where they agree."""
    told = {
        "model": {group.config.model.name for group in groups},
        "pictures": {group.config.data.root or group.config.data.train or "" for group in groups},
        "labels by": {_method(group) for group in groups},
    }
    return "; ".join(f"{name} {values.pop()}" for name, values in told.items() if len(values) == 1) + "."


def _method(group: Group) -> str:
    """source x mixer x follower"""
    chosen = group.config.supervision
    return f"{chosen.source} \N{MULTIPLICATION SIGN} {chosen.mixer.name} \N{MULTIPLICATION SIGN} {chosen.follower.name}"
