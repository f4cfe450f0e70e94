"""ConvNeXt: tokens mixed by depth-wise convolutions.

Shapes: B batch, h and w token grid. A row is the picture (B, h, w).

The weights of a token's neighbours are the mean over channels of the absolute kernel, normalised over those that lie in
the picture. Downsampling by 2 x 2 merges: the plain mean.
"""

from __future__ import annotations

from typing import Any

from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from alltokens.core.align import aggregation, convolution
from alltokens.errors import UnsupportedModel
from alltokens.follow.route import Grid, Moment, Route, Step, mean_of_tokens


def route(model: Any) -> Route:
    steps: list[Step] = []
    layer = 0
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            conv = stage.downsample[-1]
            if type(conv) is not nn.Conv2d or conv.dilation != (1, 1):
                raise UnsupportedModel("a share can follow ConvNeXt only at its full output stride of 32")
            if conv.stride != (1, 1):
                steps.append(strided(conv))
        for block in stage.blocks:
            layer += 1
            if type(block) is not ConvNeXtBlock or not isinstance(block.shortcut, nn.Identity):
                raise UnsupportedModel(f"no share can be followed through this {type(block).__name__}")
            steps.append(depth_wise(block.conv_dw, layer, block.drop_path))
    stem = [module for module in model.stem.modules() if isinstance(module, nn.Conv2d)]

    def grid(image_size: Grid) -> Grid:
        size = image_size
        for conv in stem:
            size = grid_after(conv, size)
        return size

    return Route(tuple(steps), grid, mean_of_tokens(), picture=True)


def depth_wise(conv: Any, layer: int, drop_path: nn.Module | None) -> Step:
    """The step of a depth-wise convolution that keeps the grid."""
    if not isinstance(conv, nn.Conv2d) or conv.stride != (1, 1) or conv.groups != conv.in_channels:
        raise UnsupportedModel(f"no share can be followed through {conv}, which is no plain depth-wise convolution")
    padding: Any = conv.padding  # nn.Conv2d types these as what a user may give, not as the pairs they are
    dilation: Any = conv.dilation

    def rule(moment: Moment) -> Tensor:
        return convolution(moment.row, conv.weight, padding, dilation)

    return Step(conv, rule, layer, attends=False, drop_path=drop_path)


def strided(conv: Any) -> Step:
    """The step of a convolution that merges tokens."""

    def rule(moment: Moment) -> Tensor:
        return aggregation(moment.row, conv.kernel_size, conv.stride, conv.padding)

    def shape(before: tuple[int, ...]) -> tuple[int, ...]:
        return before[0], *grid_after(conv, (before[1], before[2]))

    return Step(conv, rule, attends=False, terms=0, shape=shape)


def grid_after(conv: Any, size: Grid) -> Grid:
    height, width = (
        (side + 2 * padding - kernel) // stride + 1
        for side, kernel, stride, padding in zip(size, conv.kernel_size, conv.stride, conv.padding, strict=True)
    )
    return height, width
