"""What a store holds, in a JSON file that a person can read.

The file has exactly one spelling and states its own SHA-256, so that no byte of it can change unseen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from alltokens.errors import UserError
from alltokens.labels.files import FORMAT_VERSION, INDEX_NAME, FileRecord, damaged, write_aside
from alltokens.labels.layout import Form, RowLayout

MANIFEST_NAME = "manifest.json"
UNFINISHED_NAME = "unfinished.json"  # the description alone, while the store is being written

_KIND = "alltokens label maps"
_NO_INDEX = FileRecord(INDEX_NAME, 0, 0, "")
_SHARD_NAME = re.compile(r"maps-\d{4,}-\d{5,}\.bin")


@dataclass(frozen=True)
class Description:
    """What is the same for all maps of a store, known before the first of them."""

    grid: tuple[int, int]  # (h, w) cells of a map
    kept: int  # class ids and scores per cell
    num_classes: int
    tail: bool = True  # whether the log-sum-exp of the classes that are not kept is there
    form: Form = "plain"
    class_names: tuple[str, ...] = ()
    annotator: str = ""  # the model's name, or where the maps come from
    annotator_hash: str = ""  # SHA-256 of its weights
    transform: Mapping[str, Any] = field(default_factory=dict)  # how the annotator saw the pictures; numbers and text

    def __post_init__(self) -> None:
        _ = self.layout  # which checks its part
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class names for {self.num_classes} classes")

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.grid, self.kept, self.num_classes, self.tail, self.form)


@dataclass(frozen=True)
class Manifest(Description):
    """A finished store's description, and what its files must be."""

    count: int = 0  # pictures
    score_error: float = 0.0  # no score or tail is further from what the annotator gave than this
    shards: tuple[FileRecord, ...] = ()
    index: FileRecord = _NO_INDEX
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [shard.name for shard in self.shards]
        # Names out of a file that one was given: they must not lead out of the store's folder.
        if self.index.name != INDEX_NAME or not all(_SHARD_NAME.fullmatch(name) for name in names):
            raise UserError(f"its files must be called {INDEX_NAME} and maps-0000-00000.bin")
        if len(set(names)) != len(names) or sum(shard.count for shard in self.shards) != self.count:
            raise UserError(f"its shards do not add up to {self.count} pictures")


def shard_name(rank: int, number: int) -> str:
    return f"maps-{rank:04d}-{number:05d}.bin"


def is_shard_name(name: str) -> bool:
    return _SHARD_NAME.fullmatch(name) is not None


def write_description(path: Path, description: Description) -> None:
    write_aside(path, [_text(description)])


def read_description(path: Path) -> Description:
    return _read(path, Description)


def read_manifest(path: Path) -> Manifest:
    return _read(path, Manifest)


def _text(description: Description) -> bytes:
    content = {"kind": _KIND, "version": FORMAT_VERSION, **dataclasses.asdict(description)}
    return _spelled(content | {"sha256": _checksum(content)})


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        text = path.read_bytes()
        content = json.loads(text)
        stated = content.pop("sha256", None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise damaged(path, "it is no JSON of a label store") from None
    if content.get("kind") == _KIND and content.get("version") not in (None, FORMAT_VERSION):
        raise UserError(
            f"{path} has format version {content['version']!r}; this alltokens reads version {FORMAT_VERSION}: "
            "install a version of alltokens that fits, or make the labels again"
        )
    if stated != _checksum(content) or text != _spelled(content | {"sha256": stated}):
        raise damaged(path, "its content is not what was written (SHA-256)")
    try:
        assert content.pop("kind") == _KIND
        return _built(kind, content)
    except (TypeError, KeyError, AssertionError, AttributeError, UserError) as error:
        raise damaged(path, str(error) or "it describes no label store") from None


def _built(kind: type[Any], content: dict[str, Any]) -> Any:
    if kind is Description:
        del content["version"]
    else:
        content["shards"] = tuple(_record(shard) for shard in content["shards"])
        content["index"] = _record(content["index"])
    names = {item.name for item in dataclasses.fields(kind)}
    assert set(content) == names, f"expected the entries {sorted(names)}, found {sorted(content)}"
    grid = content["grid"]
    counts = [*grid, content["kept"], content["num_classes"], content.get("count", 0)]
    assert len(grid) == 2, "a grid has two sides"
    assert all(type(count) is int and count >= 0 for count in counts), "its sizes must be whole numbers"
    assert type(content["tail"]) is bool and isinstance(content["transform"], dict), (
        "tail or transform is no such thing"
    )
    read: dict[str, Any] = content | {"grid": tuple(grid), "class_names": tuple(content["class_names"])}
    return kind(**read)


def _record(content: dict[str, Any]) -> FileRecord:
    record = FileRecord(**content)
    assert isinstance(record.name, str) and isinstance(record.sha256, str), "a file's name and checksum are text"
    assert type(record.count) is int and type(record.bytes) is int, "a file's sizes are whole numbers"
    assert record.count >= 0 and record.bytes >= 0, "a file's sizes are not negative"
    return cast(FileRecord, record)


def _spelled(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_spelled(content)).hexdigest()
