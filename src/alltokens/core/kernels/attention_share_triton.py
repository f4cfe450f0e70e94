"""The Triton kernel of `alltokens::attention_share`: one pass over query and key, softmax kept running, nothing T x S.

Shapes: B batch (or windows), H heads, T queries, S keys, D channels of a head.

One program carries a block of queries of one head past all keys. Where attention proper accumulates D values per
query, this accumulates one, so it is little more than the product of query and key.
"""

# pyright: basic, reportCallIssue=false
# ruff: noqa: N803 (constants of a kernel are written in capitals)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    query, key, share, bias, mixed,
    query_b, query_h, query_t, query_d,
    key_b, key_h, key_s, key_d,
    share_b, share_s,
    bias_b, bias_h, bias_t, bias_s,
    scale_log2,
    queries, keys, channels, blocks,
    HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * HEADS + head
    sample, head = pair // HEADS, pair % HEADS
    rows = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    depth = tl.arange(0, BLOCK_D)
    in_rows = rows < queries
    in_depth = depth < channels
    query_tile = tl.load(
        query + sample * query_b + head * query_h + rows[:, None] * query_t + depth[None, :] * query_d,
        mask=in_rows[:, None] & in_depth[None, :],
        other=0.0,
    )
    highest = tl.full([BLOCK_T], -1.0e30, tl.float32)  # finite: a block whose bias is -inf throughout must not give NaN
    total = tl.zeros([BLOCK_T], tl.float32)
    carried = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, keys, BLOCK_S):
        columns = start + tl.arange(0, BLOCK_S)
        in_columns = columns < keys
        key_tile = tl.load(
            key + sample * key_b + head * key_h + columns[None, :] * key_s + depth[:, None] * key_d,
            mask=in_columns[None, :] & in_depth[:, None],
            other=0.0,
        )
        if EXACT:
            scores = tl.dot(query_tile, key_tile, input_precision="ieee") * scale_log2
        else:
            scores = tl.dot(query_tile, key_tile) * scale_log2
        if HAS_BIAS:
            added = tl.load(
                bias + sample * bias_b + head * bias_h + rows[:, None] * bias_t + columns[None, :] * bias_s,
                mask=in_rows[:, None] & in_columns[None, :],
                other=0.0,
            )
            scores += added.to(tl.float32) * 1.4426950408889634  # log2(e): the softmax is taken in powers of two
        scores = tl.where(in_columns[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        fade = tl.exp2(highest - raised)
        shares = tl.load(share + sample * share_b + columns * share_s, mask=in_columns, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        carried = carried * fade + tl.sum(weights * shares[None, :], 1)
        highest = raised
    tl.store(mixed + pair * queries + rows, carried / total, mask=in_rows)


def attention_share_triton(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """(B, T) float32: see `attention_share`. query and key in bfloat16, float16 or float32, of any strides."""
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    mixed = torch.empty(batch, heads, queries, device=query.device, dtype=torch.float32)
    if bias is not None:
        bias = bias.expand(batch, heads, queries, keys)  # broadcast axes get stride 0 and are never copied
    block_t = 64 if queries > 32 else 16  # windows of Swin have 49 queries, class attention has one
    block_s = 64 if keys > 32 else 16
    blocks = triton.cdiv(queries, block_t)
    _kernel[(blocks * batch * heads,)](  # in one row: the other axes of a grid end at 65,535, Swin's windows do not
        query, key, share, bias if bias is not None else query, mixed,
        *query.stride(),
        *key.stride(),
        *share.stride(),
        *(bias.stride() if bias is not None else (0, 0, 0, 0)),
        scale * math.log2(math.e),
        queries, keys, channels, blocks,
        HEADS=heads, HAS_BIAS=bias is not None, EXACT=query.dtype == torch.float32,
        BLOCK_T=block_t, BLOCK_S=block_s, BLOCK_D=max(16, triton.next_power_of_2(channels)),
        num_warps=4,
    )  # fmt: skip
    return mixed.mean(1)
