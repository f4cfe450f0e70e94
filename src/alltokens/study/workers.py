"""Processes that train side by side on one device.

The parent hands out runs and writes rows; a process that dies is a failed run, and is replaced. When the parent dies,
however that happens, they all end at once: the next call goes on with their runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from alltokens.engine.signals import end_with_parent, how_it_ended
from alltokens.errors import TrainingStopped
from alltokens.study.queue import Queue
from alltokens.study.results import Result
from alltokens.study.training import Job, failed, train_job


def side_by_side(
    queue: Queue,
    count: int,
    finished: Callable[[Job, Result], None],
    deadline: float | None,
    grace: float,
) -> None:
    """Run the queue empty, or up to the deadline and `grace` seconds more, then end what still runs."""
    from alltokens.study.run import decoded_pictures

    context = processes.get_context("spawn")  # a forked child cannot use a device that its parent has touched
    # Threads of one process would only take the cores of another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    scratch = tempfile.TemporaryDirectory(prefix="alltokens-study-")
    pictures = str(Path(scratch.name) / "pictures")  # a file, not shared memory, of which a container may have little
    workers = [_Worker(context) for _ in range(count)]  # they import while pictures are decoded here
    try:
        torch.save(decoded_pictures(queue.jobs), pictures)
        for worker in workers:
            worker.send(pictures)
            worker.give(queue)
        while busy := [worker for worker in workers if worker.job is not None]:
            left = None if deadline is None else deadline + grace - time.monotonic()
            if left is not None and left <= 0:
                break
            ready = wait([worker.pipe for worker in busy], left)
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                job = worker.job
                assert job is not None
                try:
                    result: Result | None = worker.pipe.recv()
                except (EOFError, ConnectionError):
                    result = worker.fate(job)
                queue.ended(job, result is not None)
                if result is not None:
                    finished(job, result)
                if not worker.process.is_alive() and queue.jobs:
                    worker.start(context)
                    worker.send(pictures)
                worker.give(queue)
    finally:
        for worker in workers:
            worker.end()
        scratch.cleanup()


class _Worker:
    """The parent's side of one process."""

    def __init__(self, context: Any) -> None:
        self.job: Job | None = None
        self.last: Job | None = None
        self.start(context)

    def start(self, context: Any) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=False)
        self.process.start()
        other.close()

    def send(self, what: object) -> None:
        with suppress(ConnectionError):  # it has died; reading from it will say so
            self.pipe.send(what)

    def give(self, queue: Queue) -> None:
        """The next run, or none: then the process ends."""
        self.job = queue.take(self.last) if self.process.is_alive() else None
        self.last = self.job or self.last
        left = None if queue.deadline is None else queue.deadline - time.monotonic()
        self.send(None if self.job is None else (self.job, left))

    def fate(self, job: Job) -> Result:
        return failed(job, how_it_ended(self.process))

    def end(self) -> None:
        if self.job is None:  # it was told to leave
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection) -> None:
    """One process: pictures first, then runs until there is none."""
    from alltokens.engine.runs import Kept

    end_with_parent()  # a run that went on would have nobody to write its row, and be in the way of the next call
    torch.set_num_threads(1)
    try:
        # Written by the parent a moment ago; it holds our own classes, so it is read as what it is.
        kept = Kept(pictures=torch.load(pipe.recv(), mmap=True, weights_only=False))
        while (given := pipe.recv()) is not None:
            job, left = given
            pipe.send(train_job(job, kept, None if left is None else time.monotonic() + left))
    except (EOFError, BrokenPipeError, KeyboardInterrupt, TrainingStopped):
        sys.exit(1)  # the parent is gone, or both were interrupted
