"""The sections of a report, in their order: each takes the report and gives its part of the page, or None.

A new section is a function, a template beside the others and a line here.
"""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from alltokens.report.number_sections import cost, curves, environment, summary
from alltokens.report.picture_sections import best_and_worst, confusion, layers, mixed_samples, overlays
from alltokens.report.section_parts import Report

Section = tuple[str, Callable[[Report], Markup | None]]

SECTIONS: tuple[Section, ...] = (
    ("Summary", summary),
    ("Curves", curves),
    ("Confusion of classes", confusion),
    ("Best and worst pictures", best_and_worst),
    ("Mixed samples", mixed_samples),
    ("Layer by layer", layers),
    ("Labels of tokens", overlays),
    ("Cost", cost),
    ("Environment and command", environment),
)
