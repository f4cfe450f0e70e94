"""The Triton kernel of `alltokens::merge_entries`: every entry of a row against every other, in registers."""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
# ruff: noqa: N803 (constants of a kernel are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES_AT_ONCE = 64


@triton.jit
def _kernel(ids, values, merged, entries, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64) * entries
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = entry < entries
    own = tl.load(ids + row + entry, mask=there, other=-1)
    total = tl.zeros([BLOCK], values.dtype.element_ty)
    earlier = tl.zeros([BLOCK], tl.int32)
    for start in range(0, entries, BLOCK):
        other = start + tl.arange(0, BLOCK)
        known = other < entries
        same = own[:, None] == tl.load(ids + row + other, mask=known, other=-2)[None, :]
        total += tl.sum(tl.where(same, tl.load(values + row + other, mask=known, other=0.0)[None, :], 0.0), 1)
        earlier += tl.sum((same & (other[None, :] < entry[:, None])).to(tl.int32), 1)
    tl.store(merged + row + entry, tl.where(earlier == 0, total, 0.0), mask=there)


def merge_entries_triton(ids: Tensor, values: Tensor) -> Tensor:
    """See `merge_entries`; both tensors are contiguous."""
    merged = torch.empty_like(values)
    entries = ids.shape[-1]
    block = min(ENTRIES_AT_ONCE, max(16, triton.next_power_of_2(entries)))
    blocks = triton.cdiv(entries, block)
    if ids.numel():
        _kernel[(ids.numel() // entries * blocks,)](ids, values, merged, entries, blocks, BLOCK=block, num_warps=2)
    return merged
