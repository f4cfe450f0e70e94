"""Label maps as tensors, and the labels of tokens read from them through the matrix that made the picture.

Shapes: B batch, k kept classes, h and w cells of a map, K classes; N = rows * columns tokens; S samples along one side
of a token, P = S * S points, V cells along one side of its window, C = V * V cells, M = C * k entries.

A map covers the whole picture. A token's label is the mean over n x n points spread evenly in it, n = ceil(its side in
cells), each read between the four nearest cells: RoIAlign as the published programs use it (FACTS 2.2), for any matrix.
All points of a token lie in a window of V x V cells, known from the shapes alone; so every token has C cells with a
weight each, no shape depends on data, and never are there K planes.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from alltokens.core.kernels.merge_entries import merge_entries
from alltokens.core.token_targets import TokenTargets
from alltokens.core.transfer import sent
from alltokens.errors import UserError, unknown

Tail = Literal["zero", "true"]
Axes = Literal["right", "official"]

NO_TAIL = torch.empty(0)  # None would do for one map, but torch's default_collate has no way with it

# Sides that are longer than a whole number of cells by rounding alone take no further sample.
_ROUNDING = 1e-4


class LabelMap(NamedTuple):
    """The classes with the highest scores at every cell of a picture, or of a batch of pictures."""

    ids: Tensor  # (..., k, h, w) integers, distinct within a cell
    scores: Tensor  # (..., k, h, w) raw scores (logits)
    tail: Tensor | None = NO_TAIL  # (..., h, w): log-sum-exp of all other classes' scores; empty or None: not known

    @property
    def has_tail(self) -> bool:
        return self.tail is not None and self.tail.numel() > 0

    def to(self, device: torch.device | str) -> LabelMap:
        ids, scores, tail = (None if part is None else sent(part, device) for part in self)
        assert ids is not None and scores is not None
        return LabelMap(ids, scores, tail)


def sample_token_targets(
    maps: LabelMap,
    matrix: Tensor,
    grid: tuple[int, int],
    num_classes: int | None = None,
    smoothing: float = 0.0,
    *,
    tail: Tail = "zero",
    axes: Axes = "right",
) -> TokenTargets:
    """The label of every token of the pictures that `matrix` (B, 2, 3) makes, cut into `grid`, sparse.

    - `tail="zero"`, as published: the scores, zeros for classes that are not kept, are averaged, then softmax.
    - `tail="true"`: the mean of the cells' own softmax, exp(score - logsumexp(scores, tail)), where what is missing in
      a cell is spread evenly over the classes that are not kept in it.
    - `axes="right"`: points outside the picture have no label; a token's `weight` is its fraction inside.
    - `axes="official"`: x and y of crops change places, as in the published programs (FACTS 2.4), for crops and
      mirrored crops; points outside score zero for every class, and every weight is 1.

    `smoothing` is the published one: label * (1 - s + s/K) + s/K, which sums to 1 + s/K.

    The classes that are not kept have their part in all of this, so it takes `num_classes`. Without it nothing is known
    of them, and the kept classes share the label alone: the mean of the scores, then softmax over what a token keeps.
    """
    _check(maps, matrix, grid, num_classes, smoothing, tail, axes)
    dtype = torch.promote_types(maps.scores.dtype, torch.float32)
    cells, weights, inside = _cell_weights(matrix.to(dtype), _size(maps), grid, axes)
    values, unlisted = _cell_values(maps, num_classes or 0, tail, dtype)  # (B, h*w, k), (B, h*w, 1)
    ids = maps.ids.flatten(-2).transpose(1, 2).long()  # (B, h*w, k)

    shape = (*weights.shape, ids.shape[-1])  # (B, N, C, k)
    flat = cells.flatten(1).unsqueeze(-1)  # (B, N*C, 1)
    entries = torch.take_along_dim(ids, flat, 1).view(shape).flatten(-2)
    values = torch.take_along_dim(values, flat, 1).view(shape) * weights.unsqueeze(-1)
    # One entry a class is what a softmax needs.
    ids, values = entries, merge_entries(entries, values.flatten(-2))  # (B, N, M)

    if num_classes is None:
        read = weights.unsqueeze(-1).expand(shape).flatten(-2)
        read = merge_entries(entries, read)  # 0 where nothing was read of an entry's class
        probabilities = values.masked_fill(read == 0, -math.inf).softmax(-1).where(inside.unsqueeze(-1) > 0, 0)
        return TokenTargets(ids, probabilities, torch.zeros_like(inside), inside, grid)
    if tail == "zero":
        probabilities, rest = _softmax_among_zeros(values, num_classes)
    else:
        rest = (torch.take_along_dim(unlisted, flat, 1).view_as(weights) * weights).sum(-1)
        probabilities, rest = values, torch.where(inside > 0, rest, 1 / num_classes)
    low = smoothing / num_classes
    weight = inside if axes == "right" else torch.ones_like(inside)
    return TokenTargets(ids, probabilities * (1 - smoothing + low), rest * (1 - smoothing + low) + low, weight, grid)


def sample_class_targets(
    maps: LabelMap,
    matrix: Tensor,
    num_classes: int,
    smoothing: float = 0.0,
    *,
    tail: Tail = "zero",
    axes: Axes = "right",
) -> Tensor:
    """(B, K): the label of each picture as a whole, as ReLabel makes it: one token as large as the picture.

    That is not the mean of its tokens' labels: with `tail="zero"` the softmax comes after the mean.
    """
    whole = sample_token_targets(maps, matrix, (1, 1), num_classes, smoothing, tail=tail, axes=axes)
    return whole.dense(num_classes).squeeze(1)


def sample_token_labels(
    maps: LabelMap,
    matrix: Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.0,
    *,
    tail: Tail = "zero",
    axes: Axes = "right",
) -> tuple[Tensor, Tensor]:
    """Class targets (B, K) and token targets (B, N, K) in full: the reference, and for loops that want no more."""
    class_targets = sample_class_targets(maps, matrix, num_classes, smoothing, tail=tail, axes=axes)
    targets = sample_token_targets(maps, matrix, grid, num_classes, smoothing, tail=tail, axes=axes)
    return class_targets, targets.dense(num_classes)


def _cell_weights(
    matrix: Tensor, size: tuple[int, int], grid: tuple[int, int], axes: Axes
) -> tuple[Tensor, Tensor, Tensor]:
    """The cells (B, N, C) of each token (indices into h*w), their weights, and the token's fraction inside (B, N).

    With right axes the weights of a token that is inside at all sum to 1; with official ones to its fraction inside.
    """
    (height, width), (rows, columns) = size, grid
    across, down, origin = _in_cells(matrix, size, axes)  # (B, 2) each
    count_across, wide_across = _samples(across, columns, size)  # (B,), (B, 2)
    count_down, wide_down = _samples(down, rows, size)
    most_across, most_down = _most_samples(columns, size), _most_samples(rows, size)
    most = max(most_across, most_down)

    column = torch.arange(columns, device=matrix.device, dtype=matrix.dtype)[:, None]
    row = torch.arange(rows, device=matrix.device, dtype=matrix.dtype)[:, None]
    sample = torch.arange(most, device=matrix.device, dtype=matrix.dtype)
    along = (column + (sample[:most_across] + 0.5) / count_across[:, None, None]) / columns  # (B, columns, S)
    below = (row + (sample[:most_down] + 0.5) / count_down[:, None, None]) / rows  # (B, rows, S)
    taken_across = sample[:most_across] < count_across[:, None]
    taken_down = sample[:most_down] < count_down[:, None]
    used = (
        (taken_down[:, :, None] & taken_across[:, None, :]).flatten(1)[:, None, None].to(matrix.dtype)
    )  # (B, 1, 1, P)

    def position(axis: int, step: Tensor, stride: Tensor, along: Tensor, below: Tensor) -> Tensor:
        """(B, rows, columns, P): where all points lie."""
        rightwards = step[:, axis, None, None] * along  # (B, columns, S)
        downwards = origin[:, axis, None, None] + stride[:, axis, None, None] * below  # (B, rows, S)
        return (downwards[:, :, None, :, None] + rightwards[:, None, :, None, :]).flatten(3)

    # The window lies about the token's middle; the clamp keeps it in the map, where all points are brought anyway.
    centre = ((column + 0.5) / columns).expand(len(matrix), -1, -1)  # (B, columns, 1)
    middle = ((row + 0.5) / rows).expand(len(matrix), -1, -1)  # (B, rows, 1)
    reach = max(_reach(columns, size), _reach(rows, size))
    window, first = [0, 0], [origin, origin]
    for axis, cells in enumerate((width, height)):
        window[axis] = min(reach + 2, cells)
        low = (position(axis, wide_across, wide_down, centre, middle) - reach / 2).floor()
        first[axis] = low.clamp(0, cells - window[axis])  # (B, rows, columns, 1)

    def shares(axis: int, at: Tensor) -> Tensor:
        """(B, rows, columns, P, V): how a point between cells is shared out among those of the window."""
        nearest = at.clamp(0, (width, height)[axis] - 1)
        nearest = nearest.clamp(first[axis], first[axis] + window[axis] - 1).unsqueeze(-1)
        cell = first[axis].unsqueeze(-1) + torch.arange(window[axis], device=matrix.device, dtype=matrix.dtype)
        return (1 - (nearest - cell).abs()).clamp(min=0)

    x, y = (position(axis, wide_across, wide_down, along, below) for axis in (0, 1))
    if axes == "right":
        # RoIs are widened to a cell for reading only; whether a point is in the picture is asked where it is.
        true_x, true_y = (position(axis, across, down, along, below) for axis in (0, 1))
        used = used * _within(true_x, -0.5, width - 0.5) * _within(true_y, -0.5, height - 0.5)
    else:
        used = used * _within(x, -1, width) * _within(y, -1, height)
    with torch.autocast(matrix.device.type, enabled=False):  # it would take the product in 16 bits
        weights = (shares(1, y) * used.unsqueeze(-1)).mT @ shares(0, x)  # (B, rows, columns, V, V)
    inside = used.sum(-1)

    count = (count_across * count_down)[:, None, None]
    total = (inside.clamp(min=1) if axes == "right" else count)[..., None, None]
    vertical = first[1].unsqueeze(-1) + torch.arange(window[1], device=matrix.device)[:, None]
    cells = (vertical * width + first[0].unsqueeze(-1) + torch.arange(window[0], device=matrix.device)).long()
    return cells.flatten(3).flatten(1, 2), (weights / total).flatten(3).flatten(1, 2), (inside / count).flatten(1)


def _in_cells(matrix: Tensor, size: tuple[int, int], axes: Axes) -> tuple[Tensor, Tensor, Tensor]:
    """(B, 2) each, x and y in cells: the picture's upper side, its left side, its corner; cell i's centre is i."""
    height, width = size
    if axes == "right":
        scale = matrix.new_tensor([width, height])[:, None]
        across, down, origin = (matrix * scale).unbind(-1)
        return across, down, origin - 0.5
    # As published, the map is mirrored first, and a crop's (top, left) then taken for (x, y), in widths both.
    mirrored = torch.stack([matrix[:, 0, 0] < 0, matrix[:, 1, 1] < 0], 1)  # (B, 2)
    across, down, origin = matrix.unbind(-1)
    sign = 1 - 2 * mirrored.to(matrix.dtype)
    across, down, origin = across * sign, down * sign, origin * sign + mirrored.to(matrix.dtype)
    across, down, origin = down.flip(1) * sign, across.flip(1) * sign, origin.flip(1) * sign + mirrored.to(matrix.dtype)
    return across * width, down * width, origin * width - 0.5


def _samples(side: Tensor, parts: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Samples along each of `parts` tokens (B,) of a side (B, 2), and that side made at least one cell long."""
    length = side.square().sum(-1).sqrt().clamp(min=1e-6)
    count = (length.clamp(min=1) / parts - _ROUNDING).ceil().clamp(1, _most_samples(parts, size))
    return count, side / length.clamp(max=1)[:, None]


def _most_samples(parts: int, size: tuple[int, int]) -> int:
    """The most samples along a token that a crop can ask for: those of the whole picture."""
    return math.ceil(max(size) / parts)


def _reach(parts: int, size: tuple[int, int]) -> int:
    """How many cells a token's first and last sample lie apart at the most, in a crop turned by any angle.

    Only a picture that shows more than the whole source in one direction has its points drawn together to that.
    """
    most = _most_samples(parts, size)
    return math.ceil(math.sqrt(2) * (most - 1) / most * max(size) / parts)


def _within(value: Tensor, low: float, high: float) -> Tensor:
    return ((value >= low) & (value <= high)).to(value.dtype)


def _cell_values(maps: LabelMap, num_classes: int, tail: Tail, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is averaged, by cell: of kept classes (B, h*w, k), above that of each class not kept (B, h*w, 1)."""
    scores = maps.scores.flatten(-2).transpose(1, 2).to(dtype)  # (B, h*w, k)
    others = num_classes - scores.shape[-1]
    if tail == "zero" or others == 0:
        unlisted = torch.zeros_like(scores[..., :1])
        return (scores if tail == "zero" else scores.softmax(-1)), unlisted
    assert maps.tail is not None
    with_tail = torch.cat([scores, maps.tail.flatten(1).unsqueeze(-1).to(dtype)], -1).softmax(-1)
    unlisted = with_tail[..., -1:] / others
    return with_tail[..., :-1] - unlisted, unlisted


def _softmax_among_zeros(scores: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Softmax over K classes of which only those of the entries (B, N, M) do not score 0."""
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    zero = (-top).exp()  # (B, N, 1)
    above = (scores - top).exp() - zero
    total = num_classes * zero + above.sum(-1, keepdim=True)
    return above / total, (zero / total).squeeze(-1)


def _size(maps: LabelMap) -> tuple[int, int]:
    return maps.ids.shape[-2], maps.ids.shape[-1]


def _check(
    maps: LabelMap,
    matrix: Tensor,
    grid: tuple[int, int],
    num_classes: int | None,
    smoothing: float,
    tail: str,
    axes: str,
) -> None:
    if tail not in ("zero", "true"):
        raise unknown("tail", tail, ("zero", "true"))
    if axes not in ("right", "official"):
        raise unknown("axes", axes, ("right", "official"))
    if maps.ids.ndim != 4 or maps.ids.shape != maps.scores.shape:
        raise UserError(
            f"maps must be a batch, ids and scores (B, k, h, w) alike, got {tuple(maps.ids.shape)} and "
            f"{tuple(maps.scores.shape)}; one picture's maps become a batch by default_collate([maps])"
        )
    batch, kept = maps.ids.shape[:2]
    if matrix.shape != (batch, 2, 3):
        raise UserError(f"{batch} maps want a matrix of shape ({batch}, 2, 3), got {tuple(matrix.shape)}")
    if min(grid) < 1:
        raise UserError(f"the grid of tokens must have positive sides, got {grid}")
    if not 0 <= smoothing < 1:
        raise UserError(f"smoothing must lie in [0, 1), got {smoothing}")
    if num_classes is None:
        if smoothing or tail != "zero" or axes != "right":
            raise UserError("smoothing, tail='true' and axes='official' reckon with all classes: say num_classes too")
        return
    if num_classes < kept:
        raise UserError(f"num_classes is {num_classes}, but the maps keep {kept} classes a cell")
    if tail == "true" and num_classes > kept:
        if not maps.has_tail:
            raise UserError("these maps hold no tail, so tail='true' cannot be had; use tail='zero', or annotate anew")
        assert maps.tail is not None
        if maps.tail.shape != (batch, *_size(maps)):
            raise UserError(f"the tail must be (B, h, w) = {(batch, *_size(maps))}, got {tuple(maps.tail.shape)}")
