"""Sums over many batches and processes, kept on the device, read once.

Shapes: B batch, K classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Scores(NamedTuple):
    """What a classifier did on a set of pictures."""

    top1: float  # percent
    top5: float  # percent; with fewer than five classes, of all of them
    loss: float  # mean cross-entropy
    pictures: int


class ScoreSums:
    """Adds up top-1, top-5 and cross-entropy in float64; exact for any split of the pictures over batches and ranks."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor, counted: Tensor | None = None) -> None:
        """`counted` (B,) bool leaves pictures out (padding, unreadable ones)."""
        weight = torch.ones(len(labels), device=logits.device) if counted is None else counted.float()
        labels = labels.clamp(min=0)
        logits = logits.float()
        own = logits.gather(1, labels[:, None])
        # A label's rank counts every class that is not below it: ties and NaN are no hits by luck of order.
        rank = logits.shape[1] - (logits < own).sum(1)
        loss = F.cross_entropy(logits, labels, reduction="none")
        rows = torch.stack(
            [(rank <= 1).float(), (rank <= min(5, logits.shape[1])).float(), loss, torch.ones_like(loss)]
        )
        # where, not a product: a row that is not counted may hold anything.
        self.sums += torch.where(weight.bool(), rows, torch.zeros(())).double().sum(1)

    def result(self) -> Scores:
        """Over all processes."""
        total = self.sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        top1, top5, loss, count = total.tolist()
        pictures = max(count, 1.0)
        return Scores(100 * top1 / pictures, 100 * top5 / pictures, loss / pictures, int(count))
