"""Which picture comes when: the order of an epoch, as a pure function of (seed, epoch).

Shapes: N pictures; W ranks, each with a batch of B.

A global batch is a run of W x B places of the epoch's order; rank r takes every W-th of them, so that two ranks with B
see the same pictures per step as one rank with 2B. Every place has its own seed for the augmentation. Nothing is
remembered between batches: to resume inside an epoch is to start at a later batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from alltokens.errors import UserError

_ORDER, _SEEDS = 0, 1  # the streams drawn from one (seed, epoch)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of SplitMix64's state: 2**64 over the golden ratio


class Draw(NamedTuple):
    """What a dataset is asked for: a picture, and the seed of its augmentation."""

    index: int
    seed: int


def epoch_order(length: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """The pictures of an epoch, (N,) int64.

    `repeats` > 1 is repeated augmentation as in DeiT (RASampler): an epoch keeps its length, so that one in `repeats`
    pictures is chosen and comes `repeats` times in a row, each time augmented anew. Neighbours go to different ranks.
    """
    if repeats < 1:
        raise UserError(f"repeats must be at least 1 (each picture once), got {repeats}")
    order = np.argsort(_random(seed, epoch, _ORDER, length), kind="stable")
    return np.repeat(order[: -(-length // repeats)], repeats)[:length]


def draw_seeds(length: int, seed: int, epoch: int) -> np.ndarray:
    """A seed in [0, 2**63) for each place of an epoch, (N,) int64."""
    return (_random(seed, epoch, _SEEDS, length) >> np.uint64(1)).astype(np.int64)


def evaluation_indices(length: int, rank: int = 0, world: int = 1) -> range:
    """A rank's pictures: every picture belongs to exactly one rank, so the parts may differ in length by one."""
    _check_rank(rank, world)
    return range(rank, length, world)


class EpochSampler(Sampler[list[Draw]]):
    """One rank's batches of the epoch that was set last, a batch sampler for a DataLoader; a short rest is left out."""

    def __init__(
        self, length: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, repeats: int = 1
    ) -> None:
        _check_rank(rank, world)
        if batch_size < 1:
            raise UserError(f"the batch size must be at least 1, got {batch_size}")
        if batch_size * world > length:
            raise UserError(
                f"a batch of {batch_size} on {world} rank(s) takes {batch_size * world} pictures, but there are only "
                f"{length}; a batch size of at most {length // world} would fit"
            )
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world, self.repeats = rank, world, repeats
        self.batches_per_epoch = length // (batch_size * world)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """What the next iteration yields: the batches of `epoch` from `start_batch` on."""
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise UserError(f"start_batch must lie in 0 to {self.batches_per_epoch}, got {start_batch}")
        self.epoch, self.start_batch = epoch, start_batch

    def __len__(self) -> int:
        return self.batches_per_epoch - self.start_batch

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rank's batches as arrays: indices (B,) and seeds (B,)."""
        shape = (self.batches_per_epoch, self.batch_size, self.world)
        used = self.batches_per_epoch * self.batch_size * self.world
        order = epoch_order(self.length, self.seed, self.epoch, self.repeats)[:used].reshape(shape)
        seeds = draw_seeds(self.length, self.seed, self.epoch)[:used].reshape(shape)
        mine = (slice(self.start_batch, None), slice(None), self.rank)
        return zip(order[mine], seeds[mine], strict=True)

    def __iter__(self) -> Iterator[list[Draw]]:
        return (list(map(Draw, indices.tolist(), seeds.tolist())) for indices, seeds in self.batches())


def _random(seed: int, epoch: int, stream: int, count: int) -> np.ndarray:
    """`count` numbers of 64 bits: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its state hashed from the arguments.

    Written here because numpy promises no fixed stream for its shuffles across versions.
    """
    state = np.zeros(1, dtype=np.uint64)
    for word in (seed, epoch, stream):
        state = _scrambled(state + _GOLDEN + np.uint64(word % 2**64))
    return _scrambled(state + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def _scrambled(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UserError(f"the rank must lie in 0 to {world - 1} (of {world}), got {rank}")
