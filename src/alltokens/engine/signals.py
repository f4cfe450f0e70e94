"""SIGTERM and SIGINT as a request: the trainer looks after every update, saves, and stops. And the end of a parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, NoReturn

from alltokens.errors import Stopped


class StopRequest:
    """`received` is the signal's number once one came, else 0. A second one has its usual effect at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._before.get(number, signal.SIG_DFL))


@contextmanager
def stopping(go_on: str) -> Iterator[None]:
    """SIGTERM as an error, for work that has nothing to save but something to clear up."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number, go_on)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """This process, which another one started, ends at once when that one does, however it ends: by a kill, too."""
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def how_it_ended(process: BaseProcess) -> str:
    """Of a process whose end of a pipe was closed: its last words are missing."""
    process.join(10)
    code = process.exitcode
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return f"its process ended {how}"
