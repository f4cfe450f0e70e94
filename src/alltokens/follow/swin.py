"""Swin and Swin V2: windows, shifted windows, merging.

Shapes: B batch, h and w token grid, y and x window, S = y * x, M windows of a picture. A row is the picture (B, h, w).

The share goes the way of the tokens: roll, pad, cut into windows, attention with the model's own bias and shift mask,
and back. Where the grid does not divide into windows the padding carries no share: its columns are left out of the
attention and the rows normalised. Merging takes the mean of the 2 x 2 tokens, of those that exist at an odd edge.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import swin_transformer as v1
from timm.models import swin_transformer_v2 as v2
from torch import Tensor, nn

from alltokens.core.align import aggregation
from alltokens.errors import UnsupportedModel
from alltokens.follow.route import Moment, Route, Rule, Step, mean_of_tokens


def route(model: Any) -> Route:
    steps: list[Step] = []
    layer = 0
    for stage in model.layers:
        if isinstance(stage.downsample, (v1.PatchMerging, v2.PatchMerging)):
            steps.append(Step(stage.downsample, _merging, attends=False, terms=0, shape=_halved))
        elif not isinstance(stage.downsample, nn.Identity):
            raise UnsupportedModel(f"no share can be followed through {type(stage.downsample).__name__}")
        for block in stage.blocks:
            layer += 1
            if type(block) not in (v1.SwinTransformerBlock, v2.SwinTransformerV2Block):
                raise UnsupportedModel(f"no share can be followed through {type(block).__name__}")
            steps.append(Step(block.attn, _windows(block), layer, drop_path=block.drop_path1))
    return Route(tuple(steps), model.patch_embed.dynamic_feat_size, mean_of_tokens(), picture=True)


def _windows(block: Any) -> Rule:
    def rule(moment: Moment) -> Tensor:
        (y, x), (down, right) = block.window_size, block.shift_size
        row = moment.row.roll((-down, -right), (1, 2)) if down or right else moment.row
        batch, height, width = row.shape
        below, beside = -height % y, -width % x
        valid = None
        if below or beside:
            valid = F.pad(torch.ones_like(row, dtype=torch.bool), (0, beside, 0, below))
            valid = _cut(valid, y, x)
            row = F.pad(row, (0, beside, 0, below))
        down_windows = (height + below) // y
        mixed = moment.attend(_cut(row, y, x), valid)  # (B * M, S)
        mixed = mixed.view(batch, down_windows, -1, y, x).transpose(2, 3).reshape(batch, height + below, width + beside)
        mixed = mixed[:, :height, :width]
        return mixed.roll((down, right), (1, 2)) if down or right else mixed

    return rule


def _cut(row: Tensor, y: int, x: int) -> Tensor:
    """(B, h, w) -> (B * M, S): the windows of a picture, row by row, as timm cuts them."""
    batch, height, width = row.shape
    return row.reshape(batch, height // y, y, width // x, x).transpose(2, 3).reshape(-1, y * x)


def _merging(moment: Moment) -> Tensor:
    return aggregation(moment.row, 2, 2, ceil=True)


def _halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], -(-shape[1] // 2), -(-shape[2] // 2)
