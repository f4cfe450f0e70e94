"""Targets and losses.

Shapes: B batch, N tokens, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.errors import UserError


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """(..., K): 1 - smoothing on the label, plus smoothing spread evenly over all classes; rows sum to 1."""
    if not 0 <= smoothing < 1:
        raise UserError(f"smoothing must lie in [0, 1), got {smoothing}")
    if not torch.compiler.is_compiling() and labels.device.type == "cpu" and labels.numel():  # free to look at
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= num_classes:
            raise UserError(f"labels must lie in 0 to {num_classes - 1} ({num_classes} classes), got {least} to {most}")
    low = smoothing / num_classes
    target = torch.full((*labels.shape, num_classes), low, device=labels.device)
    return target.scatter(-1, labels.unsqueeze(-1), 1 - smoothing + low)


def blend_targets(targets: Tensor, partner: Tensor, partner_share: Tensor) -> Tensor:
    """Mix each sample's target with its partner's: (B, K) by shares (B,), or (B, N, K) by shares (B, N).

    Targets (B, K) with shares (B, N) give (B, N, K): one label per picture, one share per token.
    """
    if partner_share.ndim == 2 and targets.ndim == 2:
        targets = targets[:, None, :]  # (B, 1, K)
    if partner_share.ndim != targets.ndim - 1:
        raise UserError(
            f"targets {tuple(targets.shape)} and shares {tuple(partner_share.shape)} do not fit: expected "
            "(B, K) with (B,), (B, N, K) with (B, N), or (B, K) with (B, N)"
        )
    share = partner_share.unsqueeze(-1).to(targets.dtype)
    return torch.lerp(targets, targets[partner], share)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all rows of -sum(target * log softmax(logits)), in float32 or what is more exact."""
    if logits.shape != targets.shape:
        raise UserError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} must have the same shape")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=dtype)
    return -(targets.to(dtype) * log_probabilities).sum(-1).mean()
