"""Moments at which a process can be killed, counted so that each can be met again.

A moment is a point before or after something lasting: an update, a write (its first half is on the disk, its second is
not), a flush, a rename, a removal. A process counts its moments; at the fatal one it kills itself with SIGKILL.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Moments:
    """`install()` once in a process of its own: what it changes is not put back."""

    def __init__(self, below: Path, fatal: int) -> None:
        self.below, self.fatal = str(below), fatal
        self.count = 0
        self._inside = threading.local()

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        opened, flushed = io.open, os.fsync

        def torn_open(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = opened(path, mode, *args, **options)
            return _Torn(file, self) if self._ours(path) and set(mode) & set("wax+") else file

        def fsync(descriptor: int) -> None:
            self()
            flushed(descriptor)
            self()

        io.open = torn_open  # what Path.open calls
        Path.open = lambda path, mode="r", *args, **options: torn_open(path, mode, *args, **options)  # type: ignore[method-assign]
        os.fsync = fsync
        sys.addaudithook(self._audit)

    def around(self, owner: Any, name: str) -> None:
        """Moments before and after each call of a method."""
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            self()
            result = original(*args, **options)
            self()
            return result

        setattr(owner, name, counted)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.truncate", "os.mkdir") and self._ours(arguments[0]):
            self()

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(self.below)


class _Torn:
    """A file whose writes happen in halves."""

    def __init__(self, file: Any, moment: Moments) -> None:
        self._file, self._moment = file, moment

    def write(self, data: Any) -> int:
        whole = data if isinstance(data, str) else memoryview(data).cast("B")
        self._moment()
        self._file.write(whole[: len(whole) // 2])
        self._file.flush()
        self._moment()
        self._file.write(whole[len(whole) // 2 :])
        self._file.flush()
        self._moment()
        return len(whole)

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
