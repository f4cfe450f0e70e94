"""All pictures of a source decoded once and held on one device, from which whole batches come.

Shapes: N pictures, B batch, S side of the cached pictures, H and W the network's input.

Decoded by threads, straight into memory that is copied to the device. The number of threads changes no byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.core.transfer import sent_ahead
from alltokens.data.datasets import IGNORED, OnBadPicture, Sample, load_picture
from alltokens.data.loader import checked_workers
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import MAX_PIXELS, UnreadablePicture
from alltokens.data.sampler import EpochSampler, evaluation_indices
from alltokens.data.threads import in_order, most_held
from alltokens.data.transforms import EvalTransform
from alltokens.errors import UserError

SHARE_OF_MEMORY = 0.6  # of a device's free memory that a cache may take; the training needs the rest

_PIECE = 64  # pictures that a thread decodes before they go to the device

Progress = Callable[[int, int], None]


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
    progress: Progress | None = None,
) -> CachedPictures:
    """Decode a whole source once. Each picture is squashed to (3, size, size) uint8 with antialiasing.

    `workers` are threads; with 0 the calling one decodes. A bad picture is an error; with `skip` it is left out of the
    cache, with `mark` it is black and labelled -1. `progress(done, all)` is called now and then, and at the end.
    """
    device = torch.device(device)
    pictures, sizes, trouble = _decode(
        *(source, range(len(source)), partial(_squashed, size=size), (size, size), device),
        workers=workers,
        max_pixels=max_pixels,
        bad_is_error=on_bad_picture == "error",
        progress=progress,
    )
    labels = torch.tensor(source.labels)
    labels[list(trouble)] = IGNORED
    keys = list(source.keys)  # unpacked: some hundreds of them are looked up for every batch
    if trouble and on_bad_picture == "skip":
        kept = torch.tensor([index for index in range(len(source)) if index not in trouble])
        pictures, sizes, labels = pictures[kept.to(device)], sizes[kept], labels[kept]
        keys = [keys[index] for index in kept.tolist()]
    return CachedPictures(pictures, sizes, labels.to(device), keys, source.class_names, tuple(trouble.values()))


def cache_evaluation(
    source: PictureSource,
    transform: EvalTransform,
    batch_size: int,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    world: int = 1,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
    on_bad_picture: Literal["error", "mark"] = "error",
    progress: Progress | None = None,
) -> list[Sample]:
    """The batches of `evaluation_loader`, on `device`, their pictures as bytes (B, 3, H, W): not normalised."""
    device = torch.device(device)
    indices = evaluation_indices(len(source), rank, world)
    pictures, sizes, trouble = _decode(
        *(source, indices, transform.shown, transform.size, device),
        workers=workers,
        max_pixels=max_pixels,
        bad_is_error=on_bad_picture == "error",
        progress=progress,
    )
    labels = torch.tensor(source.labels[indices.start :: indices.step])
    labels[list(trouble)] = IGNORED
    labels = labels.to(device)
    matrices = [transform.matrix((width, height)) for height, width in sizes.tolist()]
    batches: list[Sample] = []
    for start in range(0, len(indices), batch_size):
        places = range(start, min(start + batch_size, len(indices)))
        rows = slice(places.start, places.stop)
        keys = tuple(source.keys[indices[place]] for place in places)
        lines = tuple(trouble.get(place, "") for place in places)
        matrix = torch.stack(matrices[rows]).to(device)
        batches.append(Sample(pictures[rows], labels[rows], keys, matrix, trouble=lines))
    return batches


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


class _Decoded(NamedTuple):
    pictures: Tensor  # (N, 3, H, W) uint8, on the device
    sizes: Tensor  # (N, 2) int64, height and width as they were; 1 where a picture could not be read
    trouble: dict[int, str]  # place -> what was wrong; these pictures are black


def _decode(
    source: PictureSource,
    indices: Sequence[int],
    shown: Callable[[Image.Image], Image.Image],
    size: tuple[int, int],
    device: torch.device,
    *,
    workers: int | None,
    max_pixels: int,
    bad_is_error: bool,
    progress: Progress | None,
) -> _Decoded:
    """The pictures with these indices, each as `shown` makes it: of `size` (height, width)."""
    count, threads = len(indices), checked_workers(workers)
    _check_memory(count, size, device)
    pictures = torch.empty((count, 3, *size), dtype=torch.uint8, device=device)
    sizes = torch.ones((count, 2), dtype=torch.int64)
    trouble: dict[int, str] = {}
    rows = torch.empty((most_held(threads, _PIECE), 3, *size), dtype=torch.uint8)  # used in turn
    memory = rows.numpy()

    def fill(place: int) -> tuple[tuple[int, int], str]:
        try:
            picture, problem = load_picture(source, indices[place], max_pixels), ""
        except UnreadablePicture as error:
            if bad_is_error:
                raise
            picture, problem = Image.new("RGB", (1, 1)), str(error)
        memory[place % len(memory)] = np.asarray(shown(picture)).transpose(2, 0, 1)
        return (picture.height, picture.width), problem

    done = 0
    with closing(in_order(fill, range(count), threads, _PIECE)) as pieces:
        for piece in pieces:
            end, row = done + len(piece), done % len(rows)
            pictures[done:end] = rows[row : row + len(piece)]
            sizes[done:end] = torch.tensor([original for original, _ in piece])
            trouble |= {done + at: problem for at, (_, problem) in enumerate(piece) if problem}
            done = end
            if progress:
                progress(done, count)
    return _Decoded(pictures, sizes, trouble)


def _squashed(picture: Image.Image, size: int) -> Image.Image:
    if picture.size == (size, size):
        return picture
    return picture.resize((size, size), Image.Resampling.BICUBIC, reducing_gap=3.0)


def _check_memory(count: int, size: tuple[int, int], device: torch.device) -> None:
    height, width = size
    if min(size) < 1:
        raise UserError(f"the size of cached pictures must be at least 1, got {min(size)}")
    needed = count * 3 * height * width
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > SHARE_OF_MEMORY * free:
        raise UserError(
            f"{count} pictures of {width}x{height} need {needed:,} bytes, more than {SHARE_OF_MEMORY:.0%} of the "
            f"{free:,} bytes of {device}; make them smaller, or load them with workers instead of a cache"
        )
