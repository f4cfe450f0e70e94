"""The drawing functions: data in, a matplotlib Figure out.

Shapes: B pictures, M maps of each, H and W picture, h and w token grid, N = h * w tokens.

Each function makes a new figure and touches no global state of matplotlib; notebooks show what is returned. Pictures
are PIL pictures, (H, W, 3) arrays, or (3, H, W) tensors as a network gets them (then say the `mean` and `std` that they
were normalised by, if not ImageNet's). `as_png` and `as_svg` make bytes of a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan
from alltokens.errors import UserError
from alltokens.report.charts import fluctuation, presence, rmse
from alltokens.report.label_figures import label_map, token_labels, token_targets
from alltokens.report.style import (
    HEAT,
    TILE,
    UNIT,
    Drawing,
    Picture,
    as_png,
    as_svg,
    grid_of,
    plain_bar,
    put_heat,
    put_picture,
    put_shares,
    put_title,
    stretched,
    tiles,
)

__all__ = [
    "as_png",
    "as_svg",
    "fluctuation",
    "heat",
    "heat_map",
    "label_map",
    "mix",
    "mixers",
    "pictures",
    "plan",
    "presence",
    "rmse",
    "token_labels",
    "token_targets",
]

Titles = Sequence[str]


def pictures(images: Sequence[Picture] | Tensor, titles: Titles = (), *, columns: int = 6, **colours: Any) -> Drawing:
    """Pictures in rows."""
    count = len(images)
    if not count:
        raise UserError("there is no picture to draw")
    columns = min(columns, count)
    figure, axes = tiles(-(-count // columns), columns)
    for one, image, title in zip(axes.flat, images, _filled(titles, count), strict=False):
        put_picture(one, image, title, **colours)
    return figure


def heat(
    images: Sequence[Picture] | Tensor,
    heats: Tensor,
    titles: Sequence[Titles] = (),
    names: Titles = (),
    *,
    stretch: bool = True,
    **colours: Any,
) -> Drawing:
    """A row for each picture: itself, called by its name, then its maps (B, M, h, w) laid over it.

    `stretch` takes each map to [0, 1], as attribution maps are shown; turn it off for probabilities.
    """
    batch, maps = heats.shape[:2]
    if len(images) != batch:
        raise UserError(f"{len(images)} pictures cannot lie below the maps of {batch}")
    shown = stretched(heats) if stretch else heats
    figure, axes = tiles(batch, maps + 1, titles=2)
    for row, (image, name) in enumerate(zip(images, _filled(names, batch), strict=True)):
        put_picture(axes[row, 0], image, name, **colours)
        for column, title in enumerate(_filled(titles[row] if titles else (), maps)):
            put_heat(axes[row, column + 1], image, shown[row, column], title, **colours)
    return figure


def heat_map(values: Tensor, title: str = "") -> Drawing:
    """One map (h, w) by itself, with its scale."""
    figure, axes = tiles(1, 1, side=2 * TILE, beside=0.6)
    shown = values.detach().float().cpu().numpy()
    drawn = axes[0, 0].imshow(shown, cmap=HEAT, interpolation="nearest", extent=UNIT)
    put_title(axes[0, 0], title)
    plain_bar(figure.colorbar(drawn, ax=axes, shrink=0.9), "")
    return figure


def mix(
    images: Tensor,
    plan: MixPlan,
    token_shares: Tensor,
    share: Tensor | None = None,
    names: Titles = (),
    *,
    grid: tuple[int, int] | None = None,
    most: int = 6,
    **colours: Any,
) -> Drawing:
    """A row for each sample: itself, its partner, their mix, the labels at the input and after the last block.

    `token_shares` (B, N) and `share` (B,) are what a follower found; `grid` is that of the tokens at the input, if it
    is not that of the last block. `images` (B, 3, H, W) are not mixed yet, `names` those of their classes.
    """
    last = grid_of(token_shares.shape[1], plan.image_size)
    before = plan.token_share(grid or last)
    after = token_shares.reshape(-1, *last)
    share = after.mean((1, 2)) if share is None else share
    mixed = mix_images(images, MixPlan(plan.partner, plan.mask))  # embeddings: the pixels that are mixed there
    count = min(most, len(images))
    figure, axes = tiles(count, 5, titles=2, beside=0.8)
    called = _filled(names, len(images))
    for row in range(count):
        partner = int(plan.partner[row])
        put_picture(axes[row, 0], images[row], _titled("own", called[row]), **colours)
        put_picture(axes[row, 1], images[partner], _titled("partner", called[partner]), **colours)
        put_picture(axes[row, 2], mixed[row], "mixed", **colours)
        put_shares(axes[row, 3], before[row], f"labels at the input\npartner {plan.share[row]:.0%}")
        put_shares(axes[row, 4], after[row], f"after the last block\npartner {share[row]:.0%}")
    _share_bar(figure, axes[:, 3:])
    return figure


def mixers(images: Tensor, plans: Mapping[str, MixPlan], *, most: int = 3, **colours: Any) -> Drawing:
    """Two pictures and what each mixer makes of them, by name; a row for each of the first `most` samples."""
    count = min(most, len(images))
    figure, axes = tiles(count, 2 + len(plans), titles=2)
    for row in range(count):
        for column, (name, one) in enumerate(plans.items(), 2):
            shown = mix_images(images, MixPlan(one.partner, one.mask))
            put_picture(axes[row, column], shown[row], f"{name}\npartner {one.share[row]:.0%}", **colours)
            put_picture(axes[row, 1], images[int(one.partner[row])], "partner", **colours)
        put_picture(axes[row, 0], images[row], "own", **colours)
    return figure


def plan(plan: MixPlan, *, grid: tuple[int, int] | None = None, most: int = 6) -> Drawing:
    """The partner's share of every pixel, or of every token of a `grid`; one map where the batch shares one."""
    maps = plan.mask if grid is None else plan.token_share(grid)[: len(plan.mask)]
    count = min(most, len(maps))
    figure, axes = tiles(1, count, titles=2, beside=0.8)
    for index in range(count):
        whose = f"sample {index}, partner {int(plan.partner[index])}" if len(maps) > 1 else "whole batch"
        put_shares(axes[0, index], maps[index], f"{whose}\npartner {maps[index].mean():.0%}")
    _share_bar(figure, axes)
    return figure


def _filled(titles: Titles, count: int) -> list[str]:
    return [*titles[:count], *[""] * (count - len(titles))]


def _titled(role: str, name: str) -> str:
    return f"{role}\n{name}" if name else role


def _share_bar(figure: Drawing, axes: Any) -> None:
    bar = figure.colorbar(axes[0, -1].images[0], ax=axes, ticks=[0, 0.5, 1], shrink=min(1.0, 3 / len(axes)), aspect=20)
    bar.ax.set_yticklabels(["own", "half", "partner"])
    plain_bar(bar, "")
