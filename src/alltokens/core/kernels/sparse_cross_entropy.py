"""The op `alltokens::sparse_cross_entropy`: the soft cross-entropy with sparse labels, and its gradient.

Shapes: B batch, N tokens, M entries of a token, P whole labels of a picture, K classes.

A label y = rest + sum over entries of probability * one_hot(id) + share @ labels (see TokenTargets) has, with logits
z, the loss

    -sum(y * log_softmax(z)) = mass * logsumexp(z) - rest * sum(z) - sum of probability * z[id] - share . (labels @ z)

with mass = sum(y), and the gradient mass * softmax(z) - rest - scatter(probability at id) - share @ labels.

Bytes, for DeiT-S or LV-ViT-S at batch 512 and 1000 classes, logits in bfloat16 (100,352 tokens): the logits are 201 MB.
A dense target in float32 would be 401 MB, log_softmax in float32 keeps 401 MB for its backward and works in as much
again. Here the backward keeps the logits, which live anyway as the head's output, and one number a token (0.4 MB); the
one large thing that is made is the gradient, 201 MB in bfloat16. On a GPU a Triton kernel each reads the logits once;
its twin in PyTorch, for all else, works on a stretch of pictures at a time.
Left to autograd, the `gather` of the logits would in its backward add up in bfloat16, into a second such tensor. Being
an opaque op with a fake, it costs torch.compile no graph break, and costs memory the same compiled or not.
"""

# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false, reportFunctionMemberAccess=false

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None

# A stretch of pictures (one at least) holds at most this many logits: 64 MiB in float32 on a GPU, 4 MiB, a processor's
# cache, elsewhere.
LOGITS_AT_ONCE = {"cuda": 1 << 24, "cpu": 1 << 20}


@torch.library.custom_op("alltokens::sparse_cross_entropy", mutates_args=())
def _sparse_cross_entropy(
    logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, labels: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    targets = probabilities, rest, _mass(probabilities, rest, labels, share), labels, share
    if not _fits_triton(logits):
        return _forward_plain(logits, ids, *targets)
    from alltokens.core.kernels import sparse_cross_entropy_triton as kernels

    losses, log_totals = torch.empty_like(rest), torch.empty_like(rest)
    with torch.cuda.device(logits.device):  # Triton launches on the current device
        kernels.forward(logits, ids, *targets, losses, log_totals)
    return losses, log_totals


@_sparse_cross_entropy.register_fake
def _(
    logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, labels: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rest), torch.empty_like(rest)


def _forward_plain(
    logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, mass: Tensor, labels: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    losses, log_totals = torch.empty_like(rest), torch.empty_like(rest)
    for some in _stretches(logits):
        exact = logits[some].to(rest.dtype)  # (b, N, K)
        log_totals[some] = exact.logsumexp(-1)
        listed = (probabilities[some] * exact.gather(-1, ids[some])).sum(-1)
        losses[some] = mass[some] * log_totals[some] - rest[some] * exact.sum(-1) - listed
        if labels.shape[1]:
            losses[some] -= (share[some] * (exact @ labels[some].mT)).sum(-1)
    return losses, log_totals


@torch.library.custom_op("alltokens::sparse_cross_entropy_backward", mutates_args=())
def _sparse_cross_entropy_backward(
    grad_losses: Tensor,
    logits: Tensor,
    ids: Tensor,
    probabilities: Tensor,
    rest: Tensor,
    labels: Tensor,
    share: Tensor,
    log_totals: Tensor,
) -> Tensor:
    targets = probabilities, rest, _mass(probabilities, rest, labels, share), labels, share
    if not _fits_triton(logits):
        return _backward_plain(grad_losses, logits, ids, *targets, log_totals)
    from alltokens.core.kernels import sparse_cross_entropy_triton as kernels

    gradient = torch.empty_like(logits)
    with torch.cuda.device(logits.device):
        kernels.backward(grad_losses, logits, ids, *targets, log_totals, gradient)
    return gradient


@_sparse_cross_entropy_backward.register_fake
def _(
    grad_losses: Tensor,
    logits: Tensor,
    ids: Tensor,
    probabilities: Tensor,
    rest: Tensor,
    labels: Tensor,
    share: Tensor,
    log_totals: Tensor,
) -> Tensor:
    return torch.empty_like(logits)


def _backward_plain(
    grad_losses: Tensor,
    logits: Tensor,
    ids: Tensor,
    probabilities: Tensor,
    rest: Tensor,
    mass: Tensor,
    labels: Tensor,
    share: Tensor,
    log_totals: Tensor,
) -> Tensor:
    gradient = torch.empty_like(logits)
    for some in _stretches(logits):
        exact = logits[some].to(rest.dtype, copy=True)  # (b, N, K), our own to work in
        exact.sub_(log_totals[some, :, None]).exp_().mul_(mass[some, :, None]).sub_(rest[some, :, None])
        exact.scatter_add_(-1, ids[some], -probabilities[some])
        if labels.shape[1]:
            exact.baddbmm_(share[some], labels[some], alpha=-1)
        gradient[some] = exact.mul_(grad_losses[some, :, None]).to(gradient.dtype)
    return gradient


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    gradient = _sparse_cross_entropy_backward(grad_losses.contiguous(), *ctx.saved_tensors)
    return gradient, None, None, None, None, None


_sparse_cross_entropy.register_autograd(_backward, setup_context=_keep)


def sparse_cross_entropy(
    logits: Tensor, ids: Tensor, probabilities: Tensor, rest: Tensor, common: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """(B, N): the loss of each token, in float32 or what is more exact; the labels get no gradient.

    logits (B, N, K) of any precision, ids and probabilities (B, N, M), rest (B, N); common is labels (B, P, K) and the
    shares (B, N, P) that tokens take of them.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if common is None:
        batch, tokens, classes = logits.shape
        common = (rest.new_empty(batch, 0, classes), rest.new_empty(batch, tokens, 0))
    exact = (tensor.to(dtype).contiguous() for tensor in (probabilities, rest, *common))
    losses, _ = _sparse_cross_entropy(logits.contiguous(), ids.contiguous(), *exact)
    return losses


def _fits_triton(logits: Tensor) -> bool:
    return logits.is_cuda and HAS_TRITON and logits.dtype != torch.float64 and logits.numel() > 0


def _mass(probabilities: Tensor, rest: Tensor, labels: Tensor, share: Tensor) -> Tensor:
    """(B, N): what a label sums to."""
    return rest * labels.shape[-1] + probabilities.sum(-1) + (share * labels.sum(-1)[:, None]).sum(-1)


def _stretches(logits: Tensor) -> Iterator[slice]:
    """Some pictures at a time."""
    most = LOGITS_AT_ONCE.get(logits.device.type, LOGITS_AT_ONCE["cuda"])
    step = max(1, most // max(1, logits[:1].numel()))
    return (slice(start, start + step) for start in range(0, len(logits), step))
