"""ViT and DeiT in all variants of timm: the share of every token through self-attention.

Shapes: B batch, P prefix tokens, N patches, T = P + N.

Branches add up and are normalised at the end: a block with attention and MLP side by side makes (2 Y + A Y) / 3, one
with two attentions side by side (Y + A Y + A' Y) / 3. Norms, layer scale and the MLP leave the share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from timm.layers import Attention, AttentionPoolLatent, AttentionPoolPrr  # pyright: ignore[reportPrivateImportUsage]
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import (
    Block,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from alltokens.errors import UnsupportedModel
from alltokens.follow.route import Moment, Route, Rule, Step, all_tokens, first_token, mean_of_tokens


def route(model: Any) -> Route:
    if not isinstance(model.patch_drop, nn.Identity):
        raise UnsupportedModel("a share cannot follow tokens that are dropped: build the model with patch_drop_rate=0")
    steps = tuple(step for layer, block in enumerate(model.blocks, 1) for step in _block(block, layer))
    prefix = model.num_prefix_tokens
    pooling, classified = _head(model)
    has_class_attention = classified is first_token and pooling is None and steps[-1].parallel == 0
    return Route(
        steps,
        model.patch_embed.dynamic_feat_size,
        classified,
        prefix=prefix,
        pooling=pooling,
        class_attention=steps[-1] if has_class_attention else None,
    )


def _block(block: Any, layer: int) -> Iterator[Step]:
    if type(block) in (Block, ResPostBlock) and type(block.attn) is Attention:
        yield Step(block.attn, all_tokens, layer, drop_path=block.drop_path1)
    elif type(block) is ParallelScalingBlock:  # attention and MLP side by side
        yield Step(block, all_tokens, layer, terms=2, drop_path=block.drop_path)
    elif type(block) is ParallelThingsBlock and all(type(branch.attn) is Attention for branch in block.attns):
        branches: Any = block.attns
        for index, branch in enumerate(branches):
            yield Step(branch.attn, all_tokens, layer, terms=index + 1, parallel=index)
    else:
        attention = type(getattr(block, "attn", None)).__name__ if hasattr(block, "attn") else "its own attention"
        raise UnsupportedModel(f"no share can be followed through {type(block).__name__} with {attention}")


def _head(model: VisionTransformer) -> tuple[Step | None, Callable[[Tensor], Tensor]]:
    prefix = model.num_prefix_tokens
    if model.attn_pool is not None:
        return attention_pooling(model.attn_pool, 0 if model.pool_include_prefix else prefix)
    if isinstance(model, VisionTransformerDistilled):
        return None, _first_two  # the mean of both heads is what is classified
    if model.global_pool == "token" or (not model.global_pool and model.has_class_token):
        return None, first_token
    return None, mean_of_tokens(0 if model.pool_include_prefix else prefix)


def attention_pooling(pool: Any, skip: int) -> tuple[Step, Callable[[Tensor], Tensor]]:
    """Pooling by attention replaces the stream instead of adding to it. The first `skip` tokens take no part."""
    if type(pool) is AttentionPoolLatent:
        step = Step(pool, _pooled_from(skip), terms=0, shape=lambda row: (row[0], pool.latent_len))
    elif type(pool) is AttentionPoolPrr:
        step = Step(pool, all_tokens, terms=0)
    else:
        raise UnsupportedModel(f"no share can be followed through the pooling {type(pool).__name__}")
    return step, first_token if pool.pool == "token" else mean_of_tokens()


def _pooled_from(skip: int) -> Rule:
    def rule(moment: Moment) -> Tensor:
        return moment.attend(moment.row[:, skip:])

    return rule


def _first_two(row: Tensor) -> Tensor:
    return row[:, :2].mean(1)
