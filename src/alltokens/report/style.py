"""What all drawings share: colours, how a picture is put on axes, how a figure becomes bytes.

Shapes: H and W picture, h and w token grid.

Colours are Okabe and Ito's, which readers with any colour vision tell apart; maps run in lightness too. In a mix the
picture's own label is vermillion and its partner's blue.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from alltokens.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Color
from alltokens.errors import UserError

INK = "#1b1b1f"  # of text and axes; `as_svg` writes it as the page's own text colour
FAINT = "#9a9aa2"  # what is not to catch the eye, readable on white and on black
OWN, PARTNER = "#d55e00", "#0072b2"
# Of lines and classes, in this order: told apart beside each other, on white and on black.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8f8f8f")
SHARES = LinearSegmentedColormap.from_list("shares", [OWN, "#f2efe9", PARTNER])  # the partner's share, 0 to 1
HEAT = "magma"

Picture = Any  # a PIL picture, an (H, W, 3) array, or a (3, H, W) tensor as a network gets it
TILE = 1.7  # inches: the side of a picture in a figure
DPI = 110


class Drawing(Figure):
    """A figure that notebooks show by itself, with or without %matplotlib."""

    def _repr_png_(self) -> bytes:
        return as_png(self)


def new_drawing(width: float, height: float) -> Drawing:
    """An empty figure of that size in inches; nothing is registered with pyplot."""
    figure = Drawing(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tiles(
    rows: int, columns: int, *, side: float = TILE, titles: int = 1, beside: float = 0.0
) -> tuple[Drawing, NDArray[Any]]:
    """A figure of rows x columns square axes without ticks.

    `titles` is the number of lines above each, `beside` the inches to their right for a scale or names.
    """
    figure = new_drawing(columns * (side + 0.06) + beside, rows * (side + 0.06 + 0.16 * titles))
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0, hspace=0)  # pyright: ignore
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.set_axis_off()
    return figure, axes


def to_pixels(picture: Picture, mean: Color = IMAGENET_MEAN, std: Color = IMAGENET_STD) -> NDArray[Any]:
    """(H, W, 3) in [0, 1]. A (3, H, W) tensor was normalised by `mean` and `std`; arrays are 0..255 or 0..1."""
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"), dtype=np.float32) / 255
    if isinstance(picture, Tensor):
        if picture.ndim != 3 or picture.shape[0] != 3:
            raise UserError(f"a picture as a tensor is (3, H, W), got {tuple(picture.shape)}")
        tall = picture.detach().float().cpu() * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
        return tall.clamp(0, 1).permute(1, 2, 0).numpy()
    array = np.asarray(picture)
    if array.ndim != 3 or array.shape[2] != 3:
        raise UserError(f"a picture as an array is (H, W, 3), got {array.shape}")
    scale = 255 if array.dtype == np.uint8 else 1
    return np.clip(array.astype(np.float32) / scale, 0, 1)


def stretched(heat: Tensor) -> Tensor:
    """(..., h, w) with each map stretched to [0, 1]; a map of one value becomes 0."""
    heat = heat.detach().float().cpu()
    low = heat.amin((-2, -1), keepdim=True)
    span = heat.amax((-2, -1), keepdim=True) - low
    return (heat - low) / torch.where(span > 0, span, 1)


def spread(heat: Tensor, size: tuple[int, int]) -> NDArray[Any]:
    """(h, w) -> (H, W), bilinear, as the maps of attribution methods are laid over pictures."""
    tall = F.interpolate(heat.detach().float().cpu()[None, None], size=size, mode="bilinear", align_corners=False)
    return tall[0, 0].numpy()


def put_picture(axes: Axes, picture: Picture, title: str = "", **options: Any) -> None:
    axes.imshow(to_pixels(picture, **options), interpolation="nearest", extent=UNIT)
    put_title(axes, title)


def put_title(axes: Axes, title: str) -> None:
    if title:
        axes.set_title(title, fontsize=8, color=INK, pad=3)


def put_heat(axes: Axes, picture: Picture, heat: Tensor, title: str = "", **options: Any) -> None:
    """The picture below a map (h, w) in [0, 1]: nearly clear where it is 0."""
    pixels = to_pixels(picture, **options)
    axes.imshow(pixels, interpolation="nearest", extent=UNIT)
    smooth = spread(heat, (pixels.shape[0], pixels.shape[1]))
    axes.imshow(smooth, cmap=HEAT, vmin=0, vmax=1, alpha=_veil(smooth), extent=UNIT)
    put_title(axes, title)


def heated(picture: Picture, heat: Tensor, **options: Any) -> NDArray[np.uint8]:
    """The same as pixels (H, W, 3)."""
    pixels = to_pixels(picture, **options)
    smooth = spread(heat, (pixels.shape[0], pixels.shape[1]))
    veil = _veil(smooth)[..., None]
    mixed = (1 - veil) * pixels + veil * colormaps[HEAT](smooth)[..., :3]
    return (255 * mixed).round().clip(0, 255).astype(np.uint8)


def _veil(smooth: NDArray[Any]) -> NDArray[Any]:
    return 0.15 + 0.7 * np.clip(smooth, 0, 1)


def put_shares(axes: Axes, shares: Tensor, title: str = "") -> None:
    """The partner's share of every token (h, w), one square each."""
    values = shares.detach().float().cpu().numpy()
    axes.imshow(values, cmap=SHARES, vmin=0, vmax=1, interpolation="nearest", extent=UNIT)
    put_title(axes, title)


def new_chart(figure: Drawing, title: str, across: str, up: str) -> Any:
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.set_xlabel(across, fontsize=8, color=INK)
    axes.set_ylabel(up, fontsize=8, color=INK)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(axis="both", color=FAINT, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    return axes


def plain_bar(bar: Any, label: str) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)
    bar.set_label(label, fontsize=8, color=INK)


def grid_of(tokens: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of that many square tokens in a picture of (height, width)."""
    rows = max(1, round((tokens * image_size[0] / image_size[1]) ** 0.5))
    if tokens % rows:
        raise UserError(f"{tokens} tokens are no grid of squares in a picture of {image_size[0]}x{image_size[1]}")
    return rows, tokens // rows


def as_png(figure: Figure, dpi: int = DPI) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def as_svg(figure: Figure) -> str:
    """For a page: no background, text as text in the page's colour, the same bytes for the same figure."""
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "alltokens", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def class_name(index: int, names: Sequence[str] | None) -> str:
    """The class's name where there are names; "class 7" otherwise."""
    return short(names[index]) if names is not None and 0 <= index < len(names) else f"class {index}"


UNIT = (0.0, 1.0, 1.0, 0.0)  # maps and pictures of any resolution lie on one another
