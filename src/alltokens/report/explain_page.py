"""`alltokens explain`: pictures in the eyes of one model or several, in an HTML page or a PNG.

Shapes: B pictures, L layers, h and w token grid.
"""

from __future__ import annotations

import base64
import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps

from alltokens.errors import UserError
from alltokens.explain.explanation import Explanation, ModelView
from alltokens.explain.maps import METHODS
from alltokens.report.charts import PRESENCE, presence_logs, presence_reach, rmse
from alltokens.report.explain_figures import drawings, stacked, titles_of, visible
from alltokens.report.html import input_picture, percent, picture_uri, render, share_squares, squares, write_page
from alltokens.report.section_parts import layer_chart
from alltokens.report.style import as_svg, class_name, heated, stretched
from alltokens.version import __version__

SIDE = 160  # pixels of embedded pictures
MIXES = 4  # of which the labels are followed on the page
PRESENT = 2  # pictures whose tokens are followed layer by layer
TITLES = {
    "attribution": "attribution",
    "rollout": "rollout",
    "class_attention": "class attention",
    "token_heat": "token heat",
}
KINDS = {".html": "a page", ".htm": "a page", ".png": "figures"}


class ExplainPage(NamedTuple):
    file: Path
    pictures: int
    models: int
    bytes: int


def write_explanation(explanation: Explanation, out: str | Path, *, table: str | Path | None = None) -> ExplainPage:
    """Write what was found out as an HTML page or, by the file's name, as figures in one PNG.

    table: a CSV file for the distances of aligned labels from areas.
    """
    out = Path(out)
    if out.suffix.lower() not in KINDS:
        raise UserError(f"what kind of file is {out}? Its name should end in {', '.join(KINDS)}")
    if table is not None:
        if not any(one.error is not None for one in explanation.models):
            raise UserError("there is no error to put into the table: the part 'error' wants two pictures and a model")
        _write(Path(table), error_table(explanation).encode())
    size = _write_figures(explanation, out) if out.suffix.lower() == ".png" else _write_page(explanation, out)
    return ExplainPage(out, len(explanation.pictures), len(explanation.models), size)


def error_table(explanation: Explanation) -> str:
    """CSV: a line for each model whose labels can be followed."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["model", "rmse", "standard_deviation", "draws", "pictures"])
    for one in explanation.models:
        if one.error is not None:
            found = one.error
            lines.writerow([one.subject.name, f"{found.rmse:.6f}", f"{found.spread:.6f}", found.draws, found.pictures])
    return text.getvalue()


def _write_figures(explanation: Explanation, out: Path) -> int:
    picture = io.BytesIO()
    stacked(drawings(explanation)).save(picture, "png", optimize=True)
    return _write(out, picture.getvalue())


def _write(file: Path, content: bytes) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def _write_page(explanation: Explanation, out: Path) -> int:
    builders: dict[str, tuple[str, Callable[[Explanation], Markup]]] = {
        "maps": ("Where it looks", _maps),
        "mixing": ("What becomes of a mix", _mixing),
        "presence": ("Presence of tokens", _presence),
        "error": ("Aligned labels and areas", _error),
        "mixers": ("Mixers", _mixers),
    }
    sections = [
        {"title": builders[part][0], "anchor": part, "html": builders[part][1](explanation)}
        for part in explanation.parts
    ]
    names = [one.subject.name for one in explanation.models]
    count = len(explanation.pictures)
    looked_at = ", ".join(one.name for one in explanation.pictures)
    return write_page(
        "report.html",
        out,
        heading=" and ".join(names),
        about=f"{count} picture{'s' if count > 1 else ''} looked at: {looked_at}.",
        sections=sections,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _maps(explanation: Explanation) -> Markup:
    pictures = [
        {
            "name": picture.name,
            "label": picture.label,
            "rows": [_map_row(one, at) for one in explanation.models if one.looks],
        }
        for at, picture in enumerate(explanation.pictures)
    ]
    undefined: dict[tuple[str, str], list[str]] = {}
    for one in explanation.models:
        for method, why in one.undefined.items():
            undefined.setdefault((TITLES[method], why), []).append(one.subject.name)
    shown = {method for one in explanation.models for look in one.looks[:1] for method in look.heats}
    told = [(TITLES[method], what) for method, what in METHODS.items() if method in shown]
    several = len(explanation.models) > 1
    absent = [(method, " and ".join(names), why) for (method, why), names in undefined.items()]
    return render("sections/maps.html", pictures=pictures, undefined=absent, methods=told, several=several)


def _map_row(one: ModelView, at: int) -> dict[str, Any]:
    look, seen = one.looks[at], input_picture(one.images[at], **one.subject.colours)
    names = one.subject.class_names
    tiles: list[tuple[dict[str, Any], str]] = []
    for method, maps in look.heats.items():
        probable = method == "token_heat"
        titles = titles_of(method, maps, look, names)
        after = "" if probable else " of the strongest"
        told = {"before": "probability " if probable else "", "after": after, "scale": 1, "digits": 2}
        values = maps if probable else stretched(maps)
        for of, value, drawn in zip(titles, values, visible(method, maps), strict=True):
            caption = f"{TITLES[method]}: {of}" if of else TITLES[method]
            tiles.append((squares(value, heated(seen, drawn), told, smooth=True), caption))
    sure = [
        (class_name(number, names), percent(probability))
        for number, probability in zip(look.classes, look.probabilities, strict=True)
    ]
    if look.guess not in look.classes:
        sure.insert(0, (class_name(look.guess, names), percent(look.guess_probability)))
    return {"model": one.subject.name, "picture": picture_uri(seen, SIDE), "sure": sure, "tiles": tiles}


def _mixing(explanation: Explanation) -> Markup:
    models = [
        {"model": one.subject.name, "reason": one.not_followed, "samples": _samples(one, explanation)}
        for one in explanation.models
    ]
    several = len(models) > 1
    return render("sections/followed.html", models=models, mixer=explanation.mixer, several=several)


def _samples(one: ModelView, explanation: Explanation) -> list[dict[str, Any]]:
    if one.mixed is None:
        return []
    images, plan, followed, ratios = one.mixed
    before = plan.token_share(followed.grid)
    samples: list[dict[str, Any]] = []
    for at in range(min(MIXES, len(images))):
        partner = int(plan.partner[at])
        mixed = images[at].lerp(images[partner], plan.mask[at if len(plan.mask) > 1 else 0])
        named = [explanation.pictures[number] for number in (at, partner)]
        pictures = {
            name: picture_uri(input_picture(image, **one.subject.colours), SIDE)
            for name, image in (("own", images[at]), ("partner", images[partner]), ("mixed", mixed))
        }
        last = {name: float(ratio[-1, at]) for name, ratio in ratios.items()}
        samples.append(
            pictures
            | {
                "names": [picture.label or picture.name for picture in named],
                "before": share_squares(before[at]),
                "after": share_squares(followed.token_shares[at]),
                "shares": [(name, percent(value)) for name, value in last.items() if value == value],
                "chart": layer_chart("partner's share, layer by layer", {k: v[:, at] for k, v in ratios.items()}),
            }
        )
    return samples


def _presence(explanation: Explanation) -> Markup:
    models = [
        {"model": one.subject.name, "reason": one.not_followed, "pictures": _present(one, explanation)}
        for one in explanation.models
    ]
    return render("sections/presence.html", models=models, several=len(models) > 1)


def _present(one: ModelView, explanation: Explanation) -> list[dict[str, Any]]:
    told = {"before": "presence ", "after": "\N{MULTIPLICATION SIGN}", "scale": 1, "digits": 2}
    found: list[dict[str, Any]] = []
    for at in range(min(PRESENT, len(one.images)) if one.presence else 0):
        values = [layer[at] for layer in one.presence]
        logs = presence_logs(values)
        reach = presence_reach(logs)
        layers = []
        for value, log in zip(values, logs, strict=True):
            pixels = colormaps[PRESENCE]((log + reach) / (2 * reach))[..., :3]
            layers.append(squares(value, (255 * pixels).round().astype(np.uint8), told))
        seen = picture_uri(input_picture(one.images[at], **one.subject.colours), SIDE)
        found.append({"name": explanation.pictures[at].name, "picture": seen, "layers": layers})
    return found


def _error(explanation: Explanation) -> Markup:
    rows = [(one.subject.name, one.error) for one in explanation.models if one.error is not None]
    drawing = as_svg(rmse([(name, found.rmse, found.spread) for name, found in rows])) if rows else ""
    text = base64.b64encode(error_table(explanation).encode()).decode("ascii")
    missing = [(one.subject.name, one.not_followed) for one in explanation.models if one.error is None]
    return render(
        "sections/error.html",
        rows=rows,
        drawing=Markup(drawing),
        table=f"data:text/csv;base64,{text}",
        missing=missing,
    )


def _mixers(explanation: Explanation) -> Markup:
    first = explanation.models[0]
    images, colours = first.images, first.subject.colours
    rows = []
    for at in range(min(3, len(images))):
        tiles = []
        for name, plan in explanation.gallery.items():
            mixed = images[at].lerp(images[int(plan.partner[at])], plan.mask[at if len(plan.mask) > 1 else 0])
            share = percent(float(plan.share[at]), 0)
            tiles.append({"uri": picture_uri(input_picture(mixed, **colours), SIDE), "name": name, "share": share})
        partner = (at + 1) % len(images)
        both = [picture_uri(input_picture(images[number], **colours), SIDE) for number in (at, partner)]
        rows.append({"own": both[0], "partner": both[1], "tiles": tiles})
    return render("sections/mixers.html", rows=rows)
