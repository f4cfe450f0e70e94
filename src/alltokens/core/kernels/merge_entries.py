"""The op `alltokens::merge_entries`: one entry a class.

Shapes: R rows, M entries of a row.

Where several entries of a row name one class, the first takes the sum of all and the others become 0. Sorting, the way
to do it on a CPU, is slow on a GPU and slower to compile; there a Triton kernel compares every entry with every other.
No sum depends on the order of atomic additions.
"""

# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


@torch.library.custom_op("alltokens::merge_entries", mutates_args=())
def merge_entries(ids: Tensor, values: Tensor) -> Tensor:
    """Values (..., M) of ids (..., M), those of one id added up in the first of them."""
    order = ids.argsort(dim=-1, stable=True)
    sorted_ids, merged = ids.gather(-1, order), values.gather(-1, order)
    follows = torch.zeros_like(ids, dtype=torch.bool)  # the id before it is the same
    follows[..., 1:] = sorted_ids[..., 1:] == sorted_ids[..., :-1]
    step = 1
    while step < ids.shape[-1]:  # after each round an entry holds 2 * step entries of its class, from itself on
        same = sorted_ids[..., step:] == sorted_ids[..., :-step]
        if not same.any():
            break
        merged[..., :-step] = merged[..., :-step] + same * merged[..., step:]
        step *= 2
    return torch.empty_like(values).scatter_(-1, order, merged.masked_fill(follows, 0))


@merge_entries.register_fake
def _(ids: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(values)


if find_spec("triton") is not None:

    @merge_entries.register_kernel("cuda")
    def _(ids: Tensor, values: Tensor) -> Tensor:
        from alltokens.core.kernels.merge_entries_triton import merge_entries_triton

        with torch.cuda.device(ids.device):  # Triton launches on the current device
            return merge_entries_triton(ids.contiguous(), values.contiguous())
