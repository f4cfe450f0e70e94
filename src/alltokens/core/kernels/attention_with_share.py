"""The op `alltokens::attention_with_share`: fused attention that carries the share along.

Shapes: B batch, H heads, T queries, S keys, D channels of a head.

A second product of query and key is the dear part of following a share. Here one forward gives both the attention's
output and the share, and PyTorch's own backward runs on the tensors as they were: output and gradients are those of
`scaled_dot_product_attention` up to the last digit. On a GPU the forward is a Triton kernel; on a CPU the share rides
as one more channel of the value in PyTorch's own fused forward.
"""

# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false, reportFunctionMemberAccess=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

FLASH, EFFICIENT, CUDNN = 1, 2, 3  # torch.nn.attention.SDPBackend
ALIGNMENT = 32  # of the log-sum-exp that memory-efficient attention keeps
BIAS_ROW = 16  # a multiple of so many elements is a row of a bias to be

HAS_TRITON = find_spec("triton") is not None


def can_carry(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `attention_with_share` may stand in for fused attention without dropout."""
    if bias is not None and (not bias.is_floating_point() or query.device.type != "cuda"):
        return False
    if not (query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]):  # autocast has its say
        return False
    if query.device.type == "cpu":
        return (
            query.dtype in (torch.float32, torch.float64)  # a share in 16 bits would be rounded to 3 digits
            # inductor cannot split a graph with aten's own CPU op (torch 2.15: "Node was invalid")
            and not torch.compiler.is_compiling()
        )
    return (
        query.device.type == "cuda"
        and HAS_TRITON
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0  # else PyTorch pads before its own kernels
        and query.shape[-1] <= 128
        and (torch.compiler.is_compiling() or not _saved_tensors_are_watched())
    )


def _saved_tensors_are_watched() -> bool:
    """Activation checkpointing compares what a recomputation saves, and recomputes with PyTorch's own forward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@torch.library.custom_op("alltokens::attention_with_share", mutates_args=(), device_types="cpu")
def attention_with_share(
    query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(attention's output (B, H, T, D), mean over heads of the carried share (B, T), log-sum-exp (B, H, T)).

    query (B, H, T, D), key and value (B, H, S, D), share (B, S), bias None or, on a GPU, as `aligned_bias` makes it.
    The share has no gradient.
    """
    assert bias is None
    return _carried_on_cpu(query, key, value, share, scale)


def _carried_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    channels = value.shape[-1]
    nought = query.new_zeros(1, 1, 1, 1)  # fused attention wants query, key and value of one size
    wide, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _widened(query, nought), _widened(key, nought), _widened(value, share[:, None, :, None]), scale=scale
    )
    # Laid out token by token, as the projection after attention reads it; fixed here, it differs between versions.
    return _by_token(wide[..., :channels]), wide[..., channels].mean(1), log_sum.contiguous()


def _widened(tensor: Tensor, filling: Tensor) -> Tensor:
    """(B, H, S, D + 1)"""
    return torch.cat([tensor, filling.expand(*tensor.shape[:3], 1)], -1)


if HAS_TRITON:

    @attention_with_share.register_kernel("cuda")
    def _(
        query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from alltokens.core.kernels.attention_with_share_triton import attention_with_share_triton

        with torch.cuda.device(query.device):  # Triton launches on the current device
            return attention_with_share_triton(query, key, value, share, scale, bias)


@attention_with_share.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, channels = query.shape
    attended = value.new_empty(batch, queries, heads, channels).transpose(1, 2)
    exact = torch.promote_types(value.dtype, torch.float32)
    return attended, share.new_empty(batch, queries), value.new_empty(batch, heads, queries, dtype=exact)


def aligned_bias(bias: Tensor, like: Tensor) -> Tensor:
    """(.., .., T, S): in the precision of `like`, with rows that start where PyTorch's backward wants them to.

    Done before the op, so that torch.compile writes it at once with whatever made the bias.
    """
    bias = bias.to(like.dtype)
    padded = torch.nn.functional.pad(bias, (0, -bias.shape[-1] % BIAS_ROW))[..., : bias.shape[-1]]
    return padded[(None,) * (4 - bias.ndim)]


def _keep(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, float, Tensor | None],
    output: tuple[Tensor, Tensor, Tensor],
) -> None:
    query, key, value, _, ctx.scale, bias = inputs
    attended, mixed, log_sum = output
    ctx.mark_non_differentiable(mixed, log_sum)
    # In the order of PyTorch's own node: activation checkpointing recomputes with that one, and compares.
    ctx.save_for_backward(key, query, value, log_sum, attended, *([] if bias is None else [bias]))


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor | None]:
    key, query, value, log_sum, attended, *bias = ctx.saved_tensors
    if bias:
        tensors = gradient, query, key, value, attended, log_sum, ctx.scale, *bias
        *gradients, of_bias = _backward_with_bias(*tensors, ctx.needs_input_grad[5])
        return *gradients, None, None, of_bias if ctx.needs_input_grad[5] else None  # type: ignore[return-value]
    if gradient.device.type == "cuda":
        gradients = _backward_on_gpu(gradient, query, key, value, attended, log_sum, ctx.scale)
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, attended, log_sum, 0.0, False, scale=ctx.scale
        )
    return *gradients, None, None, None


attention_with_share.register_autograd(_backward, setup_context=_keep)


class _OnCpu(torch.autograd.Function):
    """The same, without what `register_autograd` wraps around it: Python that a CPU has to run, too."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        output = _carried_on_cpu(query, key, value, share, scale)
        _keep(ctx, (query, key, value, share, scale, None), output)
        return output

    backward = staticmethod(_backward)


torch.library.impl("alltokens::attention_with_share", "AutogradCPU", _OnCpu.apply)


@torch.library.custom_op("alltokens::attention_with_share_backward", mutates_args=(), device_types="cuda")
def _backward_on_gpu(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward that PyTorch itself would run for these tensors; all of them want output and log-sum-exp."""
    backend = torch._fused_sdp_choice(query, key, value, scale=scale)
    queries, keys = query.shape[2], key.shape[2]
    seed, offset = _no_dropout(query)
    tensors = gradient, query, key, value
    if backend == CUDNN:
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, attended, log_sum.unsqueeze(-1), seed, offset, None, None, None, queries, keys, 0.0, False,
            scale=scale,
        )  # fmt: skip
    elif backend == EFFICIENT:
        gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *tensors, None, attended, _padded(log_sum), seed, offset, 0.0, [True, True, True, False], scale=scale
        )
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *tensors, attended, log_sum, None, None, queries, keys, 0.0, False, seed, offset, scale=scale
        )
    # Of one layout, whoever made them: a compiled graph is told before.
    return tuple(_by_token(part) for part in gradients[:3])  # type: ignore[return-value]


@_backward_on_gpu.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(torch.empty_like(query)), _by_token(torch.empty_like(key)), _by_token(torch.empty_like(value))


@torch.library.custom_op("alltokens::attention_with_share_backward_biased", mutates_args=(), device_types="cuda")
def _backward_with_bias(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    log_sum: Tensor,
    scale: float,
    bias: Tensor,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward of memory-efficient attention, the one of PyTorch's that takes a bias; the bias's gradient last.

    That one is of the bias's own shape, or empty if it is not asked for.
    """
    whole = bias.expand(*query.shape[:3], key.shape[2])
    if any(stride % (BIAS_ROW // 2) for stride in whole.stride()[:3]) or bias.data_ptr() % 16 or whole.stride(3) != 1:
        whole = aligned_bias(bias, query).expand_as(whole)
    *gradients, gradient_of_bias = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, whole, attended, _padded(log_sum), *_no_dropout(query), 0.0,
        [True, True, True, of_bias], scale=scale,
    )  # fmt: skip
    own = gradient_of_bias.sum_to_size(bias.shape).contiguous() if of_bias else bias.new_empty(0)
    return *(_by_token(part) for part in gradients), own  # type: ignore[return-value]


@_backward_with_bias.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    log_sum: Tensor,
    scale: float,
    bias: Tensor,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = (_by_token(torch.empty_like(part)) for part in (query, key, value))
    return *gradients, bias.new_empty(bias.shape if of_bias else 0)  # type: ignore[return-value]


def _by_token(tensor: Tensor) -> Tensor:
    """(B, H, T, D), laid out as (B, T, H, D); a copy only where it is not."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _padded(log_sum: Tensor) -> Tensor:
    """As memory-efficient attention keeps it."""
    return torch.nn.functional.pad(log_sum, (0, -log_sum.shape[-1] % ALIGNMENT))


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """The seed and the offset of a dropout that there is not."""
    return tuple(torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2))  # type: ignore[return-value]
