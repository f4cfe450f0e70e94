"""The sections of a report that are pictures, made with the weights that runs have kept.

Shapes: K classes, L layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from alltokens.report.html import coded_map, input_picture, percent, picture_uri, render, share_squares
from alltokens.report.run_pictures import Judged, MixedSample, Overlay
from alltokens.report.section_parts import Looked, Report, for_each_group, layer_chart

MOST_CLASSES = 24  # of the table of confusions; of more classes, those that are confused most
MOST_PAIRS = 10
SIDE = 128  # pixels of embedded pictures


def confusion(report: Report) -> Markup:
    return for_each_group("sections/confusion.html", report, lambda one: one.judgement and _confused(one))


def _confused(one: Looked) -> dict[str, Any]:
    assert one.judgement is not None
    counts, names = one.judgement.confusion, one.class_names
    wrong = counts - np.diag(np.diag(counts))
    chosen = list(range(len(names)))
    if len(names) > MOST_CLASSES:
        busiest = np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MOST_CLASSES]
        chosen = np.sort(busiest).tolist()
    totals = counts.sum(1)
    rows = [[_confusion_cell(names, counts, totals, row, column) for column in chosen] for row in chosen]
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [(int(at) // len(names), int(at) % len(names)) for at in order if wrong.flat[at]]
    return {
        "looked": one.judgement.looked,
        "of": one.judgement.of,
        "right": int(np.trace(counts)),
        "classes": [names[at] for at in chosen],
        "part": len(names) if len(names) > len(chosen) else 0,
        "rows": rows,
        "pairs": [
            {"label": names[row], "guess": names[column], "count": int(wrong[row, column]), "total": int(totals[row])}
            for row, column in pairs
        ],
    }


def _confusion_cell(
    names: tuple[str, ...], counts: np.ndarray, totals: np.ndarray, row: int, column: int
) -> dict[str, Any]:
    count = int(counts[row, column])
    tip = f"{names[row]} taken for {names[column]}: {count} of {totals[row]}"
    return {"count": count, "share": round(count / max(1, totals[row]), 3), "right": row == column, "tip": tip}


def best_and_worst(report: Report) -> Markup:
    return for_each_group("sections/judged.html", report, lambda one: one.judgement and {"rows": _judged_rows(one)})


def _judged_rows(one: Looked) -> list[dict[str, Any]]:
    assert one.judgement is not None

    def shown(judged: Judged) -> dict[str, Any]:
        return {
            "uri": picture_uri(judged.picture, SIDE),
            "key": judged.key,
            "label": one.class_names[judged.label],
            "label_probability": percent(judged.label_probability),
            "guess": one.class_names[judged.guess] if judged.guess != judged.label else "",
            "guess_probability": percent(judged.guess_probability),
        }

    return [
        {"title": "Worst: least is left for the picture's class", "pictures": [*map(shown, one.judgement.worst)]},
        {"title": "Best: right, and the surest", "pictures": [*map(shown, one.judgement.best)]},
    ]


def mixed_samples(report: Report) -> Markup:
    return for_each_group("sections/mixes.html", report, _mixed)


def _mixed(one: Looked) -> dict[str, Any] | None:
    if one.mixes is None:
        return None
    told = (
        f"Mixed by {one.mixes.mixer}, as in training; the targets of this run follow: {one.mixes.follower}."
        if one.mixes.mixes
        else "This run mixes nothing; here is what CutMix would make of its pictures."
    )
    why = f" Labels are not followed: {one.mixes.reason}" if one.mixes.reason else ""
    return {"sentence": told + why, "samples": [_mixed_sample(sample, one) for sample in one.mixes.samples]}


def _mixed_sample(sample: MixedSample, one: Looked) -> dict[str, Any]:
    pictures = {
        name: picture_uri(input_picture(getattr(sample, name), **(one.colours or {})), SIDE)
        for name in ("own", "partner", "mixed")
    }
    after = None if sample.aligned_shares is None else share_squares(sample.aligned_shares)
    return pictures | {
        "names": sample.names,
        "before": share_squares(sample.input_shares),
        "after": after,
        "share": sample.share,
        "aligned_share": sample.aligned_share,
        "targets": [(name, round(a, 4), None if b is None else round(b, 4)) for name, a, b in sample.targets],
    }


def layers(report: Report) -> Markup | None:
    if not any(one.mixes is not None and any(s.ratios for s in one.mixes.samples) for one in report.looked):
        return None
    return for_each_group("sections/layers.html", report, _layer_charts)


def _layer_charts(one: Looked) -> dict[str, Any] | None:
    if one.mixes is None:
        return None
    charts: list[Any] = []
    for sample in one.mixes.samples:
        if sample.ratios is None:
            return {"reason": one.mixes.reason}
        charts.append(layer_chart(f"{sample.names[0]} with {sample.names[1]}", sample.ratios))
    return {"charts": charts}


def overlays(report: Report) -> Markup | None:
    shown = [one for one in report.looked if one.overlays]
    if not shown:
        return None
    looked = [
        {
            "group": one.group.name,
            "names": list(one.class_names),
            "sentence": "Training pictures under the label maps that taught this run."
            if one.labelled
            else "Validation pictures: what the dense head takes every token for.",
            "overlays": [_overlay(overlay, len(one.class_names)) for overlay in one.overlays],
        }
        for one in shown
    ]
    return render("sections/overlays.html", looked=looked, several=report.several)


def _overlay(overlay: Overlay, classes: int) -> dict[str, Any]:
    return {
        "name": overlay.name,
        "key": overlay.key,
        "picture": picture_uri(overlay.picture, 160),
        "seen": picture_uri(overlay.seen, 160),
        "map": None if overlay.label_map is None else coded_map(overlay.label_map, classes),
        "tokens": None if overlay.tokens is None else coded_map(overlay.tokens, classes),
    }
