"""The sections of a report that are numbers: summary, curves, cost, environment."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from markupsafe import Markup

from alltokens.engine.loading import to_yaml
from alltokens.engine.progress import duration
from alltokens.report.html import render
from alltokens.report.runs import Group, Line, Number, RunRecord, differences, scores_of
from alltokens.report.section_parts import Report, chart

MOST_DIFFERENCES = 30
ABSENT = "\N{EN DASH}"
PERCENT = "\N{NARROW NO-BREAK SPACE}%"


def summary(report: Report) -> Markup:
    heads = ["n", "best top-1", "last top-1", "last top-5", "last loss", "epochs", "training"]
    rows = [{"name": group.name, "cells": _summary_cells(group)} for group in report.groups]
    found = differences(report.groups)
    return render(
        "sections/summary.html",
        sentences=_sentences(report),
        heads=heads,
        rows=rows,
        groups=[group.name for group in report.groups],
        several_seeds=any(len(group.runs) > 1 for group in report.groups),
        averaged=any(group.config.train.ema_decay is not None for group in report.groups),
        differences=[(name, [ABSENT if one is None else one for one in values]) for name, values in found][
            :MOST_DIFFERENCES
        ],
        more_differences=max(0, len(found) - MOST_DIFFERENCES),
    )


def best_top1(run: RunRecord) -> float | None:
    return max((scores_of(one)["top1"] for one in run.evaluations), default=None)


def last_score(name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: scores_of(run.evaluations[-1])[name] if run.evaluations else None


def _summary_cells(group: Group) -> list[dict[str, Any]]:
    epochs = group.number(lambda run: float(run.evaluations[-1]["epoch"]) if run.evaluations else None)
    of = group.config.train.epochs + group.config.schedule.cooldown_epochs
    done = ABSENT if epochs is None else f"{epochs.mean:g} of {of:g}"
    seconds = group.number(lambda run: run.seconds or None)
    return [
        {"value": len(group.runs), "text": len(group.runs)},
        cell(group.number(best_top1), 2, PERCENT),
        cell(group.number(last_score("top1")), 2, PERCENT),
        cell(group.number(last_score("top5")), 2, PERCENT),
        cell(group.number(last_score("loss")), 4),
        {"value": 0 if epochs is None else epochs.mean, "text": done},
        {
            "value": 0 if seconds is None else seconds.mean,
            "text": ABSENT if seconds is None else duration(seconds.mean),
        },
    ]


def cell(number: Number | None, digits: int, unit: str = "") -> dict[str, Any]:
    return {"value": "" if number is None else number.mean, "text": written(number, digits, unit)}


def written(number: Number | None, digits: int, unit: str = "") -> str:
    """84.20 ± 2.90 %"""
    if number is None:
        return ABSENT
    spread = "" if number.spread is None else f" ± {number.spread:,.{digits}f}"
    return f"{number.mean:,.{digits}f}{spread}{unit}"


def _sentences(report: Report) -> list[str]:
    told: list[str] = []
    numbers = [(group, group.number(best_top1)) for group in report.groups]
    known = [(group, number) for group, number in numbers if number is not None]
    if not known:
        return ["No evaluation yet."]
    group, number = max(known, key=lambda pair: pair[1].mean)
    if report.several:
        told.append(f"{group.name} has the highest top-1: {_with_n(number)}.")
        others = [(one.name, value) for one, value in known if one is not group]
        if others:
            name, second = max(others, key=lambda pair: pair[1].mean)
            told.append(f"Next is {name} with {_with_n(second)}.")
            told += _caution(number, second)
    elif number.n > 1:
        told.append(f"Best top-1 {_with_n(number)}.")
    else:
        epoch = next(one["epoch"] for one in group.runs[0].evaluations if scores_of(one)["top1"] == number.mean)
        told.append(f"Best top-1 {number.mean:.2f}{PERCENT}, after epoch {epoch}.")
    stopped = [run.name for one in report.groups for run in one.runs if not _complete(run)]
    if stopped:
        told.append(f"Not complete: {', '.join(stopped)}.")
    return told


def _with_n(number: Number) -> str:
    if number.spread is None:
        return f"{number.mean:.2f}{PERCENT} (one run)"
    return f"{written(number, 2, PERCENT)} (n = {number.n})"


def _caution(first: Number, second: Number) -> list[str]:
    """What the seeds allow one to say of a difference."""
    if first.spread is None or second.spread is None:
        return ["With one run of a setting nobody knows how far seeds scatter."]
    error = math.sqrt(first.spread**2 / first.n + second.spread**2 / second.n)
    if error and first.mean - second.mean < 2 * error:
        return [f"The difference is less than twice its standard error ({error:.2f})."]
    return []


def _complete(run: RunRecord) -> bool:
    of = run.config.train.epochs + run.config.schedule.cooldown_epochs
    return bool(run.evaluations) and run.evaluations[-1]["epoch"] >= of - 1e-6


def curves(report: Report) -> Markup | None:
    def line(points: Callable[[RunRecord], Iterable[tuple[float, float | None]]]) -> list[tuple[str, Line | None]]:
        return [(group.name, group.line(points)) for group in report.groups]

    def evaluated(name: str) -> Callable[[RunRecord], Iterable[tuple[float, float | None]]]:
        return lambda run: [(one["epoch"], scores_of(one)[name]) for one in run.evaluations]

    def trained(name: str) -> Callable[[RunRecord], Iterable[tuple[float, float | None]]]:
        return lambda run: [(one["update"] / run.updates_per_epoch, one[name]) for one in run.updates]

    charts = [
        chart("Validation top-1", "epoch", line(evaluated("top1")), PERCENT),
        chart("Validation top-5", "epoch", line(evaluated("top5")), PERCENT),
        chart("Validation loss", "epoch", line(evaluated("loss"))),
        chart("Training loss", "epoch", line(trained("loss"))),
        chart("Learning rate", "epoch", line(trained("lr"))),
        chart("Pictures per second, training", "epoch", line(trained("pictures_per_second"))),
    ]
    charts = [one for one in charts if one is not None]
    bands = any(len(group.runs) > 1 for group in report.groups)
    return render("sections/curves.html", charts=charts, bands=bands) if charts else None


def cost(report: Report) -> Markup:
    heads = ["parameters", "GMACs", "time per epoch", "pictures/s", "training", "processes"]
    rows: list[dict[str, Any]] = []
    for one in report.looked:
        group = one.group
        epoch = group.number(lambda run: _middle(run.seconds_of_epochs()))
        speed = group.number(lambda run: _middle([line["pictures_per_second"] or 0.0 for line in run.updates]))
        total = group.number(lambda run: run.seconds or None)
        processes = int(group.runs[0].facts.get("processes", 1))
        millions = None if one.parameters is None else one.parameters / 1e6
        cells = [
            {"value": millions or "", "text": ABSENT if millions is None else f"{millions:,.2f} M"},
            {"value": one.gmacs or "", "text": ABSENT if one.gmacs is None else f"{one.gmacs:,.3g}"},
            cell(epoch, 1, " s"),
            cell(speed, 0),
            {"value": "" if total is None else total.mean, "text": ABSENT if total is None else duration(total.mean)},
            {"value": processes, "text": processes},
        ]
        rows.append({"name": group.name, "cells": cells})
    return render("sections/cost.html", heads=heads, rows=rows)


def _middle(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def environment(report: Report) -> Markup:
    runs: list[dict[str, Any]] = []
    for group in report.groups:
        for run in group.runs:
            facts = run.facts
            git = facts.get("git")
            versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
            told = [
                ("recipe", facts.get("recipe")),
                ("started", facts.get("started")),
                ("seed", run.config.train.seed),
                ("device", facts.get("device")),
                ("processes", facts.get("processes")),
                ("versions", versions),
                ("platform", facts.get("platform")),
                ("git", git and f"{git['commit'][:12]}{', with changes' if git['changed'] else ''}"),
                ("folder", str(run.folder)),
            ]
            runs.append(
                {
                    "name": run.name,
                    "command": shlex.join(facts.get("command", [])),
                    "facts": [(name, value) for name, value in told if value not in (None, "")],
                    "settings": to_yaml(run.config),
                }
            )
    return render("sections/environment.html", runs=runs)
