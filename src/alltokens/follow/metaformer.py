"""PoolFormer, ConvFormer and CAFormer: one frame, the token mixer is pooling, a depth-wise convolution or attention.

Shapes: B batch, h and w token grid. A row is the picture (B, h, w).

PoolFormer's mixer is "mean of the neighbourhood minus the token", a matrix with negative weights on its diagonal: it
enters by absolute value as all others. The strided convolutions between stages merge: the plain mean of their window.
"""

from __future__ import annotations

from typing import Any

from timm.models.metaformer import Attention, MetaFormerBlock, Pooling, SepConv
from torch import Tensor, nn

from alltokens.core.align import pooling_minus_identity
from alltokens.errors import UnsupportedModel
from alltokens.follow.convnext import depth_wise, grid_after, strided
from alltokens.follow.route import Moment, Route, Step, mean_of_tokens


def route(model: Any) -> Route:
    steps: list[Step] = []
    layer = 0
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            steps.append(strided(stage.downsample.conv))
        for block in stage.blocks:
            layer += 1
            steps.append(_block(block, layer))
    stem = model.stem.conv
    return Route(tuple(steps), lambda image_size: grid_after(stem, image_size), mean_of_tokens(), picture=True)


def _block(block: Any, layer: int) -> Step:
    assert isinstance(block, MetaFormerBlock)
    mixer = block.token_mixer
    if type(mixer) is Pooling:
        size: Any = mixer.pool.kernel_size

        def pooling(moment: Moment) -> Tensor:
            return pooling_minus_identity(moment.row, size)

        return Step(mixer, pooling, layer, attends=False, drop_path=block.drop_path1)
    if type(mixer) is SepConv:
        return depth_wise(mixer.dwconv, layer, block.drop_path1)
    if type(mixer) is Attention:
        return Step(mixer, _attention, layer, drop_path=block.drop_path1)
    raise UnsupportedModel(f"no share can be followed through the token mixer {type(mixer).__name__}")


def _attention(moment: Moment) -> Tensor:
    return moment.attend(moment.row.flatten(1)).view_as(moment.row)
