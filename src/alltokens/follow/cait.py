"""CaiT: talking heads among the patches, then class attention.

Shapes: B batch, N patches. A row is (B, 1 + N): the class token first, from the start on.

Talking heads mix the heads' softmax, so weights can be negative and rows need not sum to 1: each head's absolute
weights are normalised, then the mean over heads is taken. In class attention only the class token moves.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.cait import ClassAttn, LayerScaleBlock, LayerScaleBlockClassAttn, TalkingHeadAttn
from torch import Tensor, nn

from alltokens.errors import UnsupportedModel
from alltokens.follow.route import Moment, Route, Step, first_token, mean_of_tokens


def route(model: Any) -> Route:
    for block in model.blocks:
        _check(block, LayerScaleBlock, TalkingHeadAttn)
    for block in model.blocks_token_only:
        _check(block, LayerScaleBlockClassAttn, ClassAttn)
    depth = len(model.blocks)
    body = [Step(block.attn, _patches, layer, signed=True) for layer, block in enumerate(model.blocks, 1)]
    last = [Step(block.attn, _class, depth + layer) for layer, block in enumerate(model.blocks_token_only, 1)]
    by_class = model.global_pool != "avg"
    return Route(
        tuple(body + last),
        model.patch_embed.dynamic_feat_size,
        first_token if by_class else mean_of_tokens(1),
        prefix=1,
        class_attention=last[-1] if by_class else None,
    )


def _patches(moment: Moment) -> Tensor:
    return torch.cat([moment.row[:, :1], moment.attend(moment.row[:, 1:])], dim=1)


def _class(moment: Moment) -> Tensor:
    return torch.cat([moment.attend(moment.row), moment.row[:, 1:]], dim=1)


def _check(block: Any, kind: type[nn.Module], attention: type[nn.Module]) -> None:
    if type(block) is not kind or type(block.attn) is not attention:
        raise UnsupportedModel(f"no share can be followed through {type(block).__name__} of this CaiT")
