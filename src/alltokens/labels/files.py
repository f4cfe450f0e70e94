"""The one form of a store's binary files: a header, blocks of numbers, and the SHA-256 of all that.

Shapes: N pictures of a shard or of a store, R bytes of a row.

A shard holds rows (N, R), the end of each key (N,) and the bytes of all keys; an index holds sorted hashes (N,) and the
places they belong to (N,). Files are written aside and renamed, so under its name a file is whole or not there. They
are mapped into memory; sizes are held against the file's before anything is mapped. Nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from alltokens.errors import UserError

FORMAT_VERSION = 1
INDEX_NAME = "index.bin"

_MAGIC = b"ATLABELS"
_SHARD, _INDEX = 1, 2
_HEADER = struct.Struct("<8sIIQQQd16x")  # magic, version, kind, N, R, bytes of the keys, greatest error of a score
_DIGEST = hashlib.sha256().digest_size
_LONGEST = 2**63  # what a header may claim, beyond any file


class Shard(NamedTuple):
    """A shard, mapped into memory."""

    rows: np.ndarray  # (N, R) uint8
    key_ends: np.ndarray  # (N,) uint32, in bytes
    key_bytes: np.ndarray  # (all of them,) uint8
    score_error: float  # no score of these pictures is further off than this
    digest: str  # as the file states it; `check_digest` looks

    def key(self, row: int) -> bytes:
        start = int(self.key_ends[row - 1]) if row else 0
        return self.key_bytes[start : int(self.key_ends[row])].tobytes()

    def keys(self) -> Iterator[str]:
        whole, start = self.key_bytes.tobytes(), 0
        for end in self.key_ends.tolist():
            yield decode_key(whole[start:end])
            start = end


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about a file."""

    name: str
    count: int  # pictures
    bytes: int
    sha256: str


def encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}; restore it from a copy, or make the labels again")


def write_shard(path: Path, rows: np.ndarray, keys: Iterable[bytes], score_error: float) -> None:
    keys = list(keys)
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    assert len(keys) == len(rows) > 0
    assert ends[-1] < 2**32, "a shard's keys are far below 4 GB"
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, _SHARD, len(rows), rows.shape[1], int(ends[-1]), score_error)
    write_aside(path, [header, np.ascontiguousarray(rows), ends.astype("<u4"), b"".join(keys)], digest=True)


def write_index(path: Path, hashes: np.ndarray, places: np.ndarray) -> None:
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, _INDEX, len(hashes), 0, 0, 0.0)
    write_aside(path, [header, hashes.astype("<u8"), places.astype("<u4")], digest=True)


def map_shard(path: Path, row_bytes: int) -> Shard:
    content, (count, width, key_size, error) = _mapped(path, _SHARD)
    if width != row_bytes:
        raise damaged(path, f"its rows have {width} bytes, those of this store {row_bytes}")
    _check_size(path, content, count * (width + 4) + key_size)
    rows_end = _HEADER.size + count * width
    ends = content[rows_end : rows_end + 4 * count].view("<u4")
    key_bytes = content[rows_end + 4 * count : -_DIGEST]
    if count == 0 or ends[-1] != key_size:
        raise damaged(path, "its keys do not add up")
    rows = content[_HEADER.size : rows_end].reshape(count, width)
    return Shard(rows, ends, key_bytes, error, content[-_DIGEST:].tobytes().hex())


def map_index(path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (N,) uint64, rising, and places (N,) uint32."""
    content, (there, *_) = _mapped(path, _INDEX)
    if there != count:
        raise damaged(path, f"it lists {there} pictures, the manifest {count}")
    _check_size(path, content, count * 12)
    middle = _HEADER.size + 8 * count
    return content[_HEADER.size : middle].view("<u8"), content[middle:-_DIGEST].view("<u4")


def record(path: Path, count: int) -> FileRecord:
    """What to say about a file that was written whole; its digest is the one that it ends with."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(-_DIGEST, os.SEEK_END)
        return FileRecord(path.name, count, size, file.read().hex())


def check_record(path: Path, expected: FileRecord) -> None:
    """Whether the file is there in its full length; cheap."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path} is missing; restore it from a copy, or make the labels again") from None
    if size != expected.bytes:
        kind = "cut off" if size < expected.bytes else "too long"
        raise damaged(path, f"it is {kind}, {size:,} bytes instead of {expected.bytes:,}")


def check_digest(path: Path, expected: FileRecord) -> None:
    """Whether every byte of the file is as it was written; reads all of it."""
    check_record(path, expected)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = expected.bytes - _DIGEST
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
        stated = file.read()
    if digest.digest() != stated or digest.hexdigest() != expected.sha256:
        raise damaged(path, "its content is not what was written (SHA-256)")


def write_aside(path: Path, blocks: Iterable[bytes | np.ndarray], digest: bool = False) -> None:
    """Write beside `path`, flush to the disk, rename; with `digest`, the SHA-256 of everything comes last."""
    aside = path.with_name(f".{path.name}.tmp")
    total = hashlib.sha256()
    try:
        with aside.open("wb") as file:
            for block in blocks:
                data = memoryview(block).cast("B") if len(block) else b""  # pyright: ignore[reportArgumentType]
                total.update(data)
                file.write(data)
            if digest:
                file.write(total.digest())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):  # what went wrong is said above
            aside.unlink(missing_ok=True)


def _mapped(path: Path, kind: int) -> tuple[np.ndarray, tuple[int, int, int, float]]:
    """A file's bytes and the numbers in its header; magic, version and kind are right."""
    try:
        size = path.stat().st_size
        if size < _HEADER.size + _DIGEST:
            raise damaged(path, f"it has only {size} bytes")
        # Not np.memmap, which keeps a file descriptor open for each shard.
        content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    except FileNotFoundError:
        raise UserError(f"{path} is missing; restore it from a copy, or make the labels again") from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    content.flags.writeable = False
    magic, version, there, *numbers = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise UserError(f"{path} is no file of a label store (or its first bytes are damaged)")
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}; this alltokens reads version {FORMAT_VERSION}")
    if there != kind:
        raise damaged(path, "it is another kind of file than its name says")
    if max(numbers[:3]) >= _LONGEST:
        raise damaged(path, "its header claims more than any file can hold")
    return content, tuple(numbers)


def _check_size(path: Path, content: np.ndarray, body: int) -> None:
    if len(content) != _HEADER.size + body + _DIGEST:
        expected = _HEADER.size + body + _DIGEST
        raise damaged(path, f"its header promises {expected:,} bytes, there are {len(content):,}")
