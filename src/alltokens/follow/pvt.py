"""PVT and PVT v2: attention to a reduced grid.

Shapes: B batch, h and w token grid, N = h * w. Rows are pictures (B, h, w); in PVT's last stage (B, 1 + N).

Reducing the keys' grid, by a strided convolution or by pooling, is an aggregation: the plain mean of the reduced patch.
So is the patch embedding between stages, also where its patches overlap. The depth-wise convolution in the MLPs of PVT
v2 mixes tokens and is followed as any convolution. PVT's class token joins in the last stage with the picture's share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.pvt_v2 import Attention, MlpWithDepthwiseConv
from torch import Tensor

from alltokens.core.align import aggregation
from alltokens.errors import UnsupportedModel
from alltokens.follow.convnext import depth_wise, grid_after, strided
from alltokens.follow.route import Moment, Route, Rule, Step, all_tokens, first_token, mean_of_tokens


def route_v2(model: Any) -> Route:
    steps: list[Step] = []
    layer = 0
    for stage in model.stages:
        if stage.downsample is not None:
            steps.append(strided(stage.downsample.proj))
        for block in stage.blocks:
            layer += 1
            if type(block.attn) is not Attention or type(block.mlp) is not MlpWithDepthwiseConv:
                raise UnsupportedModel(f"no share can be followed through this {type(block).__name__}")
            steps.append(Step(block.attn, _reduced_v2(block.attn), layer, drop_path=block.drop_path1))
            steps.append(depth_wise(block.mlp.dwconv, layer, block.drop_path2))
    patch = model.patch_embed.proj
    return Route(tuple(steps), lambda image_size: grid_after(patch, image_size), mean_of_tokens(), picture=True)


def route_v1(model: Any) -> Route:
    stages = len(model.grid_sizes)
    steps: list[Step] = []
    layer = 0
    for number in range(1, stages + 1):
        last = number == stages
        if number > 1:
            merging = getattr(model, f"patch_embed{number}")
            rule, shape = (_last_merging, _with_class) if last else (_merging, _halved)
            steps.append(Step(merging, rule, attends=False, terms=0, shape=shape))
        for block in getattr(model, f"block{number}"):
            layer += 1
            rule = all_tokens if last else _reduced(block.attn.reduction)
            steps.append(Step(block.attn, rule, layer, drop_path=block.drop_path1))
    return Route(
        tuple(steps),
        lambda image_size: (image_size[0] // 4, image_size[1] // 4),
        first_token,
        prefix=1,
        picture=True,
        class_attention=steps[-1],
        last_grid=lambda image_size: (image_size[0] // 32, image_size[1] // 32),
    )


def _reduced(reduction: int) -> Rule:
    def rule(moment: Moment) -> Tensor:
        keys = moment.row if reduction == 1 else aggregation(moment.row, reduction, reduction)
        return moment.attend(keys.flatten(1)).view_as(moment.row)

    return rule


def _reduced_v2(attention: Any) -> Rule:
    if attention.pool is None:
        return _reduced(1 if attention.sr is None else attention.sr.stride[0])

    def rule(moment: Moment) -> Tensor:
        keys = F.adaptive_avg_pool2d(moment.row.unsqueeze(1), attention.pool.output_size).flatten(1)
        return moment.attend(keys).view_as(moment.row)

    return rule


def _merging(moment: Moment) -> Tensor:
    return aggregation(moment.row, 2, 2)


def _last_merging(moment: Moment) -> Tensor:
    return torch.cat([moment.start.unsqueeze(1), _merging(moment).flatten(1)], dim=1)


def _halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[1] // 2, shape[2] // 2


def _with_class(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], 1 + (shape[1] // 2) * (shape[2] // 2)
