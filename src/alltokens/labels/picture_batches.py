"""Pictures for the annotator: decoded, brought to its size, in batches that are the same whoever makes them.

Shapes: B batch, S side of the picture in pixels (one for each scale).

The batches of all pictures are dealt to the processes in turn. A batch holds the same pictures however many processes
there are and wherever an earlier run stopped, and so its label maps are the same to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from alltokens.data.datasets import load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture, decode_picture
from alltokens.data.transforms import EvalTransform

Picture = Image.Image | bytes | Path
Squashed = tuple[tuple[Tensor, ...], str]  # (3, S, S) uint8 in each scale, and what was wrong with the picture


@dataclass(frozen=True)
class View:
    """How a picture is shown to the annotator: the whole of it, squashed to a square.

    `center_crop` shows its middle alone, as the published program does, whose maps are then taken for the whole
    picture's (FACTS 2.5).
    """

    sizes: tuple[int, ...]
    interpolation: str = "bicubic"
    center_crop: bool = False

    def __call__(self, picture: Image.Image) -> tuple[Tensor, ...]:
        return tuple(self._at(picture, size) for size in self.sizes)

    def nothing(self) -> tuple[Tensor, ...]:
        """What stands in a batch for a picture that cannot be read."""
        return tuple(torch.zeros(3, size, size, dtype=torch.uint8) for size in self.sizes)

    def _at(self, picture: Image.Image, size: int) -> Tensor:
        transform = EvalTransform(size, 1.0, self.interpolation, mode="center" if self.center_crop else "squash")
        return torch.from_numpy(np.array(transform.shown(picture))).permute(2, 0, 1).contiguous()


class Job(NamedTuple):
    """Pictures of one batch that still want a map."""

    number: int  # of the batch among those of this process
    keys: list[str]
    pictures: list[Any]  # indices of a source, or pictures


class Batch(NamedTuple):
    """A job's pictures, ready for the device."""

    job: Job
    pictures: tuple[Tensor, ...]  # (B, 3, S, S) uint8 in each scale
    problems: list[str]  # B of them, empty where all is well

    def pinned(self) -> Batch:
        return self._replace(pictures=tuple(picture.pin_memory() for picture in self.pictures))


def deal(
    pictures: Iterable[tuple[Any, str]],
    batch_size: int,
    rank: int,
    world: int,
    is_done: Callable[[Sequence[str]], Sequence[bool]],
    passed_over: Callable[[int], None],
) -> Iterator[Job]:
    """This process's share of all (picture, key), without what is done; `passed_over` is told how many that were."""
    there = iter(pictures)
    number = 0
    while batch := list(islice(there, batch_size)):
        if number % world == rank:
            done = is_done([key for _, key in batch])
            left = [pair for pair, was_done in zip(batch, done, strict=True) if not was_done]
            passed_over(len(batch) - len(left))
            if left:
                yield Job(number // world, [key for _, key in left], [picture for picture, _ in left])
        number += 1


def read_source(
    source: PictureSource, jobs: Iterator[Job], view: View, max_pixels: int, workers: int, pin_memory: bool
) -> Iterator[Batch]:
    """The jobs' pictures, read by `workers` processes (0: by this one)."""
    waiting: deque[Job] = deque()

    def indices() -> Iterator[list[int]]:
        for job in jobs:
            waiting.append(job)
            yield job.pictures

    loader = DataLoader(
        _Squashed(source, view, max_pixels),
        batch_sampler=indices(),  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
    for pictures, problems in loader:
        yield Batch(waiting.popleft(), tuple(pictures), list(problems))


def read_stream(jobs: Iterator[Job], view: View, max_pixels: int, workers: int, pin_memory: bool) -> Iterator[Batch]:
    """The pictures of a stream, decoded by threads while the batches before them are labelled."""
    with ThreadPoolExecutor(max(1, workers)) as threads:
        ahead: deque[tuple[Job, list[Future[Squashed]]]] = deque()
        for job in jobs:
            named = zip(job.pictures, job.keys, strict=True)
            ahead.append((job, [threads.submit(_decoded, view, max_pixels, *pair) for pair in named]))
            if len(ahead) > 2:
                yield _collected(*ahead.popleft(), pin_memory)
        while ahead:
            yield _collected(*ahead.popleft(), pin_memory)


def _collected(job: Job, futures: list[Future[Squashed]], pin_memory: bool) -> Batch:
    pictures, problems = default_collate([future.result() for future in futures])
    batch = Batch(job, tuple(pictures), list(problems))
    return batch.pinned() if pin_memory else batch


def _decoded(view: View, max_pixels: int, picture: Picture, key: str) -> Squashed:
    try:
        encoded = picture.read_bytes() if isinstance(picture, Path) else picture
        return view(decode_picture(encoded, max_pixels=max_pixels, name=key)), ""
    except UnreadablePicture as error:
        return view.nothing(), str(error)
    except OSError as error:
        return view.nothing(), f"{key}: cannot be read ({error.strerror or error})"


class _Squashed(Dataset[Squashed]):
    def __init__(self, source: PictureSource, view: View, max_pixels: int) -> None:
        self.source, self.view, self.max_pixels = source, view, max_pixels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Squashed:
        try:
            return self.view(load_picture(self.source, index, self.max_pixels)), ""
        except UnreadablePicture as error:
            return self.view.nothing(), str(error)
