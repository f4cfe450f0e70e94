"""EVA, EVA-02 and what timm builds on them (DINOv3, Perception Encoder): as ViT, with rotary positions.

Rotation turns query and key before the product; the attention is read after it, so there is nothing special to do.
"""

from __future__ import annotations

from typing import Any

from timm.layers import AttentionRope  # pyright: ignore[reportPrivateImportUsage]
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm

from alltokens.errors import UnsupportedModel
from alltokens.follow.route import Route, Step, all_tokens, first_token, mean_of_tokens
from alltokens.follow.vit import attention_pooling


def route(model: Any) -> Route:
    if model.patch_drop is not None:
        raise UnsupportedModel("a share cannot follow tokens that are dropped: build the model with patch_drop_rate=0")
    steps = tuple(_block(block, layer) for layer, block in enumerate(model.blocks, 1))
    prefix = model.num_prefix_tokens
    pooling, classified = None, mean_of_tokens(prefix)
    if model.attn_pool is not None:
        pooling, classified = attention_pooling(model.attn_pool, 0)  # Eva hands all its tokens to the pooling
    elif model.global_pool == "token" or (not model.global_pool and model.cls_token is not None):
        classified = first_token
    return Route(
        steps,
        model.patch_embed.dynamic_feat_size,
        classified,
        prefix=prefix,
        pooling=pooling,
        class_attention=steps[-1] if classified is first_token and pooling is None else None,
    )


def _block(block: Any, layer: int) -> Step:
    if type(block) in (EvaBlock, EvaBlockPostNorm) and type(block.attn) in (EvaAttention, AttentionRope):
        return Step(block.attn, all_tokens, layer, drop_path=block.drop_path1)
    raise UnsupportedModel(f"no share can be followed through {type(block).__name__}")
