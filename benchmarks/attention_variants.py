"""Ways to carry a share through attention, forward alone, beside PyTorch's attention: what was kept and what lost.

    python -m benchmarks.attention_variants benchmarks/history/attention_variants.csv       (needs CUDA)

Shapes: B batch, H heads, T tokens, D channels of a head.

- alone: `scaled_dot_product_attention` and no share. All times below contain it, or what stands in for it.
- joint: one kernel gives attention and share (kept, where there is no bias).
- separate: a second kernel reads query and key again (kept, where there is a bias or an odd size of head).
- widened: the share as further channels of query, key and value in PyTorch's own attention (kept on a CPU).
- backwards: one row vector for the classified token, taken from the last layer to the first through the saved query,
  key and log-sum-exp (at no place more than the product of query and key, like `separate`; lost).
"""

# ruff: noqa: N803 (constants of a kernel are written in capitals)

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from alltokens.bench.timing import compare
from alltokens.core.kernels.attention_share import attention_share
from alltokens.core.kernels.attention_with_share import attention_with_share
from benchmarks.attention_on_cpu import COLUMNS

SHAPES = {  # (B, H, T, D)
    "DeiT-S 224": (512, 6, 197, 64),
    "DeiT-B 384": (96, 12, 577, 64),
    "Swin-T, stage 1": (16384, 3, 49, 32),
    "4096 tokens": (8, 6, 4096, 64),
}
WIDER = 8


@triton.jit
def _backwards(
    query, key, log_sum, row, out, stride_b, stride_h, stride_t, scale, tokens,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    offset = (pair // HEADS) * stride_b + (pair % HEADS) * stride_h
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    keys = tl.load(key + offset + columns[None, :] * stride_t + depth[:, None], mask=columns[None, :] < tokens, other=0)
    gathered = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        there = rows < tokens
        queries = tl.load(query + offset + rows[:, None] * stride_t + depth[None, :], mask=there[:, None], other=0)
        sums = tl.load(log_sum + pair * tokens + rows, mask=there, other=float("inf"))
        weight = tl.load(row + (pair // HEADS) * tokens + rows, mask=there, other=0.0)
        attention = tl.exp2(tl.dot(queries, keys) * scale - (sums * 1.4426950408889634)[:, None])
        gathered += tl.sum(attention * weight[:, None], 0)
    tl.store(out + pair * tokens + columns, gathered, mask=columns < tokens)


def backwards(query: Tensor, key: Tensor, log_sum: Tensor, row: Tensor) -> Tensor:
    """(B, T): row @ mean over heads of attention."""
    batch, heads, tokens, channels = query.shape
    out = torch.empty(batch, heads, tokens, device=query.device)
    grid = (triton.cdiv(tokens, 64), batch * heads)
    scale = channels**-0.5 * math.log2(math.e)
    _backwards[grid](query, key, log_sum, row, out, *query.stride()[:3], scale, tokens, heads, 64, channels)
    return out.mean(1)


def variants(query: Tensor, key: Tensor, value: Tensor, share: Tensor) -> dict[str, Callable[[], object]]:
    scale = query.shape[-1] ** -0.5
    log_sum = attention_with_share(query, key, value, share, scale)[2]
    filling = query.new_zeros(1, 1, 1, 1).expand(*query.shape[:3], WIDER)

    def alone() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def separate() -> object:
        return alone(), attention_share(query, key, share, scale)

    def widened() -> object:
        carried = share.to(value.dtype)[:, None, :, None].expand(*value.shape[:3], WIDER)
        wide = [torch.cat([query, filling], -1), torch.cat([key, filling], -1), torch.cat([value, carried], -1)]
        return F.scaled_dot_product_attention(*wide, scale=scale)

    found = {
        "alone": alone,
        "joint": lambda: attention_with_share(query, key, value, share, scale),
        "separate": separate,
        "widened": widened,
    }
    if query.shape[0] * query.shape[1] < 65536 and query.stride() == key.stride():
        expected = torch.softmax(query[:1].float() @ key[:1].float().transpose(-2, -1) * scale, -1).mean(1)
        expected = (share[:1].unsqueeze(1) @ expected).squeeze(1)
        torch.testing.assert_close(backwards(query, key, log_sum, share)[:1], expected, atol=2e-2, rtol=1e-2)
        found["backwards"] = lambda: (alone(), backwards(query, key, log_sum, share))
    return found


def main(file: str) -> None:
    device = torch.device("cuda")
    with open(file, "w", encoding="utf-8", newline="") as opened:  # noqa: PTH123
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        for case, (batch, heads, tokens, channels) in SHAPES.items():
            wide = torch.randn(batch, tokens, 3, heads, channels, device=device, dtype=torch.bfloat16)
            query, key, value = wide.permute(2, 0, 3, 1, 4)
            arms = variants(query, key, value, torch.rand(batch, tokens, device=device))
            timings = compare({name: lambda run=run: run for name, run in arms.items()}, device, rounds=20, steps=20)
            for name, timing in timings.items():
                numbers = [f"{value:.5g}" for spread in (timing.milliseconds, timing.ratio) for value in spread]
                shape = (batch, heads, tokens, channels)
                writer.writerow([torch.cuda.get_device_name(), torch.__version__, case, *shape, name, *numbers])
                print(f"{case:16} {name:10} {timing.milliseconds.median:8.4f} ms  x{timing.ratio.median:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
