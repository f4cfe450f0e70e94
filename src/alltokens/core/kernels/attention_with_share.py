"""The op `alltokens::attention_with_share`: fused attention that carries the share along, for CPUs.

Shapes: B batch, H heads, T queries, S keys, D channels of a head.

A second product of query and key would cost twice as much (DeiT-Tiny, batch 8). Here the share rides as further
channels of the value in PyTorch's own fused forward, and PyTorch's own backward runs on the tensors as they were: the
attention's output and gradients are those of `scaled_dot_product_attention` up to the last digit.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LANES = 8  # channels that are added; fused attention wants vectors, and query, key and value of one size


def can_carry(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention_with_share` may stand in for fused attention without mask and dropout."""
    return (
        query.device.type == "cpu"
        # inductor cannot split a graph with this op into forward and backward (torch 2.15: "Node was invalid")
        and not torch.compiler.is_compiling()
        and query.dtype == key.dtype == value.dtype  # else autocast would have its say
        and query.dtype in (torch.float32, torch.float64)  # a share in 16 bits would be rounded to 3 digits
        and query.shape[-1] == value.shape[-1]
    )


@torch.library.custom_op("alltokens::attention_with_share", mutates_args=(), device_types="cpu")
def attention_with_share(
    query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(attention's output (B, H, T, D), mean over heads of the carried share (B, T), log-sum-exp (B, H, T)).

    query (B, H, T, D), key and value (B, H, S, D), share (B, S). The share has no gradient.
    """
    channels = value.shape[-1]
    wide, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _widened(query, query.new_zeros(1, 1, 1, 1)),
        _widened(key, key.new_zeros(1, 1, 1, 1)),
        _widened(value, share.to(value.dtype)[:, None, :, None]),
        scale=scale,
    )
    # Laid out token by token, as the projection after attention reads it; fixed here, it differs between versions.
    attended = wide[..., :channels].transpose(1, 2).contiguous().transpose(1, 2)
    return attended, wide[..., channels].mean(1), log_sum.contiguous()


def _widened(tensor: Tensor, filling: Tensor) -> Tensor:
    return torch.cat([tensor, filling.expand(*tensor.shape[:3], LANES)], -1)


@attention_with_share.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, channels = query.shape
    attended = value.new_empty(batch, queries, heads, channels).transpose(1, 2)
    return attended, value.new_empty(batch, queries), value.new_empty(batch, heads, queries)


def _keep(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    query, key, value, _, ctx.scale = inputs
    attended, mixed, log_sum = output
    ctx.mark_non_differentiable(mixed, log_sum)
    # In the order of PyTorch's own node: activation checkpointing recomputes with that one, and compares.
    ctx.save_for_backward(key, query, value, log_sum, attended)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    key, query, value, log_sum, attended = ctx.saved_tensors
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, attended, log_sum, 0.0, False, scale=ctx.scale
    )
    return *gradients, None, None


attention_with_share.register_autograd(_backward, setup_context=_keep)
