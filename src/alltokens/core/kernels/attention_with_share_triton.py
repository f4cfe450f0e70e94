"""The Triton kernel of `alltokens::attention_with_share`: fused attention that carries one number a token along.

Shapes: B batch, H heads, T queries, S keys, D channels of a head.

One program carries a block of queries of one head past all keys, as flash attention does. Beside the D channels of the
value it accumulates the share, in float32: one multiplication for each weight, no further byte of query or key.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
# ruff: noqa: N803 (constants of a kernel are written in capitals)

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _take_in(
    keys_of, values_of, shares_of, biases_of, in_rows,
    start, keys, in_depth, queries_tile, highest, total, carried, gathered, scale_log2,
    key_s, value_s, share_s, bias_s,
    HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, WHOLE_DEPTH: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One block of keys: the softmax so far is raised to a new maximum, then what this block adds is added."""
    columns = start + tl.arange(0, BLOCK_S)
    if MASKED:
        there = columns < keys
        key_tile = tl.load(keys_of + columns[None, :] * key_s, mask=there[None, :] & in_depth[:, None], other=0.0)
        value_tile = tl.load(values_of + columns[:, None] * value_s, mask=there[:, None] & in_depth[None, :], other=0.0)
        shares = tl.load(shares_of + columns * share_s, mask=there, other=0.0)
    else:
        shares = tl.load(shares_of + columns * share_s)
        if WHOLE_DEPTH:
            key_tile = tl.load(keys_of + columns[None, :] * key_s)
            value_tile = tl.load(values_of + columns[:, None] * value_s)
        else:
            key_tile = tl.load(keys_of + columns[None, :] * key_s, mask=in_depth[:, None], other=0.0)
            value_tile = tl.load(values_of + columns[:, None] * value_s, mask=in_depth[None, :], other=0.0)
    scores = tl.dot(queries_tile, key_tile, input_precision="ieee") if EXACT else tl.dot(queries_tile, key_tile)
    if HAS_BIAS:
        counted = (in_rows[:, None] & there[None, :]) if MASKED else in_rows[:, None]
        added = tl.load(biases_of + columns[None, :] * bias_s, mask=counted, other=0.0)
        scores += added.to(tl.float32) * (1.4426950408889634 / scale_log2)  # log2(e): it is scaled together with them
    if MASKED:
        scores = tl.where(there[None, :], scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - raised[:, None])
    fade = tl.exp2(highest - raised)
    total = total * fade + tl.sum(weights, 1)
    carried = carried * fade + tl.sum(weights * shares[None, :], 1)
    gathered = gathered * fade[:, None]
    if EXACT:
        gathered = tl.dot(weights, value_tile, gathered, input_precision="ieee")
    else:
        gathered = tl.dot(weights.to(value_tile.dtype), value_tile, gathered)
    return raised, total, carried, gathered


@triton.jit
def _kernel(
    query, key, value, share, bias, attended, mixed, log_sum,
    query_b, query_h, query_t,
    key_b, key_h, key_s,
    value_b, value_h, value_s,
    share_b, share_s,
    bias_b, bias_h, bias_t, bias_s,
    attended_b, attended_h, attended_t,
    scale_log2,
    queries, keys, channels, blocks,
    HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE_DEPTH: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, REST_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * HEADS + head
    sample, head = pair // HEADS, pair % HEADS
    rows = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    depth = tl.arange(0, BLOCK_D)
    in_rows = rows < queries
    in_depth = depth < channels
    queries_tile = tl.load(
        query + sample * query_b + head * query_h + rows[:, None] * query_t + depth[None, :],
        mask=in_rows[:, None] & in_depth[None, :],
        other=0.0,
    )
    keys_of = key + sample * key_b + head * key_h + depth[:, None]
    values_of = value + sample * value_b + head * value_h + depth[None, :]
    shares_of = share + sample * share_b
    biases_of = bias + sample * bias_b + head * bias_h + rows[:, None] * bias_t
    highest = tl.full([BLOCK_T], -1.0e30, tl.float32)  # finite: a block whose bias is -inf throughout must not give NaN
    total = tl.zeros([BLOCK_T], tl.float32)
    carried = tl.zeros([BLOCK_T], tl.float32)
    gathered = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    whole = keys // BLOCK_S * BLOCK_S
    for start in range(0, whole, BLOCK_S):
        highest, total, carried, gathered = _take_in(
            keys_of, values_of, shares_of, biases_of, in_rows,
            start, keys, in_depth, queries_tile, highest, total, carried, gathered, scale_log2,
            key_s, value_s, share_s, bias_s, HAS_BIAS, False, WHOLE_DEPTH, EXACT, BLOCK_S,
        )  # fmt: skip
    if REST_S > 0:  # what is left over goes through a block of its own size: 197 keys are not 256
        highest, total, carried, gathered = _take_in(
            keys_of, values_of, shares_of, biases_of, in_rows,
            whole, keys, in_depth, queries_tile, highest, total, carried, gathered, scale_log2,
            key_s, value_s, share_s, bias_s, HAS_BIAS, True, WHOLE_DEPTH, EXACT, REST_S,
        )  # fmt: skip
    tl.store(
        attended + sample * attended_b + head * attended_h + rows[:, None] * attended_t + depth[None, :],
        (gathered / total[:, None]).to(attended.dtype.element_ty),
        mask=in_rows[:, None] & in_depth[None, :],
    )
    tl.store(mixed + pair * queries + rows, carried / total, mask=in_rows)
    tl.store(log_sum + pair * queries + rows, (highest + tl.log2(total)) * 0.6931471805599453, mask=in_rows)  # ln 2


class Blocks(NamedTuple):
    """How the work is cut up: queries of a program, keys of a round, warps, rounds in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def choose_blocks(queries: int, keys: int, exact: bool) -> Blocks:
    """The fastest of those tried on an H200, nearly the same for all sizes of a head."""
    if exact:
        return Blocks(32, 32, 4, 1)
    if queries <= 32:
        return Blocks(16, 64, 4, 2)
    return Blocks(64, 32, 4, 1) if max(queries, keys) <= 64 else Blocks(64, 64, 4, 3)


def attention_with_share_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    share: Tensor,
    scale: float,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention_with_share`; the channels of a head must lie together, all other strides are free."""
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    attended = torch.empty(batch, queries, heads, channels, device=query.device, dtype=query.dtype).transpose(1, 2)
    mixed = torch.empty(batch, heads, queries, device=query.device, dtype=torch.float32)
    log_sum = torch.empty_like(mixed)
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value))
    if bias is not None:
        bias = bias.expand(batch, heads, queries, keys)  # broadcast axes get stride 0 and are never copied
    exact = query.dtype == torch.float32
    cut = blocks or choose_blocks(queries, keys, exact)
    rest = keys % cut.keys
    rows = triton.cdiv(queries, cut.queries)
    block_d = max(16, triton.next_power_of_2(channels))
    _kernel[(rows * batch * heads,)](
        query, key, value, share, query if bias is None else bias, attended, mixed, log_sum,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *share.stride(),
        *((0, 0, 0, 0) if bias is None else bias.stride()),
        *attended.stride()[:3],
        scale * math.log2(math.e),
        queries, keys, channels, rows,
        HEADS=heads, HAS_BIAS=bias is not None, WHOLE_DEPTH=block_d == channels, EXACT=exact,
        BLOCK_T=cut.queries, BLOCK_S=cut.keys, REST_S=max(16, triton.next_power_of_2(rest)) if rest else 0,
        BLOCK_D=block_d, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return attended, mixed.mean(1), log_sum
