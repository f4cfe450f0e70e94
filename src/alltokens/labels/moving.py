"""Batches of pictures on their way to the device, while the ones before them are labelled.

Shapes: B batch, S side of the picture in pixels (one for each scale).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from alltokens.labels.picture_batches import Batch

Item = TypeVar("Item")

_AHEAD = 2  # batches that wait on the device


def on_device(batches: Generator[Batch], device: torch.device) -> Generator[Batch]:
    """The batches with their pictures (B, 3, S, S) on the device.

    For a GPU a thread of its own takes them out of the readers' memory and sends them, so that whoever labels does
    nothing but that.
    """
    with closing(batches):
        if device.type != "cuda":
            for batch in batches:
                yield batch._replace(pictures=tuple(part.permute(0, 3, 1, 2) for part in batch.pictures))
            return
        with closing(in_background(_sent(batches, device), _AHEAD)) as there:
            for batch, arrived in there:
                labelling = torch.cuda.current_stream(device)
                labelling.wait_event(arrived)
                for part in batch.pictures:
                    part.record_stream(labelling)
                yield batch


class _Arriving(NamedTuple):
    batch: Batch
    arrived: torch.cuda.Event


def _sent(batches: Iterator[Batch], device: torch.device) -> Generator[_Arriving]:
    """Each batch through memory that stays in place, on a stream of its own; it arrives when its event has happened."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        staged: list[Tensor] = []
        arrived: torch.cuda.Event | None = None
        for batch in batches:
            if arrived is not None:
                arrived.synchronize()  # or the next pictures would be laid over those that still travel
            if not staged:
                staged = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in batch.pictures]
            staged = [
                memory if len(memory) >= len(part) else torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                for memory, part in zip(staged, batch.pictures, strict=True)
            ]
            with torch.cuda.stream(stream):
                pictures = [_through(memory, part, device) for memory, part in zip(staged, batch.pictures, strict=True)]
                arrived = torch.cuda.Event()
                arrived.record(stream)
            yield _Arriving(batch._replace(pictures=tuple(part.permute(0, 3, 1, 2) for part in pictures)), arrived)


def _through(memory: Tensor, part: Tensor, device: torch.device) -> Tensor:
    """numpy copies by one thread and lets others run; torch would call all cores, which are busy decoding."""
    some = memory[: len(part)]
    np.copyto(some.numpy(), part.numpy())
    return some.to(device, non_blocking=True)


def in_background(items: Generator[Item], ahead: int) -> Generator[Item]:
    """The same items, made by a thread that is up to `ahead` of them ahead.

    What it raises is raised here; when this generator is closed, the thread ends, and `items` is closed by it.
    """
    ready: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(ahead)
    ended = threading.Event()

    def work() -> None:
        last: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    ready.put((item,))
                    if ended.is_set():
                        return
        except BaseException as error:
            last = error
        ready.put(last)

    thread = threading.Thread(target=work, name="picture-mover", daemon=True)
    thread.start()
    try:
        while (made := ready.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            yield made[0]
    finally:
        ended.set()
        while thread.is_alive():
            try:
                ready.get(timeout=0.01)  # room for what it still wants to put
            except queue.Empty:
                continue
        thread.join()
