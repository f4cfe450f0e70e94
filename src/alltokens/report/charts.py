"""Charts of what happens to a mix inside a network. Public through `figures`.

Shapes: h and w token grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alltokens.explain.fluctuation import RATIOS
from alltokens.report.style import (
    COLOURS,
    FAINT,
    INK,
    UNIT,
    Drawing,
    new_chart,
    new_drawing,
    plain_bar,
    put_title,
    tiles,
)

PRESENCE = "PuOr"  # a scale with a middle that readers with any colour vision see


def fluctuation(ratios: Mapping[str, Sequence[float] | Tensor], title: str = "") -> Drawing:
    """The partner's share of what is classified, from the input (0) to the last layer: one line for each method."""
    figure = new_drawing(5.2, 3.0)
    axes = new_chart(figure, title, "layer", "partner's share")
    for index, (name, values) in zip(series_of(ratios), ratios.items(), strict=True):
        line = torch.as_tensor(values).detach().cpu().numpy()
        # Lines that coincide stay visible: each later one is thinner, and dashed in its own way.
        style = ("-", (0, (5, 2)), (0, (1, 1.5)), "-.", (0, (3, 1, 1, 1, 1, 1)))[index % 5]
        axes.plot(
            line,
            label=name,
            color=COLOURS[index % len(COLOURS)],
            linestyle=style,
            linewidth=max(1.4, 3.2 - 0.4 * index),
        )
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=INK)
    return figure


def series_of(names: Iterable[str]) -> list[int]:
    """Which colour and stroke each line has: a method keeps its own, whichever methods a model lacks."""
    named = list(names)
    return [RATIOS.index(name) for name in named] if set(named) <= set(RATIOS) else list(range(len(named)))


def presence(values: Sequence[Tensor], *, columns: int = 6, title: str = "") -> Drawing:
    """Equation 2 of TL-Align, layer by layer: how present each token (h, w) is among what its layer makes.

    1 is a token that gives as much as it was given, near 0 one that fades. The scale is logarithmic.
    """
    columns = min(columns, len(values))
    figure, axes = tiles(-(-len(values) // columns), columns, side=1.15, beside=0.9)
    maps = presence_logs(values)
    reach = presence_reach(maps)
    for layer, (cell, logs) in enumerate(zip(axes.flat, maps, strict=False), 1):
        cell.imshow(logs, cmap=PRESENCE, vmin=-reach, vmax=reach, interpolation="nearest", extent=UNIT)
        put_title(cell, f"layer {layer}")
    ticks = range(-int(reach), int(reach) + 1)
    bar = figure.colorbar(axes[0, 0].images[0], ax=axes, ticks=list(ticks), shrink=0.8, aspect=25)
    bar.ax.set_yticklabels([f"{2**tick:g}\u00d7" if tick >= 0 else f"1/{2**-tick}" for tick in ticks])
    plain_bar(bar, "presence")
    if title:
        figure.suptitle(title, fontsize=9, color=INK)
    return figure


def presence_logs(values: Sequence[Tensor]) -> list[NDArray[Any]]:
    """The logarithm to base 2 of every map, no lower than that of a sixteenth."""
    return [np.log2(np.maximum(value.detach().float().cpu().numpy(), 1 / 16)) for value in values]


def presence_reach(maps: Sequence[NDArray[Any]]) -> float:
    """How far the scale of such maps goes to either side of 0."""
    return max(1.0, *(float(np.abs(one).max()) for one in maps))


def rmse(rows: Sequence[tuple[str, float, float]], title: str = "") -> Drawing:
    """Figure 3 of TL-Align: (model, RMSE between area and aligned share, its standard deviation) as bars."""
    figure = new_drawing(5.2, 0.9 + 0.32 * len(rows))
    axes = new_chart(figure, title, "", "")
    # Below the whole figure: long names of models leave the axes narrow.
    figure.supxlabel("RMSE between the share by area and the aligned share", fontsize=8, color=INK)
    places = range(len(rows))
    means, spreads = [row[1] for row in rows], [row[2] for row in rows]
    axes.barh(places, means, xerr=spreads, height=0.62, color=COLOURS[1], ecolor=FAINT, capsize=2)
    for place, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
        axes.annotate(
            f"{mean:#.3g}",
            (mean + spread, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.set_yticks(places, [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(mean + spread for mean, spread in zip(means, spreads, strict=True)) or 1)
    return figure
