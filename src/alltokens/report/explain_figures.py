"""What was found out about pictures as matplotlib figures, and several of them in one PNG.

Shapes: B pictures, M maps of a picture, L layers.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

from alltokens.explain.explanation import Explanation, ModelView
from alltokens.explain.findings import Look
from alltokens.explain.maps import BY_CLASS
from alltokens.report import figures
from alltokens.report.style import class_name, short, stretched

GAP = 12  # pixels between figures


def drawings(explanation: Explanation) -> list[Figure]:
    """The figures of every part that was asked for, model by model."""
    found: list[Figure] = []
    several = len(explanation.models) > 1
    for one in explanation.models:
        name = f"{one.subject.name}: " if several else ""
        if one.looks and one.looks[0].heats:
            found.append(_maps(one, explanation, name))
    for one in explanation.models:
        name = f"{one.subject.name}: " if several else ""
        if one.mixed is not None:
            found += _mixed(one, explanation, name)
        if one.presence:
            found.append(figures.presence([layer[0] for layer in one.presence], title=f"{name}presence of tokens"))
    if rows := [(one.subject.name, one.error.rmse, one.error.spread) for one in explanation.models if one.error]:
        found.append(figures.rmse(rows))
    if explanation.gallery:
        first = explanation.models[0]
        colours: dict[str, Any] = first.subject.colours
        found.append(figures.mixers(first.images, explanation.gallery, **colours))
    return found


def _maps(one: ModelView, explanation: Explanation, name: str) -> Figure:
    """A row for each picture: itself, then the maps of all methods at the resolution of the finest."""
    titles: list[list[str]] = []
    rows: list[torch.Tensor] = []
    finest = max((heat.shape[-2:] for heat in one.looks[0].heats.values()), key=lambda size: size[0] * size[1])
    for look in one.looks:
        maps, told = [], []
        for method, heat in look.heats.items():
            drawn = visible(method, heat)
            maps.append(torch.nn.functional.interpolate(drawn[None].float(), size=finest, mode="nearest")[0])
            plain = method.replace("_", " ")
            told += [f"{plain}\n{of}" for of in titles_of(method, heat, look, one.subject.class_names)]
        rows.append(torch.cat(maps))
        titles.append(told)
    called = [short(picture.label or picture.name) for picture in explanation.pictures]
    names = [f"{picture}\n{_sure(one, at)}" for at, picture in enumerate(called)]
    drawn = figures.heat(one.images, torch.stack(rows), titles, names, stretch=False, **one.subject.colours)
    if name:
        drawn.suptitle(name.rstrip(": "), fontsize=9)
    return drawn


def visible(method: str, maps: torch.Tensor) -> torch.Tensor:
    """Maps (M, h, w) as they are drawn, in [0, 1]: relevance each by itself, probabilities by the highest of all."""
    return maps / maps.max().clamp(min=1e-12) if method == "token_heat" else stretched(maps)


def titles_of(method: str, maps: torch.Tensor, look: Look, names: Sequence[str]) -> list[str]:
    """What stands above each map: its class, and the highest probability where it shows one."""
    if method not in BY_CLASS:
        return [""]
    classes = [class_name(number, names) for number in look.classes]
    if method != "token_heat":
        return classes
    return [f"{name}, to {heat.max():.0%}" for name, heat in zip(classes, maps, strict=True)]


def _sure(one: ModelView, at: int) -> str:
    look = one.looks[at]
    return f"{class_name(look.guess, one.subject.class_names)} {look.guess_probability:.0%}"


def _mixed(one: ModelView, explanation: Explanation, name: str) -> list[Figure]:
    assert one.mixed is not None
    images, plan, followed, ratios = one.mixed
    called = [picture.label or short(picture.name) for picture in explanation.pictures]
    shares = followed.token_shares.flatten(1)
    mixed = figures.mix(images, plan, shares, followed.share, called, grid=followed.grid, most=4, **one.subject.colours)
    title = f"{name}{called[0]} with {called[int(plan.partner[0])]}"
    return [mixed, figures.fluctuation({key: ratio[:, 0] for key, ratio in ratios.items()}, title)]


def stacked(drawn: Sequence[Figure]) -> Image.Image:
    """All figures below one another on white."""
    pictures = [Image.open(io.BytesIO(figures.as_png(one))).convert("RGB") for one in drawn]
    width = max(picture.width for picture in pictures)
    sheet = Image.new("RGB", (width, sum(picture.height + GAP for picture in pictures) - GAP), "white")
    top = 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height + GAP
    return sheet
