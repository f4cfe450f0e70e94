"""From samples to batches by loader processes; cache.py has the other way, all pictures held on the device.

Both ways take their order and their seeds from an EpochSampler in the main process, so that neither the number of
workers nor an interruption changes a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from alltokens.data.datasets import PictureDataset
from alltokens.data.sampler import EpochSampler, evaluation_indices
from alltokens.errors import UserError


def default_workers(processes: int = 1) -> int:
    """Workers for each of `processes` training processes on this machine: the cores it may use, shared out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def checked_workers(workers: int | None) -> int:
    """None: the default."""
    if workers is not None and workers < 0:
        raise UserError(f"workers must be 0 (load in the main process) or more, got {workers}")
    return default_workers() if workers is None else workers


def training_loader(
    dataset: PictureDataset,
    sampler: EpochSampler,
    *,
    workers: int | None = None,
    pin_memory: bool | None = None,
    start_method: str | None = None,
) -> Loader:
    """The batches of `sampler`'s epoch; `sampler.set_epoch(epoch, start_batch)` before each epoch, then iterate.

    Workers live on from epoch to epoch: what changes is in the sampler, which the main process reads when it starts
    to iterate. `workers=0` loads in the main process and gives the same bytes. `start_method` is how workers start:
    by default the platform's way (fork on Linux up to Python 3.13, where they share the source's memory).
    """
    if sampler.length != len(dataset):
        raise UserError(f"the sampler orders {sampler.length} pictures, the dataset has {len(dataset)}")
    return _loader(dataset, workers, pin_memory, start_method, batch_sampler=sampler)


def evaluation_loader(
    dataset: PictureDataset,
    batch_size: int,
    *,
    rank: int = 0,
    world: int = 1,
    workers: int | None = None,
    pin_memory: bool | None = None,
    start_method: str | None = None,
) -> Loader:
    """Every picture once over all ranks, in order; the last batch may be short, and a rank may have a batch less."""
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    indices = evaluation_indices(len(dataset), rank, world)
    return _loader(dataset, workers, pin_memory, start_method, batch_size=batch_size, sampler=indices)


class Loader(DataLoader[Any]):
    """A DataLoader that raises a worker's UserError as it was, without the worker's traceback in its message."""

    def close(self) -> None:
        """End its workers here and now; iterating again starts new ones.

        Where an exception or a result still refers to them they are left to the garbage collector, which takes the
        queues first, or not: torch would then wait five seconds for each worker, whenever that is.
        """
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            yield from super().__iter__()
        except UserError as error:
            error.__traceback__ = None
            self.close()
            kind = type(error)
            raise kind(str(error).rpartition(f"{kind.__name__}: ")[2].rstrip()) from None


def _loader(
    dataset: Dataset[Any], workers: int | None, pin_memory: bool | None, start_method: str | None, **batches: Any
) -> Loader:
    workers = checked_workers(workers)
    return Loader(
        dataset,
        num_workers=workers,  # torch gives each of them one thread
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        multiprocessing_context=start_method if workers else None,
        generator=torch.Generator(),  # its own, or each iteration would draw from the global one
        **batches,
    )
