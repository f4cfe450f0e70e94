"""The Triton kernel of `alltokens::merge_entries`: every entry of a row against every other, in registers.

A warp has some entries, one or a few a lane, and goes past all of the row, one at a time. Tiles of entries against
entries would have to be summed across lanes.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
# ruff: noqa: N803 (constants of a kernel are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES_AT_ONCE = 128


@triton.jit
def _kernel(ids, values, merged, entries, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64) * entries
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = entry < entries
    own = tl.load(ids + row + entry, mask=there, other=-1).to(tl.int32)
    total = tl.zeros([BLOCK], values.dtype.element_ty)
    first = there
    for other in range(entries):
        same = own == tl.load(ids + row + other).to(tl.int32)
        total += tl.where(same, tl.load(values + row + other), 0.0)
        first = first & ((other >= entry) | (same == 0))
    tl.store(merged + row + entry, tl.where(first, total, 0.0), mask=there)


def merge_entries_triton(ids: Tensor, values: Tensor) -> Tensor:
    """See `merge_entries`; both tensors are contiguous."""
    merged = torch.empty_like(values)
    entries = ids.shape[-1]
    block = min(ENTRIES_AT_ONCE, max(32, triton.next_power_of_2(entries)))
    blocks = triton.cdiv(entries, block)
    if ids.numel():
        _kernel[(ids.numel() // entries * blocks,)](ids, values, merged, entries, blocks, BLOCK=block, num_warps=1)
    return merged
