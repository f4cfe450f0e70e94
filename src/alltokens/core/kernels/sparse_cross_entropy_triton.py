"""The Triton kernels of `alltokens::sparse_cross_entropy`: the logits are read once for loss and once for gradient.

Shapes: B batch, N tokens, M entries of a token, P whole labels of a picture, K classes.

One program has one token. A class may be listed by several entries (two pictures that are mixed may share it); so its
gradient is reckoned with the sum of all of them, and whichever entry writes it writes the same.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
# ruff: noqa: N803 (constants of a kernel are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CLASSES_AT_ONCE = 2048
ENTRIES_AT_ONCE = 128


@triton.jit
def _forward(
    logits, ids, probabilities, rest, mass, labels, share, losses, log_totals, tokens, classes, entries,
    COMMON: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * classes
    common = labels + token // tokens * COMMON * classes
    lane = tl.arange(0, BLOCK_K)
    highest = tl.full([BLOCK_K], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    plain = tl.zeros([BLOCK_K], tl.float32)
    taken = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, classes, BLOCK_K):
        there = start + lane < classes
        value = tl.load(row + start + lane, mask=there, other=0.0).to(tl.float32)
        plain += value
        for label in range(COMMON):
            part = tl.load(common + label * classes + start + lane, mask=there, other=0.0)
            taken += tl.load(share + token * COMMON + label) * part * value
        value = tl.where(there, value, float("-inf"))
        raised = tl.maximum(highest, value)
        safe = tl.where(raised == float("-inf"), 0.0, raised)  # lanes past the last class have seen nothing
        total = total * tl.exp(highest - safe) + tl.exp(value - safe)
        highest = raised
    top = tl.max(highest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    listed = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, entries, BLOCK_M):
        entry = start + tl.arange(0, BLOCK_M)
        there = entry < entries
        number = tl.load(ids + token * entries + entry, mask=there, other=0)
        part = tl.load(probabilities + token * entries + entry, mask=there, other=0.0)
        listed += part * tl.load(row + number, mask=there, other=0.0).to(tl.float32)
    loss = tl.load(mass + token) * log_total - tl.load(rest + token) * tl.sum(plain, 0)
    tl.store(losses + token, loss - tl.sum(listed, 0) - tl.sum(taken, 0))
    tl.store(log_totals + token, log_total)


@triton.jit
def _backward(
    grad_losses, logits, ids, probabilities, rest, mass, labels, share, log_totals, gradient, tokens, classes, entries,
    COMMON: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * classes
    out = gradient + token * classes
    common = labels + token // tokens * COMMON * classes
    grad = tl.load(grad_losses + token)
    everywhere = tl.load(rest + token)
    whole = tl.load(mass + token)
    log_total = tl.load(log_totals + token)
    for start in range(0, classes, BLOCK_K):
        lane = start + tl.arange(0, BLOCK_K)
        there = lane < classes
        value = tl.load(row + lane, mask=there, other=float("-inf")).to(tl.float32)
        value = whole * tl.exp(value - log_total) - everywhere
        for label in range(COMMON):
            part = tl.load(common + label * classes + lane, mask=there, other=0.0)
            value -= tl.load(share + token * COMMON + label) * part
        tl.store(out + lane, (value * grad).to(gradient.dtype.element_ty), mask=there)
    tl.debug_barrier()  # classes that are listed are written again, after the above
    for start in range(0, entries, BLOCK_M):
        entry = start + tl.arange(0, BLOCK_M)
        there = entry < entries
        number = tl.load(ids + token * entries + entry, mask=there, other=0).to(tl.int32)
        listed = tl.zeros([BLOCK_M], tl.float32)
        for other in range(entries):
            part = tl.load(probabilities + token * entries + other)
            listed += tl.where(number == tl.load(ids + token * entries + other).to(tl.int32), part, 0.0)
        value = tl.load(row + number, mask=there, other=0.0).to(tl.float32)
        value = whole * tl.exp(value - log_total) - everywhere - listed
        for label in range(COMMON):
            part = tl.load(common + label * classes + number, mask=there, other=0.0)
            value -= tl.load(share + token * COMMON + label) * part
        tl.store(out + number, (value * grad).to(gradient.dtype.element_ty), mask=there)


def forward(
    logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, mass: Tensor, labels: Tensor, share: Tensor,
    losses: Tensor, log_totals: Tensor,
) -> None:  # fmt: skip
    """Fills losses and log_totals (B, N). All tensors are contiguous, all but logits and ids in float32."""
    _forward[(rest.numel(),)](
        logits, ids, probabilities, rest, mass, labels, share, losses, log_totals, **_sizes(logits, ids, labels)
    )


def backward(
    grad_losses: Tensor, logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, mass: Tensor, labels: Tensor,
    share: Tensor, log_totals: Tensor, gradient: Tensor,
) -> None:  # fmt: skip
    """Fills gradient (B, N, K)."""
    _backward[(rest.numel(),)](
        grad_losses, logits, ids, probabilities, rest, mass, labels, share, log_totals, gradient,
        **_sizes(logits, ids, labels),
    )  # fmt: skip


def _sizes(logits: Tensor, ids: Tensor, labels: Tensor) -> dict[str, int]:
    tokens, classes = logits.shape[1:]
    return {
        "tokens": tokens,
        "classes": classes,
        "entries": ids.shape[-1],
        "COMMON": labels.shape[1],
        "BLOCK_K": min(CLASSES_AT_ONCE, max(16, triton.next_power_of_2(classes))),
        "BLOCK_M": min(ENTRIES_AT_ONCE, max(16, triton.next_power_of_2(ids.shape[-1]))),
    }
