"""An exponential moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights, for every parameter and floating-point buffer.

    Other buffers (counters) follow the network. Works on sharded weights too: each process averages its own part.
    """

    def __init__(self, net: nn.Module, decay: float, warmup: bool = True) -> None:
        self.net = net
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self.values = {name: value.detach().clone() for name, value in self._live().items()}

    def _live(self) -> dict[str, Tensor]:
        return dict(self.net.named_parameters()) | dict(self.net.named_buffers())

    @torch.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        live = self._live()
        averaged = [name for name, value in self.values.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self.values[name] for name in averaged], [live[name].detach() for name in averaged], 1 - decay
        )
        for name, value in self.values.items():
            if not value.is_floating_point():
                value.copy_(live[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the network has the average as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in self._live().items():
            kept = value.detach().clone()
            value.copy_(self.values[name])
            self.values[name].copy_(kept)
