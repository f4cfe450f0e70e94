"""Pictures in tar files: class folders inside tars, one tar per class, or WebDataset shards.

Shapes: N pictures.

The tars are scanned once, header by header; from then on a picture is a place in a file. A read opens the file, so
nothing is shared between forked workers or threads. Compressed tars cannot be read in any order and are refused.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alltokens.data.picture_source import PackedStrings, PictureSource, from_folders, sorted_classes
from alltokens.data.pictures import is_picture_name
from alltokens.errors import UserError

CLASS_NAMES_FILE = "classnames.txt"  # beside the shards, one name per line, as published WebDataset collections have it


MOST_LABEL_BYTES = 1_000_000  # of a .cls or .json member
DEEPEST = 8  # tars in tars


class Member(NamedTuple):
    """A file inside a tar: a picture at its place, or a label."""

    path: str
    offset: int | None  # in bytes; None for a label
    size: int = 0
    label: int | str | None = None


@dataclass(frozen=True, eq=False)
class TarMembers:
    """Reads a picture at its place in its tar."""

    tars: tuple[str, ...]
    tar: np.ndarray  # (N,) which of the tars
    offset: np.ndarray  # (N,) in bytes
    size: np.ndarray  # (N,) in bytes

    def __call__(self, index: int) -> bytes:
        with Path(self.tars[self.tar[index]]).open("rb", buffering=0) as file:
            file.seek(int(self.offset[index]))
            return file.read(int(self.size[index]))


def open_tars(
    root: Path, tars: Sequence[Path], known: Sequence[str] | None = None, labelled: bool = True
) -> PictureSource:
    """The pictures in `tars`, which lie in the folder `root` or are `root`; WebDataset shards if there are labels."""
    paths: list[str] = []  # the keys to be
    places: list[tuple[int, int, int]] = []
    found: dict[str, int | str | None] = {}  # key without extension -> what its .cls says, or else its .json
    for number, tar in enumerate(tars):
        prefix = "" if tar == root else f"{tar.stem}/"
        for member in _members(tar):
            key = prefix + member.path
            if member.offset is not None:
                paths.append(key)
                places.append((number, member.offset, member.size))
            elif key.endswith(".cls") or _stem(key) not in found:
                found[_stem(key)] = member.label
    place = np.array(places, dtype=np.int64).reshape(-1, 3)
    in_shards = any(_stem(key) in found for key in paths)
    if in_shards:
        # "x.seg.png" beside "x.jpg" and "x.cls" belongs to x; it is not the picture.
        main = [i for i, key in enumerate(paths) if _stem(key) in found or _first_stem(key) not in found]
        paths, place = [paths[i] for i in main], place[main]
    keys = PackedStrings(paths)
    read = TarMembers(tuple(map(str, tars)), place[:, 0], place[:, 1], place[:, 2])
    location = str(root)
    if not (in_shards and labelled):
        return from_folders(
            location, keys, [key.rpartition("/")[0] for key in keys], read, known=known, labelled=labelled
        )
    raw = [found.get(_stem(key)) for key in keys]
    names_file = (root if root.is_dir() else root.parent) / CLASS_NAMES_FILE
    names = names_file.read_text(encoding="utf-8").splitlines() if names_file.is_file() else None
    class_names, labels = _numbered(location, keys, raw, names)
    return PictureSource(location, class_names, labels, keys, read)


def _members(path: Path) -> Iterator[Member]:
    try:
        with tarfile.open(path, "r:") as tar:
            yield from _walk(tar, 0, path.stat().st_size, "")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError, UnicodeError) as error:
        raise UserError(f"{path} is not a whole, uncompressed tar: {str(error) or type(error).__name__}") from error


def _walk(tar: tarfile.TarFile, start: int, end: int, prefix: str, depth: int = 0) -> Iterator[Member]:
    """The pictures and labels of a tar that lies in the bytes `start` to `end` of its file; one inside is a folder."""
    while (info := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue] (a million headers would stay in memory)
        path = prefix + info.name.removeprefix("./")
        suffix = path.rpartition(".")[2].lower()
        if not info.isreg() or info.issparse():
            continue
        if info.size < 0 or start + info.offset_data + info.size > end:
            raise tarfile.ReadError(f"{path} would reach beyond the end")
        if is_picture_name(path):
            yield Member(path, start + info.offset_data, info.size)
        elif suffix in ("cls", "json"):
            if info.size > MOST_LABEL_BYTES:
                continue  # of something else than a label
            text = _extracted(tar, info).read().decode("utf-8", "replace")
            yield Member(path, None, label=_label(suffix, text))
        elif suffix == "tar":
            if depth == DEEPEST:
                raise tarfile.ReadError(f"{path} lies in more than {DEEPEST} other tars")
            inner_start = start + info.offset_data
            with tarfile.open(fileobj=_extracted(tar, info), mode="r:") as inner:
                yield from _walk(inner, inner_start, inner_start + info.size, f"{path[:-4]}/", depth + 1)


def _extracted(tar: tarfile.TarFile, info: tarfile.TarInfo) -> tarfile.ExFileObject:
    file = tar.extractfile(info)
    assert isinstance(file, tarfile.ExFileObject), "a regular member has content"
    return file


def _stem(key: str) -> str:
    return key.rpartition(".")[0]


def _first_stem(key: str) -> str:
    folder, slash, name = key.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _label(kind: str, text: str) -> int | str | None:
    """The content of a .cls member (a number or a name) or of a .json one (under "label"); None if that is neither."""
    value: object = text.strip()
    if kind == "json":
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return None
        value = content.get("label") if isinstance(content, dict) else None
    if isinstance(value, str) and value.lstrip("-").isdecimal():
        return int(value)
    return value if isinstance(value, int | str) and not isinstance(value, bool) and value != "" else None


def _numbered(
    location: str, keys: Sequence[str], raw: Sequence[int | str | None], names: Sequence[str] | None
) -> tuple[tuple[str, ...], np.ndarray]:
    """What the label members say -> class names, and labels that count in them."""
    if None in raw:
        key = keys[raw.index(None)]
        raise UserError(
            f"{location}: {key} has no label; expected {_stem(key)}.cls with a number or a name beside it, "
            f'or {_stem(key)}.json with {{"label": ...}}'
        )
    if all(isinstance(value, int) for value in raw):
        labels = np.array(raw, dtype=np.int64)
        return tuple(names or map(str, range(int(labels.max()) + 1))), labels
    spelled = list(map(str, raw))
    class_names = tuple(names or sorted_classes(spelled))
    index = {name: label for label, name in enumerate(class_names)}
    for key, value in zip(keys, spelled, strict=True):
        if value not in index:
            raise UserError(f"{location}: the class {value!r} of {key} is not in {CLASS_NAMES_FILE}")
    return class_names, np.array([index[value] for value in spelled], dtype=np.int64)
