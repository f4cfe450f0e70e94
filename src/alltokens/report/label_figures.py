"""Drawings of labels that every token has. Public through `figures`.

Shapes: B pictures, k kept labels, h and w token grid or cells of a map, N = h * w tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.core.token_targets import TokenTargets
from alltokens.report.style import (
    COLOURS,
    HEAT,
    INK,
    UNIT,
    Drawing,
    Picture,
    class_name,
    plain_bar,
    put_picture,
    put_title,
    tiles,
)

Titles = Sequence[str]


def label_map(
    maps: LabelMap,
    images: Sequence[Picture] | Tensor = (),
    names: Titles | None = None,
    *,
    most: int = 4,
    **colours: Any,
) -> Drawing:
    """Maps of one picture (k, h, w) or a batch (B, k, h, w): the first class of each cell, and how sure it is."""
    if maps.ids.ndim == 3:
        tail = maps.tail.unsqueeze(0) if maps.has_tail and maps.tail is not None else None
        maps = LabelMap(maps.ids.unsqueeze(0), maps.scores.unsqueeze(0), tail)
    scores = maps.scores.float()
    total = scores.logsumexp(1)
    if maps.has_tail and maps.tail is not None:
        total = torch.logaddexp(total, maps.tail.float())
    sure, first = (scores - total.unsqueeze(1)).exp().max(1, keepdim=True)
    ids = maps.ids.long().gather(1, first).squeeze(1)
    return token_labels(ids, sure.squeeze(1), images, names, most=most, **colours)


def token_targets(
    targets: TokenTargets,
    images: Sequence[Picture] | Tensor = (),
    names: Titles | None = None,
    *,
    most: int = 4,
    **colours: Any,
) -> Drawing:
    """The labels of the tokens of a batch: the first class of every token and its probability."""
    known = int(targets.ids.max()) + 1 if targets.common is None else targets.common.labels.shape[1]
    sure, ids = targets.dense(max(known, len(names or ()))).max(-1)  # (B, N)
    labelled = targets.weight > 0
    shape = (-1, *targets.grid)
    return token_labels(
        torch.where(labelled, ids, -1).reshape(shape),
        torch.where(labelled, sure, 0).reshape(shape),
        images,
        names,
        most=most,
        **colours,
    )


def token_labels(
    ids: Tensor,
    probabilities: Tensor,
    images: Sequence[Picture] | Tensor = (),
    names: Titles | None = None,
    *,
    most: int = 4,
    **colours: Any,
) -> Drawing:
    """A row for each picture: itself, the class (B, h, w) of every token, and that class's probability.

    The most frequent classes have a colour and a name, the others are grey; -1 is a token without a label, white.
    """
    ids, probabilities = ids[:most].cpu(), probabilities[:most].detach().float().cpu()
    found, counts = ids[ids >= 0].unique(return_counts=True)
    named: list[int] = found[counts.argsort(descending=True, stable=True)][: len(COLOURS) - 1].tolist()
    palette = np.array([to_rgb(colour) for colour in (*COLOURS[: len(named)], COLOURS[-1], "white")])
    index = torch.full_like(ids, len(named))
    for place, one in enumerate(named):
        index[ids == one] = place
    index[ids < 0] = len(named) + 1
    columns = 3 if len(images) else 2
    figure, axes = tiles(len(ids), columns, beside=2.2)
    for row in range(len(ids)):
        if len(images):
            put_picture(axes[row, 0], images[row], "picture", **colours)
        axes[row, -2].imshow(palette[index[row].numpy()], interpolation="nearest", extent=UNIT)
        put_title(axes[row, -2], "first class")
        sure = probabilities[row].numpy()
        axes[row, -1].imshow(sure, cmap=HEAT, vmin=0, vmax=1, interpolation="nearest", extent=UNIT)
        put_title(axes[row, -1], "its probability")
    plain_bar(figure.colorbar(axes[0, -1].images[0], ax=axes, shrink=min(1.0, 1.5 / len(ids)), aspect=18), "")
    labels = [class_name(one, names) for one in named]
    others = len(found) - len(named)
    labels += [f"{others} other{'s' if others > 1 else ''}"] if others else []
    for place, label in enumerate(labels):
        axes[0, -2].plot([], [], marker="s", linestyle="", color=palette[place], label=label)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=INK, handletextpad=0.2)
    return figure
