"""MLP-Mixer and ResMLP: tokens mixed by learned matrices.

Shapes: B batch, N tokens. A row is (B, N).

ResMLP mixes by one N x N matrix. Mixer has an MLP over tokens: its share goes through the two matrices one after the
other, each by absolute value with rows normalised, and the activation between them leaves it.
"""

from __future__ import annotations

from typing import Any

from timm.layers import Mlp  # pyright: ignore[reportPrivateImportUsage]
from timm.models.mlp_mixer import MixerBlock, ResBlock
from torch import Tensor

from alltokens.core.align import spatial_mixing
from alltokens.errors import UnsupportedModel
from alltokens.follow.route import Moment, Route, Rule, Step, mean_of_tokens


def route(model: Any) -> Route:
    steps = tuple(_block(block, layer) for layer, block in enumerate(model.blocks, 1))
    return Route(steps, model.stem.dynamic_feat_size, mean_of_tokens())


def _block(block: Any, layer: int) -> Step:
    if type(block) is ResBlock:
        return Step(block.linear_tokens, _through(block.linear_tokens), layer, attends=False)
    if type(block) is MixerBlock and type(block.mlp_tokens) is Mlp:
        return Step(block.mlp_tokens, _through(block.mlp_tokens.fc1, block.mlp_tokens.fc2), layer, attends=False)
    raise UnsupportedModel(f"no share can be followed through {type(block).__name__}, which multiplies tokens by gates")


def _through(*matrices: Any) -> Rule:
    def rule(moment: Moment) -> Tensor:
        row = moment.row
        for matrix in matrices:
            row = spatial_mixing(matrix.weight, row.unsqueeze(1)).squeeze(1)
        return row

    return rule
