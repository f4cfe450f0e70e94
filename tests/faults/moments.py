"""Moments at which something can befall a process, counted so that each can be met again.

A moment is a point before or after something lasting: an update, a write (its first half is on the disk, its second is
not), a flush, a rename, a removal. A process counts its moments; at the fatal one it kills itself with SIGKILL, or from
then on the disk is full, or may no longer be written, or the folder is gone.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Fault = Literal["kill", "full", "denied", "gone"]


class Moments:
    """`install()` once in a process of its own: what it changes is not put back."""

    def __init__(self, below: Path, fatal: int, fault: Fault = "kill") -> None:
        self.below, self.fatal, self.fault = str(below), fatal, fault
        self.count = 0
        self._removing = False

    def __call__(self, kind: str = "") -> None:
        if self._removing:
            return
        self.count += 1
        if self.count == self.fatal and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.fatal and self.fault == "gone":
            self._removing = True
            shutil.rmtree(self.below)
            self._removing = False
        if self.fatal and self.count >= self.fatal:
            if self.fault == "full" and kind in ("write", "make"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.fault == "denied" and kind in ("open", "rename", "make"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def install(self) -> None:
        opened, flushed = io.open, os.fsync

        def torn_open(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not (self._ours(path) and set(mode) & set("wax+")):
                return opened(path, mode, *args, **options)
            self("open")
            return _Torn(opened(path, mode, *args, **options), self)

        def fsync(descriptor: int) -> None:
            self("write")
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
        if event in _LASTING and self._ours(arguments[0]):
            self(_LASTING[event])

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(self.below)


_LASTING = {"os.rename": "rename", "os.remove": "remove", "os.truncate": "cut", "os.mkdir": "make"}


class _Torn:
    """A file whose writes happen in halves."""

    def __init__(self, file: Any, moment: Moments) -> None:
        self._file, self._moment = file, moment

    def write(self, data: Any) -> int:
        whole = data if isinstance(data, str) else memoryview(data).cast("B")
        self._moment()
        self._file.write(whole[: len(whole) // 2])
        self._file.flush()
        self._moment("write")
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
