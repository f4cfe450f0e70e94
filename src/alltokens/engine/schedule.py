"""The learning rate as a pure function of how far training is, counted in epochs."""

from __future__ import annotations

import math

from alltokens.engine.config import OptimizerConfig, ScheduleConfig


def peak_rate(optimizer: OptimizerConfig, batch_size: int) -> float:
    """The rate after warm-up: `lr`, scaled linearly with the batch when the recipe states `lr_per`."""
    return optimizer.lr * (batch_size / optimizer.lr_per if optimizer.lr_per else 1.0)


def total_epochs(epochs: int, schedule: ScheduleConfig) -> float:
    return epochs + schedule.cooldown_epochs


def learning_rate(position: float, peak: float, epochs: int, schedule: ScheduleConfig) -> float:
    """The rate at `position` epochs (a fraction inside an epoch).

    Warm-up rises linearly from warmup_lr; cosine and linear run over all `epochs`, the warm-up's included (as the
    published programs have it, FACTS 2), down to min_lr, where cool-down stays.
    """
    if schedule.official_deit_offset:
        position = max(math.floor(position) - 1, 0)
    if position < schedule.warmup_epochs:
        return schedule.warmup_lr + position * (peak - schedule.warmup_lr) / schedule.warmup_epochs
    if schedule.kind == "constant":
        return peak
    progress = min(position / epochs, 1.0)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * left
