"""The op `alltokens::attention_share`: what softmax attention makes of one number per key, with no T x S matrix.

Shapes: B batch (or windows), H heads, T queries, S keys, D channels of a head.

Being one opaque op with a fake, it costs torch.compile no graph break; it has no gradient and wants detached inputs.
"""

# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

# The plain twin holds at most this many attention weights at once, 16 MiB in float32, however long the rows are.
WEIGHTS_AT_ONCE = 1 << 22


@torch.library.custom_op("alltokens::attention_share", mutates_args=())
def attention_share(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """(B, T): the mean over heads of softmax(query key^T * scale + bias) @ share, in the precision of `share`.

    query (B, H, T, D), key (B, H, S, D), share (B, S) float32 or float64, bias broadcastable to (B, H, T, S) or None.
    """
    return attention_share_plain(query, key, share, scale, bias)


@attention_share.register_fake
def _(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    return share.new_empty(query.shape[0], query.shape[2])


def attention_share_plain(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The twin of the kernel: the same in PyTorch, a stretch of queries at a time."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    key = key.to(share.dtype).transpose(-2, -1)  # (B, H, D, S)
    if bias is not None:
        bias = bias.expand(batch, heads, queries, keys)
    step = max(1, WEIGHTS_AT_ONCE // (batch * heads * keys))
    mixed = share.new_empty(batch, queries)
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        scores = (query[:, :, rows].to(share.dtype) * scale) @ key  # (B, H, step, S)
        if bias is not None:
            scores = scores + bias[:, :, rows]
        mixed[:, rows] = mean_over_heads(scores.softmax(-1), share)
    return mixed


def mean_over_heads(weights: Tensor, share: Tensor) -> Tensor:
    """(B, T): the mean over heads of weights (B, H, T, S) @ share (B, S)."""
    batch, heads, queries, keys = weights.shape
    # One row vector times a matrix: BLAS is several times faster at it than at H matrices times a column.
    rows = weights.reshape(batch, heads * queries, keys).transpose(1, 2)  # (B, S, H*T)
    return torch.bmm(share.unsqueeze(1), rows).view(batch, heads, queries).mean(1)


if find_spec("triton") is not None:

    @attention_share.register_kernel("cuda")
    def _(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
        if share.dtype != torch.float32:  # float64 is for checking only
            return attention_share_plain(query, key, share, scale, bias)
        from alltokens.core.kernels.attention_share_triton import attention_share_triton

        with torch.cuda.device(query.device):  # Triton launches on the current device
            return attention_share_triton(query, key, share, scale, bias)
