"""Where each place of the network's input comes from in the source picture: one affine matrix per picture.

Shapes: ... any leading dimensions (none, or B batch), P points, H and W picture.

Every matrix is (..., 2, 3) and takes a point (x right, y down, both in [0, 1] across the picture) *from the output to
the source*: the direction in which pictures and labels are sampled. `compose(crop, flip, turn)` is therefore the
picture that is first cropped, then flipped, then turned. Arguments may be numbers or tensors; tensors of one shape.

Turning and shearing happen in pixels, so they need the picture's `size` = (H, W), of which only the ratio matters.
Nothing here multiplies matrices by a library call: TF32, where it is allowed, would cost pictures whole pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Value = float | Tensor
CENTRE = (0.5, 0.5)


def identity() -> Tensor:
    """(2, 3): each point comes from where it is."""
    return torch.eye(2, 3)


def crop(left: Value, top: Value, width: Value, height: Value) -> Tensor:
    """(..., 2, 3): the output shows this box of the source."""
    return _matrix(width, 0.0, left, 0.0, height, top)


def flip(horizontal: bool | Tensor = False, vertical: bool | Tensor = False) -> Tensor:
    """(..., 2, 3): mirrored left to right, top to bottom, or both."""
    across = horizontal.float() if isinstance(horizontal, Tensor) else float(horizontal)
    down = vertical.float() if isinstance(vertical, Tensor) else float(vertical)
    return _matrix(1 - 2 * across, 0.0, across, 0.0, 1 - 2 * down, down)


def rotate(degrees: Value, size: tuple[int, int] = (1, 1), centre: tuple[float, float] = CENTRE) -> Tensor:
    """(..., 2, 3): the picture turned counter-clockwise about `centre`, its shapes kept."""
    angle = degrees * (math.pi / 180)
    cosine = torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
    sine = torch.sin(angle) if isinstance(angle, Tensor) else math.sin(angle)
    tall = size[0] / size[1]
    return _about(centre, cosine, -sine * tall, sine / tall, cosine)


def shear(
    x: Value = 0.0, y: Value = 0.0, size: tuple[int, int] = (1, 1), centre: tuple[float, float] = CENTRE
) -> Tensor:
    """(..., 2, 3): `x` pixels to the side for each pixel down, `y` pixels down for each to the side; `centre` stays."""
    tall = size[0] / size[1]
    return _about(centre, 1.0, x * tall, y / tall, 1.0)


def translate(x: Value = 0.0, y: Value = 0.0) -> Tensor:
    """(..., 2, 3): each point comes from `x` widths to the right and `y` heights below."""
    return _matrix(1.0, 0.0, x, 0.0, 1.0, y)


def compose(*matrices: Tensor) -> Tensor:
    """(..., 2, 3): one after the other; a point of the last output goes through the last one first."""
    total = matrices[0]
    for matrix in matrices[1:]:
        linear, offset = total[..., :2], total[..., 2:]
        product = (linear.unsqueeze(-1) * matrix.unsqueeze(-3)).sum(-2)  # (..., 2, 3)
        total = torch.cat((product[..., :2], product[..., 2:] + offset), dim=-1)
    return total


def apply(matrix: Tensor, points: Tensor) -> Tensor:
    """(..., 2, 3), (..., P, 2) -> (..., P, 2): where these points of the output come from."""
    x, y = points[..., :1], points[..., 1:]
    columns = matrix.unsqueeze(-3)  # (..., 1, 2, 3)
    return columns[..., 0] * x + columns[..., 1] * y + columns[..., 2]


def invert(matrix: Tensor) -> Tensor:
    """(..., 2, 3): where a point of the source is shown in the output."""
    a, b, c, d, e, f = matrix.flatten(-2).unbind(-1)
    area = a * e - b * d
    return _matrix(e / area, -b / area, (b * f - c * e) / area, -d / area, a / area, (c * d - a * f) / area)


def coordinates(matrix: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(..., 2, 3) -> x and y (..., H, W): where each pixel's centre comes from."""
    y = ((torch.arange(size[0], device=matrix.device, dtype=matrix.dtype) + 0.5) / size[0])[:, None]  # (H, 1)
    x = (torch.arange(size[1], device=matrix.device, dtype=matrix.dtype) + 0.5) / size[1]  # (W,)
    along, down, offset = matrix[..., None, None].unbind(-3)  # (..., 2, 1, 1) each
    # Rows and columns first, so that only one addition is as large as the picture.
    source_x, source_y = (along * x + (down * y + offset)).unbind(-3)
    return source_x, source_y


def grid_for(matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """(..., 2, 3) -> (..., H, W, 2): the grid for `torch.nn.functional.grid_sample(..., align_corners=False)`.

    That function counts from -1 to 1 across the picture, edge to edge.
    """
    twice = torch.cat((2 * matrix[..., :2], 2 * matrix[..., 2:] - 1), dim=-1)
    return torch.stack(coordinates(twice, size), dim=-1)


def _about(centre: tuple[float, float], a: Value, b: Value, d: Value, e: Value) -> Tensor:
    """The linear map [[a, b], [d, e]] that leaves `centre` where it is."""
    x, y = centre
    return _matrix(a, b, x - (a * x + b * y), d, e, y - (d * x + e * y))


def _matrix(a: Value, b: Value, c: Value, d: Value, e: Value, f: Value) -> Tensor:
    values = (a, b, c, d, e, f)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=torch.float32).view(2, 3)
    like = tensors[0]
    entries = [value if isinstance(value, Tensor) else torch.full_like(like, value) for value in values]
    return torch.stack(entries, dim=-1).reshape(*like.shape, 2, 3)
