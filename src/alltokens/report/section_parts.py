"""What the sections of a report are made from, and what they share.

Shapes: L layers.

Charts are data (`chart`): the page draws them and makes them answer to the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from markupsafe import Markup
from torch import Tensor

from alltokens.report.charts import series_of
from alltokens.report.html import render
from alltokens.report.run_pictures import Judgement, Mixes, Overlay
from alltokens.report.runs import Group, Line


class Looked(NamedTuple):
    """What was found with a group's weights and pictures."""

    group: Group
    class_names: tuple[str, ...] = ()
    colours: dict[str, Any] | None = None
    parameters: int | None = None
    gmacs: float | None = None
    judgement: Judgement | None = None
    mixes: Mixes | None = None
    overlays: tuple[Overlay, ...] = ()
    labelled: bool = False  # whether there are label maps
    reason: str = ""  # why there are no pictures, if so


class Report(NamedTuple):
    groups: list[Group]
    looked: list[Looked]  # one for each group

    @property
    def several(self) -> bool:
        return len(self.groups) > 1


def chart(title: str, x: str, lines: Iterable[tuple[str, Line | None]], unit: str = "", **options: Any) -> Any:
    """What charts.js draws; None if no line has a point. A line's colour is its place in the list."""
    drawn = [
        {"name": name, "series": at, "x": line.x, "y": line.y, "spread": line.spread, "n": line.n}
        for at, (name, line) in enumerate(lines)
        if line is not None
    ]
    return {"title": title, "x": x, "unit": unit, "lines": drawn, **options} if drawn else None


def layer_chart(title: str, ratios: Mapping[str, Tensor]) -> Any:
    """The partner's share of what is classified, layer by layer (L + 1,), a line for each method; nan is left out."""
    lines: list[tuple[str, Line | None]] = [("", None)] * (1 + max(series_of(ratios), default=0))
    for at, (name, ratio) in zip(series_of(ratios), ratios.items(), strict=True):
        known = [(float(layer), 100 * float(value)) for layer, value in enumerate(ratio) if math.isfinite(float(value))]
        lines[at] = name, Line([x for x, _ in known], [round(y, 3) for _, y in known], None, 1)
    return chart(title, "layer", lines, " %", limits=[0, 100], whole=True, apart=True)


def for_each_group(template: str, report: Report, build: Callable[[Looked], dict[str, Any] | None]) -> Markup:
    """A section that has a part for each group: what `build` makes of it, or why there is nothing."""
    parts: list[dict[str, Any]] = []
    for one in report.looked:
        built = build(one) or {"reason": one.reason}
        parts.append({"reason": "", "group": one.group.name} | built)
    return render(template, looked=parts, several=report.several)
