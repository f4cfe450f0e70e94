"""What every page shares: templates, embedded pictures, label maps as compact text.

Shapes: k kept labels, h and w cells of a map, H and W picture.

A page is one file that opens by double click. Its content policy forbids every request; names go into it escaped.
"""

from __future__ import annotations

import base64
import io
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.report.style import SHARES


def write_page(template: str, out: Path, **context: Any) -> int:
    """Render one of the templates into the file `out`; its size in bytes."""
    # Keys may hold bytes that are no text (surrogates): a question mark stands for them.
    page = _environment().get_template(template).render(context).encode("utf-8", "replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(page)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    return len(page)


def render(template: str, **context: Any) -> Markup:
    """A part of a page; what goes into it is escaped."""
    return Markup(_environment().get_template(template).render(context))


def picture_uri(picture: Image.Image, side: int) -> str:
    """The picture with its longer side at most `side`, as a data URI."""
    small = picture.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _uri(small, "webp", quality=82, method=4)


def pixels_uri(pixels: np.ndarray) -> str:
    """(H, W, 3) uint8, exactly, for small drawings."""
    return _uri(Image.fromarray(pixels), "png", optimize=True)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}\N{NARROW NO-BREAK SPACE}%"


def input_picture(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Image.Image:
    """What the network was given (3, H, W), as a picture."""
    levels = image.float().cpu() * image.new_tensor(std).float().cpu().view(3, 1, 1)
    levels = 255 * (levels + image.new_tensor(mean).float().cpu().view(3, 1, 1))
    return Image.fromarray(levels.round().clamp(0, 255).permute(1, 2, 0).byte().numpy())


def coded_map(maps: LabelMap, num_classes: int) -> dict[str, Any]:
    """One label map (k, h, w) for the page: class ids and half-precision scores, as they lie in a store."""
    kept, rows, columns = maps.ids.shape
    ids = maps.ids.numpy().astype("<u2" if num_classes <= 1 << 16 else "<u4")
    tail = maps.tail
    return {
        "kept": kept,
        "rows": rows,
        "columns": columns,
        "wide": ids.itemsize == 4,
        "ids": _text(ids),
        "scores": _text(maps.scores.numpy().astype("<f2")),
        "tail": _text(tail.numpy().astype("<f2")) if maps.has_tail and tail is not None else None,
    }


def squares(values: Tensor, pixels: np.ndarray, told: dict[str, Any], *, smooth: bool = False) -> dict[str, Any]:
    """A drawing (H, W, 3) uint8 of one value for each square of a grid (h, w), which the pointer reads.

    told: what stands before and after a value, by what it is multiplied and its digits. A smooth drawing is stored
    as a picture is, others exactly.
    """
    rows, columns = values.shape
    shown = [round(float(one), 4) for one in values.flatten()]
    uri = picture_uri(Image.fromarray(pixels), max(pixels.shape)) if smooth else pixels_uri(pixels)
    return {"uri": uri, "squares": {"rows": rows, "columns": columns, "values": shown, "told": told}}


def share_squares(shares: Tensor) -> dict[str, Any]:
    """The partner's share of every token (h, w)."""
    shares = shares.detach().float().cpu()
    pixels = (255 * SHARES(shares.numpy())[..., :3]).round().astype(np.uint8)
    return squares(
        shares, pixels, {"before": "partner ", "after": "\N{NARROW NO-BREAK SPACE}%", "scale": 100, "digits": 1}
    )


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _uri(picture: Image.Image, form: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return f"data:image/{form};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("alltokens.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["asset"] = _asset
    return environment


def _asset(name: str) -> Markup:
    """A style sheet or script of ours, as it is."""
    return Markup((resources.files("alltokens.report") / "templates" / name).read_text(encoding="utf-8"))
