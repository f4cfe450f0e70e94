"""A study as a picture and as a section of a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from alltokens.report.html import render, write_page
from alltokens.report.style import COLOURS, FAINT, Drawing, as_svg, new_chart, new_drawing
from alltokens.study.plan import load_study
from alltokens.study.results import read_results, results_file
from alltokens.study.table import Compared, columns, compare, sentences
from alltokens.version import __version__


def draw_study(compared: Compared) -> Drawing:
    """Each arm's top-1: every seed as a dot, their mean with its 95 % interval."""
    arms = [arm for arm in compared.arms if arm.n]
    figure = new_drawing(6.0, 1.0 + 0.3 * max(1, len(arms)))
    axes = new_chart(figure, "", "top-1, %", "")
    baseline = next((arm.mean() for arm in arms if arm.baseline is None), None)
    if baseline is not None:
        axes.axvline(baseline, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    for place, arm in enumerate(arms):
        values = arm.values("top1")
        axes.plot(values, [place + 0.22] * len(values), "o", color=FAINT, markersize=3, alpha=0.8)
        mean, half = arm.mean(), arm.half_interval()
        colour = COLOURS[1] if arm.baseline is None else COLOURS[0]
        axes.errorbar([mean], [place], xerr=None if half is None else [half], fmt="o", color=colour, capsize=3)
    axes.set_yticks(range(len(arms)), [f"{arm.arm} (n = {arm.n})" for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    return figure


def study_section(compared: Compared) -> Markup:
    """Table, plot and what must be said beside them; belongs into `sections` of the page report.html."""
    shown = columns(compared)
    rows: list[dict[str, Any]] = []
    for arm in compared.arms:
        cells = [cell(arm) for _, cell in shown]
        rows.append({"name": arm.arm, "cells": [{"text": text, "value": _sortable(text)} for text in cells]})
    return render(
        "sections/study.html",
        about=compared.study.plan.about,
        heads=[head for head, _ in shown],
        rows=rows,
        plot=Markup(as_svg(draw_study(compared))) if compared.n else None,
        sentences=sentences(compared),
    )


def report_section(study_file: str | Path, out: str | Path | None = None) -> tuple[str, Markup]:
    """Title and section of a study's file, with the results beside it (or in the folder `out`)."""
    study = load_study(study_file)
    rows = read_results(results_file(study.file, out))
    return f"Study {study.name}", study_section(compare(study, rows))


def write_study_page(compared: Sequence[Compared], file: Path) -> int:
    """One HTML file that needs nothing but itself; its size in bytes."""
    names = ", ".join(one.study.name for one in compared)
    return write_page(
        "report.html",
        file,
        heading=f"Study {names}" if len(compared) == 1 else "Studies",
        about=f"{sum(one.n for one in compared)} runs: {names}.",
        sections=[
            {"title": one.study.name, "anchor": f"study-{number}", "html": study_section(one)}
            for number, one in enumerate(compared)
        ],
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _sortable(text: str) -> str:
    """What a table sorts a cell by: its number; an empty cell comes last."""
    return text.split(" ")[0].replace(",", "").replace("+", "") or "-1e9"
