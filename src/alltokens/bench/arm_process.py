"""An arm in a process of its own: it does what its parent asks for, and in between nothing.

So the device is left to the one arm that is asked. What the allocator keeps between steps, a waiting arm gives back
where others may need it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from alltokens.bench.timing import Build, Step, allocated, measure, out_of_memory
from alltokens.data.loader import default_workers
from alltokens.engine.signals import end_with_parent, how_it_ended
from alltokens.errors import TrainingFailed, UserError

START = "spawn"  # a forked child cannot use a device that its parent has touched
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


class Warm(NamedTuple):
    own: int  # bytes that stay between steps
    between_steps: int  # that the allocator would keep besides


class ArmProcess:
    """The parent's side of a process."""

    def __init__(self, title: str, name: str, build: Build, device: torch.device, warmup: int) -> None:
        self.title, self.name = title, name
        self.warm: Warm | None = None
        context: Any = multiprocessing.get_context(START)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, build, device, warmup, torch.get_num_threads()))
        self.process.start()
        other.close()

    def ask(self, what: str, *arguments: object) -> None:
        with suppress(ConnectionError):  # it has died; listening to it will say so
            self.pipe.send((what, arguments))

    def answer(self) -> Any:
        try:
            error, what = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise TrainingFailed(f"{self.title}: {self.name}: {how_it_ended(self.process)}") from None
        if error is UserError:
            raise UserError(what)
        if error is not None:
            raise TrainingFailed(f"{self.title}: {self.name} failed\n{what}")
        return what

    def asked(self, what: str, *arguments: object) -> Any:
        self.ask(what, *arguments)
        return self.answer()


def end(arms: Sequence[ArmProcess]) -> None:
    """At once, whatever they do."""
    for arm in arms:
        arm.process.kill()
    for arm in arms:
        arm.process.join()
        arm.pipe.close()


class _Child:
    """The other side: what a process answers when it is asked."""

    def __init__(self, build: Build, device: torch.device, warmup: int) -> None:
        self.build, self.device, self.warmup = build, device, warmup
        self.step: Step | None = None
        self.cold = True  # the allocator holds nothing for the next step

    def warm_up(self) -> Warm:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.step is None:
            self.step = self.build()
        for _ in range(self.warmup):
            self.step()
        own = allocated(self.device)
        return Warm(own, self._free())

    def room(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def turn(self, steps: int, keep: bool) -> tuple[float, int]:
        assert self.step is not None
        for _ in range(2 if self.cold else 1):  # the one before was another process's
            self.step()
        self.cold = False
        outcome = measure(self.step, steps, self.device, time.perf_counter)
        if not keep:
            self._free()
        return outcome

    def _free(self) -> int:
        self.cold = True
        return free(self.device)


def _work(pipe: Connection, build: Build, device: torch.device, warmup: int, threads: int) -> None:
    end_with_parent()  # in the midst of compiling, too
    torch.set_num_threads(threads)
    child = _Child(build, device, warmup)
    with suppress(EOFError, ConnectionError):
        while True:
            what, arguments = pipe.recv()
            pipe.send(_answer(getattr(child, what), arguments, device))


def _answer(method: Callable[..., object], arguments: Sequence[object], device: torch.device) -> tuple[Any, object]:
    """(Kind of error or None, what came of it); where memory does not do, nothing, and what was taken is free again."""
    try:
        return None, method(*arguments)
    except UserError as error:
        return UserError, str(error)
    except Exception as error:
        if not out_of_memory(error):
            return RuntimeError, traceback.format_exc()
    free(device)
    return None, None


@contextmanager
def surroundings(busy: int) -> Iterator[None]:
    """What children are born into: their share of the cores to compile with, and interrupts left to the parent."""
    before = dict(os.environ)
    os.environ.setdefault(COMPILE_THREADS, str(default_workers(busy)))
    # What a child that is ended while it compiles leaves behind is cleared up, but not without words.
    silence = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before.get("PYTHONWARNINGS"), silence)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in (COMPILE_THREADS, "PYTHONWARNINGS"):
            if name not in before:
                del os.environ[name]
            else:
                os.environ[name] = before[name]


def free(device: torch.device) -> int:
    """Give back what the allocator keeps for later; how many bytes that was."""
    if device.type != "cuda":
        return 0
    gc.collect()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)
