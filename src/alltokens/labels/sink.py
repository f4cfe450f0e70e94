"""Where labels go from the device: a thread that waits for them and writes, so that the device never waits.

Shapes: B batch, k kept labels, h and w cells of a map.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from alltokens.core.label_maps import LabelMap
from alltokens.errors import Stopped
from alltokens.labels.files import write_aside
from alltokens.labels.labeller import TopLabels
from alltokens.labels.picture_batches import Batch
from alltokens.labels.writer import LabelWriter

FAILED_NAME = "failed.txt"
NOT_FINITE = "its scores are not finite numbers within float16"

_AHEAD = 8  # batches that may wait for the disk


class Landing:
    """Where labels come down: memory that stays in place, made once for so many batches of up to `rows` pictures.

    For each batch anew, the driver would be asked for it again and again, and hold up the device meanwhile.
    """

    def __init__(self, labels: TopLabels, rows: int, places: int) -> None:
        """As `labels` are, all others will be, but for their number."""
        needed = rows * sum(part[0].nbytes for part in labels)
        shape = (places, -(-needed // 16) * 16)  # numbers of four bytes begin at a multiple of four
        self._memory = torch.empty(shape, dtype=torch.uint8, pin_memory=labels.ids.is_cuda)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(places):
            self._free.put(place)

    def bring(self, labels: TopLabels) -> tuple[int, TopLabels]:
        """The place, to be given back, and the labels in it, as soon as the device is done with them."""
        place = self._free.get()
        parts = [part.reshape(-1).view(torch.uint8) for part in labels]
        whole = torch.cat(parts)
        there = self._memory[place, : len(whole)]
        there.copy_(whole, non_blocking=labels.ids.is_cuda)
        split = there.split([len(part) for part in parts])
        return place, TopLabels(
            *(some.view(part.dtype).view(part.shape) for some, part in zip(split, labels, strict=True))
        )

    def give_back(self, place: int) -> None:
        self._free.put(place)


class _Delivery(NamedTuple):
    batch: Batch
    readable: Sequence[int]
    labels: TopLabels | None
    place: int | None
    arrived: torch.cuda.Event | None


class Sink:
    """Takes batches of labels, writes them in their order; one shard for every `batches_per_shard` batches.

    `failed` says of each picture without a map why, once the sink is closed. As a context manager it writes all that
    it was given, also when it is stopped by a signal, but after any other exception no more than what is written.
    """

    def __init__(self, writer: LabelWriter, batches_per_shard: int, rows: int) -> None:
        """`rows`: what labels have at most, more than pictures perhaps."""
        self.failed: dict[str, str] = {}
        self._writer, self._batches_per_shard, self._rows = writer, batches_per_shard, rows
        self._landing: Landing | None = None
        self._shard = -1
        self._waiting: queue.Queue[_Delivery | None] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="label-writer", daemon=True)
        self._thread.start()

    def put(self, batch: Batch, readable: Sequence[int], labels: TopLabels | None) -> None:
        """Labels of a batch that were just asked for; returns before they are there."""
        if self._error is not None:
            raise self._error
        place = arrived = None
        if labels is not None:
            # Besides those that wait, one batch is being written and one put.
            self._landing = self._landing or Landing(labels, self._rows, _AHEAD + 2)
            device = labels.ids.device
            place, labels = self._landing.bring(labels)
            if device.type == "cuda":
                arrived = torch.cuda.Event(blocking=True)  # the thread that waits sleeps; pictures want its core
                arrived.record(torch.cuda.current_stream(device))
        # The pictures stay behind: their memory is wanted for the next ones.
        self._waiting.put(_Delivery(batch._replace(pictures=()), readable, labels, place, arrived))

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned = kind is not None and not issubclass(kind, Stopped)
        self._waiting.put(None)
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (delivery := self._waiting.get()) is not None:
            try:
                if self._error is None and not self._abandoned:  # or else emptied, so that nobody who fills it is stuck
                    self._write(delivery)
            except BaseException as error:  # raised again where batches are put
                self._error = error
            if self._landing is not None and delivery.place is not None:
                self._landing.give_back(delivery.place)

    def _write(self, delivery: _Delivery) -> None:
        batch, readable, labels, _, arrived = delivery
        shard = batch.job.number // self._batches_per_shard
        if shard != self._shard:
            self._writer.flush()
            self._shard = shard
        keys = batch.job.keys
        for key, problem in zip(keys, batch.problems, strict=True):
            if problem:
                self.failed[key] = problem.rpartition(f"{key}: ")[2]
        if labels is None:
            return
        if arrived is not None:
            arrived.synchronize()
        usable = [at for at in readable if bool(labels.usable[at])]
        self.failed |= {keys[at]: NOT_FINITE for at in set(readable).difference(usable)}
        if usable:
            some = slice(len(keys)) if len(usable) == len(keys) else usable
            maps = LabelMap(labels.ids[some], labels.scores[some], labels.tail[some])
            self._writer.append([keys[at] for at in usable], maps)


def write_failures(store: Path, failed: dict[str, str]) -> None:
    """`failed.txt`: a line for each picture without a map, its key and why; no file if there are none."""
    path = store / FAILED_NAME
    if not failed:
        path.unlink(missing_ok=True)
        return
    lines = [f"{_on_one_line(key)}\t{' '.join(reason.split())}\n" for key, reason in sorted(failed.items())]
    write_aside(path, ["".join(lines).encode("utf-8", "surrogateescape")])


def read_failures(store: str | Path) -> dict[str, str]:
    """The pictures that got no map when a store was made, and why."""
    path = Path(store) / FAILED_NAME
    if not path.is_file():
        return {}
    lines = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")[:-1]
    return {_as_it_was(key): reason for key, _, reason in (line.partition("\t") for line in lines)}


_ESCAPED = {"\\": "\\\\", "\n": "\\n", "\t": "\\t"}  # a file's name may hold any of these


def _on_one_line(key: str) -> str:
    return re.sub(r"[\\\n\t]", lambda sign: _ESCAPED[sign[0]], key)


def _as_it_was(key: str) -> str:
    plain = {spelled: sign for sign, spelled in _ESCAPED.items()}
    return re.sub(r"\\[\\nt]", lambda sign: plain[sign[0]], key)
