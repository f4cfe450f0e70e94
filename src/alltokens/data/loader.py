"""From samples to batches: workers on the CPU, or all pictures held on the device.

Shapes: N pictures, B batch, S side of the cached pictures.

Both ways take their order and their seeds from an EpochSampler in the main process, so that neither the number of
workers nor an interruption changes a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alltokens.core.label_maps import LabelMap
from alltokens.core.transfer import sent_ahead
from alltokens.data.datasets import IGNORED, OnBadPicture, PictureDataset, Sample, load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import MAX_PIXELS, UnreadablePicture
from alltokens.data.sampler import EpochSampler, evaluation_indices
from alltokens.errors import UserError

SHARE_OF_MEMORY = 0.6  # of a device's free memory that a cache may take; the training needs the rest


def default_workers(processes: int = 1) -> int:
    """Loading workers for each of `processes` training processes on this machine: the cores it may use, shared out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def training_loader(
    dataset: PictureDataset,
    sampler: EpochSampler,
    *,
    workers: int | None = None,
    pin_memory: bool | None = None,
    start_method: str | None = None,
) -> DataLoader[Sample]:
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
) -> DataLoader[Sample]:
    """Every picture once over all ranks, in order; the last batch may be short, and a rank may have a batch less."""
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    indices = evaluation_indices(len(dataset), rank, world)
    return _loader(dataset, workers, pin_memory, start_method, batch_size=batch_size, sampler=indices)


class _Loader(DataLoader[Any]):
    """A DataLoader that raises a worker's UserError as it was, without the worker's traceback in its message."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            yield from super().__iter__()
        except UserError as error:
            # End the workers here and now: left to the garbage collector, which takes the queues and the traceback
            # that refers to them in any order, torch would wait for each worker in vain for five seconds.
            error.__traceback__ = None
            self._iterator = None
            kind = type(error)
            raise kind(str(error).rpartition(f"{kind.__name__}: ")[2].rstrip()) from None


def _loader(
    dataset: Dataset[Any], workers: int | None, pin_memory: bool | None, start_method: str | None, **batches: Any
) -> DataLoader[Any]:
    workers = default_workers() if workers is None else workers
    if workers < 0:
        raise UserError(f"workers must be 0 (load in the main process) or more, got {workers}")
    return _Loader(
        dataset,
        num_workers=workers,  # torch gives each of them one thread
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        multiprocessing_context=start_method if workers else None,
        generator=torch.Generator(),  # its own, or each iteration would draw from the global one
        **batches,
    )


class CachedBatch(NamedTuple):
    """Some of the cached pictures."""

    pictures: Tensor  # (B, 3, S, S) uint8, on the device
    sizes: Tensor  # (B, 2) int64, on the CPU
    labels: Tensor  # (B,) int64, on the device
    keys: tuple[str, ...]
    there: Tensor  # (B,) int64, on the device: which pictures these are


@dataclass(frozen=True, eq=False)
class CachedPictures:
    """All pictures of a source on one device, each squashed to a square; see `cache_pictures`."""

    pictures: Tensor  # (N, 3, S, S) uint8, on the device
    sizes: Tensor  # (N, 2) int64, height and width before squashing; on the CPU, where crops are drawn
    labels: Tensor  # (N,) int64, on the device; -1 where a picture could not be read
    keys: list[str]
    class_names: tuple[str, ...]
    trouble: tuple[str, ...]  # a line for each picture that could not be read

    def __len__(self) -> int:
        return len(self.pictures)

    def to(self, device: torch.device | str) -> CachedPictures:
        """The same pictures on another device."""
        return replace(self, pictures=self.pictures.to(device), labels=self.labels.to(device))

    def batch(self, indices: np.ndarray | Tensor) -> CachedBatch:
        """The pictures with these indices (B,), which are on the CPU."""
        chosen = torch.as_tensor(indices)
        there = sent_ahead(chosen, self.pictures.device)
        keys = tuple(self.keys[index] for index in chosen.tolist())
        return CachedBatch(self.pictures[there], self.sizes[chosen], self.labels[there], keys, there)


def cache_pictures(
    source: PictureSource,
    size: int,
    device: torch.device | str = "cpu",
    *,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
    on_bad_picture: OnBadPicture = "error",
    progress: Callable[[int, int], None] | None = None,
) -> CachedPictures:
    """Decode a whole source once. Each picture is squashed to (3, size, size) uint8 with antialiasing.

    A bad picture is an error; with `skip` it is left out of the cache, with `mark` it is black and labelled -1.
    `progress(done, all)` is called after every batch.
    """
    device = torch.device(device)
    _check_memory(len(source), size, device)
    pictures = torch.empty((len(source), 3, size, size), dtype=torch.uint8, device=device)
    sizes = torch.ones((len(source), 2), dtype=torch.int64)
    labels = torch.tensor(source.labels)
    trouble: dict[int, str] = {}
    loader = _loader(_Squashed(source, size, max_pixels), workers, None, None, batch_size=64)
    done = 0
    for squashed, original, problems in loader:
        end = done + len(squashed)
        pictures[done:end].copy_(squashed, non_blocking=True)
        sizes[done:end] = original
        trouble |= {done + place: problem for place, problem in enumerate(problems) if problem}
        if trouble and on_bad_picture == "error":
            raise UnreadablePicture(next(iter(trouble.values())))
        done = end
        if progress:
            progress(done, len(source))
    keys = list(source.keys)  # unpacked: some hundreds of them are looked up for every batch
    labels[list(trouble)] = IGNORED
    if trouble and on_bad_picture == "skip":
        kept = torch.tensor([index for index in range(len(source)) if index not in trouble])
        pictures, sizes, labels = pictures[kept.to(device)], sizes[kept], labels[kept]
        keys = [keys[index] for index in kept.tolist()]
    return CachedPictures(pictures, sizes, labels.to(device), keys, source.class_names, tuple(trouble.values()))


class Augment(Protocol):
    """Pictures (B, 3, S, S) uint8 and their sizes (B, 2) -> images (B, 3, H, W) and matrices (B, 2, 3)."""

    def __call__(
        self, pictures: Tensor, sizes: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]: ...


def device_batches(
    cache: CachedPictures, augment: Augment, sampler: EpochSampler, maps: LabelMap | None = None
) -> Iterator[Sample]:
    """The batches of `sampler`'s epoch, augmented on the device; a batch's randomness is that of its first place.

    `maps` are the label maps of all cached pictures, in their order and on their device.
    """
    if sampler.length != len(cache):
        raise UserError(f"the sampler orders {sampler.length} pictures, the cache has {len(cache)}")
    for indices, seeds in sampler.batches():
        batch = cache.batch(indices)
        images, matrices = augment(batch.pictures, batch.sizes, torch.Generator().manual_seed(int(seeds[0])))
        yield Sample(images, batch.labels, batch.keys, matrices, _chosen(maps, batch.there), ("",) * len(batch.keys))


def _chosen(maps: LabelMap | None, indices: Tensor) -> LabelMap | tuple[()]:
    if maps is None:
        return ()
    tail = maps.tail[indices] if maps.tail is not None and maps.has_tail else maps.tail
    return LabelMap(maps.ids[indices], maps.scores[indices], tail)


class _Squashed(Dataset[tuple[Tensor, Tensor, str]]):
    """For filling a cache: the picture (3, S, S) uint8, its height and width, and what was wrong with it."""

    def __init__(self, source: PictureSource, size: int, max_pixels: int) -> None:
        self.source, self.size, self.max_pixels = source, size, max_pixels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        try:
            picture, problem = load_picture(self.source, index, self.max_pixels), ""
        except UnreadablePicture as error:
            picture, problem = Image.new("RGB", (1, 1)), str(error)
        original = torch.tensor([picture.height, picture.width])
        if picture.size != (self.size, self.size):
            picture = picture.resize((self.size, self.size), Image.Resampling.BICUBIC, reducing_gap=3.0)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous(), original, problem


def _check_memory(count: int, size: int, device: torch.device) -> None:
    if size < 1:
        raise UserError(f"the size of cached pictures must be at least 1, got {size}")
    needed = count * 3 * size * size
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > SHARE_OF_MEMORY * free:
        raise UserError(
            f"{count} pictures of {size}x{size} need {needed:,} bytes, more than {SHARE_OF_MEMORY:.0%} of the "
            f"{free:,} bytes of {device}; make them smaller, or load them with workers instead of a cache"
        )
