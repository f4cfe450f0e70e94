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
_BOAT = 8 << 20  # bytes


def on_device(batches: Generator[Batch], device: torch.device, rows: int) -> Generator[Batch]:
    """The batches with their pictures (B, 3, S, S) on the device.

    For a GPU a thread of its own takes them out of the readers' memory and sends them, so that whoever labels does
    nothing but that. There a batch always has `rows` rows, those after its pictures black: for a number that it has not
    seen, the GPU's libraries would choose, load and prepare the kernels of every layer anew.
    """
    with closing(batches):
        if device.type != "cuda":
            for batch in batches:
                yield batch._replace(pictures=tuple(part.permute(0, 3, 1, 2) for part in batch.pictures))
            return
        with closing(in_background(_sent(batches, device, rows), _AHEAD)) as there:
            for batch, arrived in there:
                labelling = torch.cuda.current_stream(device)
                labelling.wait_event(arrived)
                for part in batch.pictures:
                    part.record_stream(labelling)
                yield batch


class _Arriving(NamedTuple):
    batch: Batch
    arrived: torch.cuda.Event


def _sent(batches: Iterator[Batch], device: torch.device, rows: int) -> Generator[_Arriving]:
    """Each batch on a stream of its own; it has arrived when its event has happened."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        ferry = _Ferry(stream, device)
        for batch in batches:
            with torch.cuda.stream(stream):
                pictures = tuple(ferry(part, rows).permute(0, 3, 1, 2) for part in batch.pictures)
                arrived = torch.cuda.Event()
                arrived.record(stream)
            yield _Arriving(batch._replace(pictures=pictures), arrived)


class _Ferry:
    """Brings bytes to the device through memory that stays in place; one boat is filled while the other travels.

    Such memory is slow to come by, on virtual machines above all: there is little of it, and it is made once.
    """

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._boats = torch.empty((2, _BOAT), dtype=torch.uint8, pin_memory=True)
        self._landed = [torch.cuda.Event(blocking=True) for _ in self._boats]  # whoever waits sleeps, cores are busy
        self._turn = 0

    def __call__(self, part: Tensor, rows: int) -> Tensor:
        """(B, S, S, 3) -> (rows, S, S, 3), nothing but zeros after the first B."""
        there = torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=self._device)
        shore, cargo = there.view(-1), part.reshape(-1)
        for start in range(0, len(cargo), _BOAT):
            load = cargo[start : start + _BOAT]
            boat, landed = self._boats[self._turn, : len(load)], self._landed[self._turn]
            landed.synchronize()  # or these bytes would be laid over those that still travel
            np.copyto(boat.numpy(), load.numpy())  # one thread, and others run; torch would call all the busy cores
            shore[start : start + len(load)].copy_(boat, non_blocking=True)
            landed.record(self._stream)
            self._turn = 1 - self._turn
        shore[len(cargo) :].zero_()
        return there


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
