"""Making a store, so that it can be killed at any moment and taken up again.

Shapes: B pictures at a time, k kept labels, h and w cells of a map.

Each process writes its own shards, of which one is either whole under its name or not there at all. What lies in whole
shards is done; a process that is started again does the rest, in the same order, and so writes the same bytes.
`finish_store` makes the index and last of all the manifest; until then the folder is no store that can be opened.
"""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels.files import INDEX_NAME, Shard, encode_key, map_shard, record, write_index, write_shard
from alltokens.labels.keys import KeyIndex, sort_index
from alltokens.labels.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Description,
    Manifest,
    is_shard_name,
    read_description,
    shard_name,
    write_description,
)
from alltokens.labels.store import LabelStore

SHARD_SIZE = 1024  # pictures; a kill costs at most so many, and a shard of 7 MB is written at one go


class LabelWriter:
    """Writes the maps of one process's pictures; `remaining` says which are still to do.

    As a context manager it writes what is left at the end, but not after an exception: what was not yet in a shard
    is then done again, and the bytes do not depend on where it stopped.
    """

    def __init__(
        self, path: str | Path, description: Description, *, rank: int = 0, shard_size: int = SHARD_SIZE
    ) -> None:
        """`rank` of the process among those that write the same store; every one with the same description."""
        if shard_size < 1 or rank < 0:
            raise UserError(f"rank must be 0 or more and shard_size 1 or more, got {rank} and {shard_size}")
        self.path, self.description = Path(path), description
        self._layout, self._rank, self._shard_size = description.layout, rank, shard_size
        self._lock = _begin(self.path, description, rank)
        _sweep(self.path, f".{shard_name(rank, 0)[:-9]}*.tmp")
        shards = _whole_shards(self.path, description)
        self._done = KeyIndex(list(shards.values()), *sort_index(list(shards.values())))
        self._number = len([name for name in shards if name.startswith(shard_name(rank, 0)[:-9])])
        self._added: set[str] = set()
        self._keys: list[bytes] = []  # of the shard to be
        self._rows: list[np.ndarray] = []
        self._errors: list[float] = []

    def __len__(self) -> int:
        """Pictures done by all processes before this one began, and added by this one."""
        return len(self._done) + len(self._added)

    def __contains__(self, key: str) -> bool:
        return key in self._added or bool(self._done.find([key])[0] >= 0)

    def done(self) -> Iterator[str]:
        """The keys whose maps lay in whole shards when this writer was made."""
        return self._done.keys()

    def were_done(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key's map lay in a whole shard when this writer was made."""
        return (self._done.find(keys) >= 0).tolist()

    def remaining(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that have no map yet, in their order."""
        keys = list(keys)
        return [key for key, done in zip(keys, self.were_done(keys), strict=True) if not (done or key in self._added)]

    def append(self, keys: Sequence[str], maps: LabelMap) -> None:
        """Add the maps (B, k, h, w) of B pictures. All are added, or none."""
        if len(keys) != len(maps.ids):
            raise UserError(f"{len(keys)} keys for {len(maps.ids)} label maps")
        if "" in keys or len(set(keys)) < len(keys):
            raise UserError(
                "every label map wants a key of its own that is not empty; a picture came twice, or no name"
            )
        if there := set(keys).difference(self.remaining(keys)):
            raise UserError(f"{self.path} has the map of {min(there)!r} already; annotate only what `remaining` gives")
        rows, errors = self._layout.encode(maps)
        self._added.update(keys)
        self._keys += [encode_key(key) for key in keys]
        self._rows += list(rows)
        self._errors += errors.tolist()
        while len(self._keys) >= self._shard_size:
            self._write_shard()

    def flush(self) -> None:
        """Write what is left as a shard of its own, so that where shards end does not depend on what was added."""
        if self._keys:
            self._write_shard()

    def close(self) -> None:
        """Write what is left. The store is finished by `finish_store`, once all processes are here."""
        self.flush()
        self._lock.close()

    def finish(self) -> LabelStore:
        """Close, and finish the store; for the only process, or the last one."""
        self.close()
        return finish_store(self.path)

    def __enter__(self) -> LabelWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._lock.closed:
            self.close()
        self._lock.close()

    def _write_shard(self) -> None:
        size = min(self._shard_size, len(self._keys))
        path = self.path / shard_name(self._rank, self._number)
        write_shard(path, np.stack(self._rows[:size]), self._keys[:size], max(self._errors[:size]))
        self._number += 1
        del self._keys[:size], self._rows[:size], self._errors[:size]


def finish_store(path: str | Path, expected: int | None = None) -> LabelStore:
    """Make a folder of whole shards a store: index first, manifest last. May be repeated.

    `expected` is how many pictures there must be; fewer or more is an error.
    """
    path = Path(path)
    if (path / MANIFEST_NAME).exists():
        _sweep(path, UNFINISHED_NAME, ".*.tmp", ".lock-*")
        return LabelStore.open(path)
    if not (path / UNFINISHED_NAME).is_file():
        raise UserError(f"{path} holds no label maps to finish")
    description = read_description(path / UNFINISHED_NAME)
    shards = _whole_shards(path, description)
    count = sum(len(shard.rows) for shard in shards.values())
    if expected is not None and count != expected:
        raise UserError(f"{path} has the label maps of {count:,} pictures, expected {expected:,}; annotate the rest")
    write_index(path / INDEX_NAME, *sort_index(list(shards.values())))
    manifest = Manifest(
        **{item.name: getattr(description, item.name) for item in dataclasses.fields(description)},
        count=count,
        score_error=max((shard.score_error for shard in shards.values()), default=0.0),
        shards=tuple(record(path / name, len(shard.rows)) for name, shard in shards.items()),
        index=record(path / INDEX_NAME, count),
    )
    write_description(path / MANIFEST_NAME, manifest)
    _sweep(path, UNFINISHED_NAME, ".*.tmp", ".lock-*")
    return LabelStore.open(path)


def _begin(path: Path, description: Description, rank: int) -> IO[str]:
    """Make the folder, or see that it was begun alike. The lock that comes back goes with the process."""
    if (path / MANIFEST_NAME).exists():
        raise UserError(f"{path} is a finished label store; choose another folder, or remove it first")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / f".lock-{rank:04d}").open("w")
    except OSError as error:
        raise UserError(f"cannot write label maps to {path}: {error.strerror}") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UserError(f"another process writes the shards of rank {rank} of {path}") from None
    begun = path / UNFINISHED_NAME
    if not begun.exists():
        if others := sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")):
            lock.close()
            _sweep(path, ".lock-*")
            raise UserError(f"{path} holds other things, such as {others[0]}; label maps want a folder of their own")
        write_description(begun, description)
        return lock
    changed = differences(read_description(begun), description)
    if changed:
        lock.close()
        raise UserError(f"{path} was begun with {changed}. Use the same settings, or another folder")
    return lock


def differences(there: Description, now: Description) -> str:
    """What two descriptions say differently; empty if nothing."""
    before, after = _facts(there), _facts(now)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "; ".join(f"{name} {_short(before.get(name))}, now {_short(after.get(name))}" for name in names)


def _facts(described: Description) -> dict[str, Any]:
    """Every field, with those of the transform each for itself."""
    facts = {item.name: getattr(described, item.name) for item in dataclasses.fields(Description)}
    return facts | {f"transform.{name}": value for name, value in facts.pop("transform").items()}


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 80 else f"{text[:77]}..."


def _whole_shards(path: Path, description: Description) -> dict[str, Shard]:
    names = sorted(entry.name for entry in path.iterdir() if is_shard_name(entry.name))
    return {name: map_shard(path / name, description.layout.row_bytes) for name in names}


def _sweep(path: Path, *patterns: str) -> None:
    """Remove what a killed process left behind."""
    for pattern in patterns:
        for left in path.glob(pattern):
            with suppress(OSError):
                left.unlink()
