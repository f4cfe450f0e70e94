"""Pictures for the annotator: decoded, brought to its size, in batches that are the same whoever makes them.

Shapes: B batch, S side of the picture in pixels (one for each scale).

The batches of all pictures are dealt to the processes in turn. A batch holds the same pictures however many processes
there are and wherever an earlier run stopped, and so its label maps are the same to the bit.

Whoever decodes writes straight into memory that batches take turns in: nothing is sent from process to process but
which pictures are there. (Fresh shared memory for every batch would be paid in page faults.)
"""

from __future__ import annotations

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alltokens.data.datasets import load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture, decode_picture
from alltokens.data.transforms import RESAMPLING, EvalTransform, resized_pixels
from alltokens.errors import UserError

Picture = Image.Image | bytes | Path

_PIECE = 16  # pictures that a worker takes at a time, at most
_AHEAD = 2  # pieces for each worker, batches for threads
_MEMORY = 256 << 20  # bytes for batches that are read ahead, if smaller pieces bring them down to it
_SHARED_MEMORY = Path("/dev/shm")
_NICE = 5  # workers give way to the process that feeds the device, if there are not cores enough for all


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
        """(S, S, 3) uint8 in each scale."""
        return tuple(self._at(picture, size) for size in self.sizes)

    @property
    def enough(self) -> int | None:
        """A JPEG may be decoded at a fraction that leaves such sides: scores change by less than bf16 changes them."""
        return None if self.center_crop else 3 * max(self.sizes)

    @property
    def bytes(self) -> int:
        """Of one picture."""
        return sum(3 * size * size for size in self.sizes)

    def _at(self, picture: Image.Image, size: int) -> Tensor:
        if self.center_crop:
            shown = EvalTransform(size, 1.0, self.interpolation).shown(picture)
            return torch.frombuffer(bytearray(shown.tobytes()), dtype=torch.uint8).view(size, size, 3)
        return resized_pixels(picture, (0, 0, *picture.size), (size, size), RESAMPLING[self.interpolation])


class Job(NamedTuple):
    """Pictures of one batch that still want a map."""

    number: int  # of the batch among those of this process
    keys: list[str]
    pictures: list[Any]  # indices of a source, or pictures


class Batch(NamedTuple):
    """A job's pictures. They are there until the next batch is asked for."""

    job: Job
    pictures: tuple[Tensor, ...]  # (B, S, S, 3) uint8 in each scale, (B, 3, S, S) on the device
    problems: list[str]  # B of them, empty where all is well


class Slots:
    """Memory for some batches; `shared` with all processes that are forked or started with it."""

    def __init__(self, view: View, batch_size: int, count: int, shared: bool = False) -> None:
        self.view, self.count = view, count
        if shared:
            _check_shared_memory(count * batch_size * view.bytes)
        make = _shared if shared else partial(torch.empty, dtype=torch.uint8)
        self._memory = [make((count, batch_size, size, size, 3)) for size in view.sizes]

    def fill(self, slot: int, row: int, read: Callable[[], Image.Image]) -> str:
        """Put a picture where it belongs; what was wrong with it, if anything. Its place then stays black."""
        try:
            parts, problem = self.view(read()), ""
        except UnreadablePicture as error:
            parts, problem = None, str(error)
        for at, memory in enumerate(self._memory):
            if parts is None:
                memory[slot, row].zero_()
            else:
                memory[slot, row].copy_(parts[at])
        return problem

    def batch(self, number: int, job: Job, problems: list[str]) -> Batch:
        """The `number`th of all batches, from its slot."""
        count = len(job.keys)
        return Batch(job, tuple(memory[number % self.count, :count] for memory in self._memory), problems)


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


def piece_and_slots(view: View, batch_size: int, workers: int) -> tuple[int, int]:
    """Pictures that a worker takes at a time, and batches that need memory, for `read_source`.

    Before the last of the pieces under way the reader is at most so many batches ahead of what is asked for; the
    smaller the pieces, the fewer. Memory that is touched for the first time costs every worker time.
    """
    choices = [_PIECE >> halved for halved in range(_PIECE.bit_length())]
    slots = {size: -(-_AHEAD * workers // -(-batch_size // size)) + 1 for size in choices}
    fewest = min(slots.values())
    return next((size, n) for size, n in slots.items() if n * batch_size * view.bytes <= _MEMORY or n == fewest)


def read_source(
    source: PictureSource, jobs: Iterator[Job], view: View, max_pixels: int, workers: int, batch_size: int
) -> Generator[Batch]:
    """The jobs' pictures, read by `workers` processes (0: by this one)."""
    size, count = piece_and_slots(view, batch_size, workers)
    pieces_each = -(-batch_size // size)
    slots = Slots(view, batch_size, count, shared=workers > 0)
    waiting: deque[Job] = deque()

    def pieces() -> Iterator[_Piece]:
        for number, job in enumerate(jobs):
            waiting.append(job)
            for piece in range(pieces_each):  # also where it is empty: the count of slots relies on it
                start = piece * size
                yield _Piece(number % slots.count, start, job.pictures[start : start + size])

    loader = DataLoader(
        _Filling(source, slots, max_pixels),
        batch_size=None,
        sampler=pieces(),  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        collate_fn=_as_it_is,
        worker_init_fn=_give_way,
        generator=torch.Generator(),
    )
    problems: list[str] = []
    number = 0
    for piece, found in enumerate(loader, start=1):
        problems += found
        if piece % pieces_each == 0:
            yield slots.batch(number, waiting.popleft(), problems)
            problems, number = [], number + 1


def read_stream(jobs: Iterator[Job], view: View, max_pixels: int, workers: int, batch_size: int) -> Generator[Batch]:
    """The pictures of a stream, decoded by threads while the batches before them are labelled."""
    slots = Slots(view, batch_size, _AHEAD + 1)
    ahead: deque[tuple[Job, list[Future[str]]]] = deque()
    threads = ThreadPoolExecutor(max(1, workers))

    def collected(number: int) -> Batch:
        job, futures = ahead.popleft()
        return slots.batch(number, job, [future.result() for future in futures])

    def decoded(slot: int, row: int, picture: Picture, key: str) -> str:
        return slots.fill(slot, row, lambda: _decoded(picture, key, max_pixels, view.enough))

    try:
        number = -1
        for number, job in enumerate(jobs):
            slot = number % slots.count
            named = zip(job.pictures, job.keys, strict=True)
            ahead.append((job, [threads.submit(decoded, slot, row, *pair) for row, pair in enumerate(named)]))
            if len(ahead) > _AHEAD:
                yield collected(number - _AHEAD)
        while ahead:
            yield collected(number + 1 - len(ahead))
    finally:
        threads.shutdown(cancel_futures=True)


def _decoded(picture: Picture, key: str, max_pixels: int, enough: int | None) -> Image.Image:
    try:
        encoded = picture.read_bytes() if isinstance(picture, Path) else picture
    except OSError as error:
        raise UnreadablePicture(f"{key}: cannot be read ({error.strerror or error})") from error
    return decode_picture(encoded, max_pixels=max_pixels, enough=enough, name=key)


class _Piece(NamedTuple):
    """Some pictures of a batch, and where they belong."""

    slot: int
    start: int
    indices: list[int]


class _Filling(Dataset[list[str]]):
    """`filling[piece]` puts a piece's pictures into their slot and says what was wrong with each."""

    def __init__(self, source: PictureSource, slots: Slots, max_pixels: int) -> None:
        self.source, self.slots, self.max_pixels = source, slots, max_pixels

    def __getitem__(self, piece: _Piece) -> list[str]:
        return [
            self.slots.fill(piece.slot, piece.start + at, lambda index=index: self._read(index))
            for at, index in enumerate(piece.indices)
        ]

    def _read(self, index: int) -> Image.Image:
        return load_picture(self.source, index, self.max_pixels, self.slots.view.enough)


def _shared(shape: tuple[int, ...]) -> Tensor:
    """Bytes that other processes see; `share_memory_` would copy what is not there yet, page by page."""
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # pyright: ignore[reportPrivateUsage]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def _check_shared_memory(needed: int) -> None:
    """What does not fit there is found out by a signal that kills, and containers often have 64 MB."""
    if _SHARED_MEMORY.is_dir() and needed > (free := shutil.disk_usage(_SHARED_MEMORY).free):
        raise UserError(
            f"the pictures that workers read ahead need {needed:,} bytes of shared memory, and {_SHARED_MEMORY} has "
            f"{free:,} left; take fewer workers, a smaller batch_size, or give the container more (docker --shm-size)"
        )


def _as_it_is(problems: list[str]) -> list[str]:
    return problems


def _give_way(worker: int) -> None:
    if hasattr(os, "nice"):
        os.nice(_NICE)
