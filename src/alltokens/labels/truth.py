"""How right labels are where the class of every pixel is known.

Shapes: B batch, S side of a class map in pixels, h and w cells, k kept labels, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.errors import UserError
from alltokens.labels.inspect import cell_probabilities
from alltokens.labels.store import LabelStore

NO_CLASS = -1


class CellScores(NamedTuple):
    """Of the cells that have a true class, the share whose label names it."""

    top1: float  # as their first class
    kept: float  # among their kept classes
    cells: int


def true_cells(class_maps: Tensor, grid: tuple[int, int], num_classes: int, least: float = 0.5) -> Tensor:
    """The class of every cell, (B, h, w) int64, from the class of every pixel (B, S, S), ids 0 to K - 1.

    That is the class that most of the cell's pixels have, if at least the share `least` of them have it, and NO_CLASS
    otherwise. Any other id, such as 255, is background: no class.
    """
    if class_maps.ndim != 3 or not 0 < least <= 1:
        raise UserError(f"class maps must be (B, S, S) and least in (0, 1], got {tuple(class_maps.shape)} and {least}")
    pixels = class_maps.long()
    pixels = torch.where((pixels >= 0) & (pixels < num_classes), pixels, num_classes)
    planes = F.one_hot(pixels, num_classes + 1)
    shares = F.adaptive_avg_pool2d(planes[..., :num_classes].permute(0, 3, 1, 2).float(), grid)  # (B, K, h, w)
    share, best = shares.max(1)
    return torch.where(share >= least, best, NO_CLASS)


def score_cells(
    store: LabelStore,
    class_maps: Iterable[tuple[str, np.ndarray | Tensor]],
    *,
    least: float = 0.5,
    at_a_time: int = 256,
) -> CellScores:
    """Hold a store against (key, class map of the whole picture) pairs; see `true_cells` for what a cell's class is."""
    first = among = cells = 0
    pairs = iter(class_maps)
    while some := list(islice(pairs, at_a_time)):
        maps = store.read([key for key, _ in some])
        pixels = torch.stack([torch.as_tensor(np.asarray(class_map)) for _, class_map in some])
        truth = true_cells(pixels, store.manifest.grid, store.manifest.num_classes, least)[:, None]  # (B, 1, h, w)
        best = maps.ids.gather(1, cell_probabilities(maps)[0].argmax(1, keepdim=True))
        known = truth != NO_CLASS
        cells += int(known.sum())
        first += int(((best == truth) & known).sum())
        among += int(((maps.ids == truth) & known).sum())
    if not cells:
        raise UserError("not one cell has a true class: do the class maps count the same classes as the store?")
    return CellScores(first / cells, among / cells, cells)
