"""The op `alltokens::sparse_cross_entropy`: the soft cross-entropy with sparse labels, and its gradient.

Shapes: R rows, M entries of a row, K classes.

A label y = rest + sum over entries of probability * one_hot(id) (see TokenTargets) has, with logits z, the loss

    -sum(y * log_softmax(z)) = mass * logsumexp(z) - rest * sum(z) - sum over entries of probability * z[id]

with mass = K * rest + sum of probabilities, and the gradient mass * softmax(z) - rest - scatter(probability at id).

Bytes, for DeiT-S or LV-ViT-S at batch 512 and 1000 classes, logits in bfloat16 (R = 100,352): the logits are 201 MB. A
dense target in float32 would be 401 MB, log_softmax in float32 keeps 401 MB for its backward and works in as much
again. Here the backward keeps the logits, which live anyway as the head's output, and one number a row (0.4 MB); both
ways work on a stretch of rows at a time, so the one large thing that is made is the gradient, 201 MB in bfloat16.
Left to autograd, the `gather` of the logits would in its backward add up in bfloat16, into a second such tensor. Being
an opaque op with a fake, it costs torch.compile no graph break, and costs memory the same compiled or not.
"""

# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false, reportFunctionMemberAccess=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# A stretch of rows holds at most this many logits: 64 MiB in float32 on a GPU, 4 MiB, a processor's cache, elsewhere.
LOGITS_AT_ONCE = {"cuda": 1 << 24, "cpu": 1 << 20}


@torch.library.custom_op("alltokens::sparse_cross_entropy", mutates_args=())
def _sparse_cross_entropy(logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    losses, log_totals = torch.empty_like(rest), torch.empty_like(rest)
    mass = _mass(logits, probabilities, rest)
    for rows in _stretches(logits):
        exact = logits[rows].to(rest.dtype)  # (r, K)
        log_totals[rows] = exact.logsumexp(-1)
        listed = (probabilities[rows] * exact.gather(-1, ids[rows])).sum(-1)
        losses[rows] = mass[rows] * log_totals[rows] - rest[rows] * exact.sum(-1) - listed
    return losses, log_totals


@_sparse_cross_entropy.register_fake
def _(logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rest), torch.empty_like(rest)


@torch.library.custom_op("alltokens::sparse_cross_entropy_backward", mutates_args=())
def _sparse_cross_entropy_backward(
    grad_losses: Tensor, logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, log_totals: Tensor
) -> Tensor:
    gradient = torch.empty_like(logits)
    mass = _mass(logits, probabilities, rest)
    for rows in _stretches(logits):
        exact = logits[rows].to(rest.dtype, copy=True)  # (r, K), our own to work in
        exact.sub_(log_totals[rows, None]).exp_().mul_(mass[rows, None]).sub_(rest[rows, None])
        exact.scatter_add_(-1, ids[rows], -probabilities[rows])
        gradient[rows] = exact.mul_(grad_losses[rows, None]).to(gradient.dtype)
    return gradient


@_sparse_cross_entropy_backward.register_fake
def _(
    grad_losses: Tensor, logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, log_totals: Tensor
) -> Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    return _sparse_cross_entropy_backward(grad_losses.contiguous(), *ctx.saved_tensors), None, None, None


_sparse_cross_entropy.register_autograd(_backward, setup_context=_keep)


def sparse_cross_entropy(logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor) -> Tensor:
    """(..., ): the loss of each row, in float32 or what is more exact; the labels get no gradient.

    logits (..., K) of any precision, ids and probabilities (..., M), rest (...).
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = (logits.flatten(0, -2), ids.flatten(0, -2), probabilities.flatten(0, -2).to(dtype), rest.flatten().to(dtype))
    losses, _ = _sparse_cross_entropy(*(tensor.contiguous() for tensor in flat))
    return losses.view(rest.shape)


def _mass(logits: Tensor, probabilities: Tensor, rest: Tensor) -> Tensor:
    """(R,): what a label sums to."""
    return rest * logits.shape[-1] + probabilities.sum(-1)


def _stretches(logits: Tensor) -> Iterator[slice]:
    most = LOGITS_AT_ONCE.get(logits.device.type, LOGITS_AT_ONCE["cuda"])
    step = max(1, most // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))
