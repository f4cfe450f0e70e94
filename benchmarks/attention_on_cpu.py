"""Ways to carry a share through attention on a CPU, forward alone, beside PyTorch's attention.

    OMP_WAIT_POLICY=passive python -m benchmarks.attention_on_cpu benchmarks/history/attention_on_cpu.csv

Time is the process's own, all threads together, so that neighbours count less; waiting threads must sleep for it.

Shapes: B batch, H heads, T tokens, D channels of a head.

- alone: `scaled_dot_product_attention` and no share. All times below contain it, or what stands in for it.
- one channel: the share as one more channel of the value (kept). Query and key get one of noughts.
- eight channels: the same, filled up to a vector (what was there before).
- by heads: two plain products and a softmax, head by head, the weights mixing the share too.
- again: attention, and a second product of query and key for the share.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.bench.timing import compare, device_name
from alltokens.core.kernels.attention_share import WEIGHTS_AT_ONCE, attention_share
from alltokens.core.kernels.attention_with_share import attention_with_share

SHAPES = {  # (B, H, T, D)
    "DeiT-Tiny 224": (8, 3, 197, 64),
    "DeiT-B 384": (4, 12, 577, 64),
    "50 tokens": (8, 3, 50, 64),
    "4096 tokens": (1, 3, 4096, 64),
}
COLUMNS = (
    *("device", "torch", "case", "batch", "heads", "tokens", "channels", "variant"),
    *("ms", "ms_low", "ms_high", "ratio", "ratio_low", "ratio_high"),
)


def eight_channels(query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    nought = query.new_zeros(1, 1, 1, 1)
    wide, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(
            torch.cat([part, filling.expand(*part.shape[:3], 8)], -1)
            for part, filling in ((query, nought), (key, nought), (value, share[:, None, :, None]))
        ),
        scale=scale,
    )
    channels = value.shape[-1]
    return wide[..., :channels].transpose(1, 2).contiguous().transpose(1, 2), wide[..., channels].mean(1)


def by_heads(query: Tensor, key: Tensor, value: Tensor, share: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """With the log-sum-exp, which backward wants: a row's highest score less the log of its highest weight."""
    batch, heads, tokens, channels = query.shape
    attended = query.new_empty(batch, tokens, heads, channels).transpose(1, 2)
    mixed, log_sum = query.new_zeros(batch, 1, tokens), query.new_empty(batch, heads, tokens)
    step = max(1, WEIGHTS_AT_ONCE // (batch * tokens))
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        weights = query.new_empty(batch, min(step, tokens - start), tokens)
        for head in range(heads):
            some, keys = query[:, head, rows], key[:, head].transpose(1, 2)
            torch.baddbmm(weights, some, keys, beta=0, alpha=scale, out=weights)
            highest = weights.amax(-1)
            torch.softmax(weights, -1, out=weights)
            log_sum[:, head, rows] = highest - weights.amax(-1).log()
            attended[:, head, rows] = torch.bmm(weights, value[:, head])
            mixed[:, :, rows] += torch.bmm(share.unsqueeze(1), weights.transpose(1, 2)) / heads
    return attended, mixed.squeeze(1), log_sum


def variants(query: Tensor, key: Tensor, value: Tensor, share: Tensor) -> dict[str, Callable[[], object]]:
    scale = query.shape[-1] ** -0.5
    tensors = query, key, value, share, scale
    expected = attention_with_share(*tensors)
    for name, found in {"eight channels": eight_channels(*tensors), "by heads": by_heads(*tensors)}.items():
        for ours, theirs in zip(found, expected, strict=False):
            torch.testing.assert_close(
                ours, theirs, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    return {
        "alone": lambda: F.scaled_dot_product_attention(query, key, value),
        "one channel": lambda: attention_with_share(*tensors),
        "eight channels": lambda: eight_channels(*tensors),
        "by heads": lambda: by_heads(*tensors),
        "again": lambda: (F.scaled_dot_product_attention(query, key, value), attention_share(query, key, share, scale)),
    }


def main(file: str) -> None:
    device = torch.device("cpu")
    with open(file, "w", encoding="utf-8", newline="") as opened, torch.no_grad():  # noqa: PTH123
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        for case, shape in SHAPES.items():
            batch, heads, tokens, channels = shape
            query, key, value = torch.randn(batch, tokens, 3, heads, channels).permute(2, 0, 3, 1, 4)
            arms = variants(query, key, value, torch.rand(batch, tokens))
            long = tokens > 500
            timings = compare(
                {name: lambda run=run: run for name, run in arms.items()},
                device,
                rounds=10 if long else 60,
                steps=1 if long else 5,
                clock=time.process_time,
            )
            for name, timing in timings.items():
                numbers = [f"{value:.5g}" for spread in (timing.milliseconds, timing.ratio) for value in spread]
                writer.writerow([device_name(device), torch.__version__, case, *shape, name, *numbers])
                print(f"{case:14} {name:15} {timing.milliseconds.median:8.4f} ms  x{timing.ratio.median:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
