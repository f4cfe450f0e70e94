"""What a collection of pictures is: names, labels, keys, and how to read one.

Shapes: N pictures.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from PIL import Image
from timm.utils.misc import natural_key

from alltokens.data.pictures import EXTENSIONS
from alltokens.errors import UserError


class PackedStrings(Sequence[str]):
    """Strings in two arrays: a million keys cost their bytes, and forked workers share them instead of copying."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = range(len(self))[index]
        return self._bytes[self._ends[index] : self._ends[index + 1]].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False)
class PictureSource:
    """N pictures: where they are (for messages), the names of the classes, a label and a key each, and how to read one.

    A key is the picture's path under the root, with extension and "/" between the parts; label stores are looked up
    by it. `read(i)` gives the encoded bytes, or a PIL picture, to several threads at a time. Without class names every
    label is -1.
    """

    location: str
    class_names: tuple[str, ...]
    labels: np.ndarray  # (N,) int64
    keys: Sequence[str]  # N
    read: Callable[[int], bytes | Image.Image]

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.keys):
            raise UserError(f"{self.location}: {len(self.labels)} labels for {len(self.keys)} pictures")
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.class_names)))
        if self.class_names and wrong.size:
            raise UserError(
                f"{self.location}: {self.keys[int(wrong[0])]} has the label {self.labels[wrong[0]]}, but there are "
                f"{len(self.class_names)} classes (0 to {len(self.class_names) - 1}); "
                f"{len(wrong)} picture(s) are labelled beyond them"
            )

    def __len__(self) -> int:
        return len(self.labels)


def with_class_names(source: PictureSource, class_names: Sequence[str]) -> PictureSource:
    """The same pictures with labels that count in `class_names`, matched by name."""
    index = {name: label for label, name in enumerate(class_names)}
    used = [source.class_names[label] for label in np.unique(source.labels)]
    if missing := [name for name in used if name not in index]:
        near = difflib.get_close_matches(missing[0], list(index), n=1, cutoff=0.6)
        raise UserError(
            f"{source.location}: the class {missing[0]!r} is not among the {len(index)} classes of the training "
            f"pictures.{f' Nearest: {near[0]!r}.' if near else ''} {len(missing)} class(es) are unknown; "
            f"both sets must name their classes alike"
        )
    new_label = np.array([index.get(name, -1) for name in source.class_names], dtype=np.int64)
    return dataclasses.replace(source, class_names=tuple(class_names), labels=new_label[source.labels])


def usable(source: PictureSource, allow_empty_classes: bool) -> PictureSource:
    """The source itself, if a classifier can be trained on it: two classes or more, each with a picture."""
    if not source.class_names:
        return source
    counts = np.bincount(source.labels, minlength=len(source.class_names))
    empty = [name for name, count in zip(source.class_names, counts, strict=True) if count == 0]
    if empty and not allow_empty_classes:
        raise UserError(
            f"{source.location}: {len(empty)} class(es) have no picture: {', '.join(empty[:5])}"
            f"{', ...' if len(empty) > 5 else ''} (looked for {', '.join(EXTENSIONS)}); "
            f"fill or remove them, or set data.allow_empty_classes"
        )
    if len(source.class_names) == 1:
        raise UserError(f"{source.location}: only one class, {source.class_names[0]!r}; a classifier needs two or more")
    return source


def sorted_classes(names: Iterable[str]) -> list[str]:
    """Natural order as in timm ("2" before "10"), and by spelling where that says equal ("a1", "A1", "a01")."""
    return sorted(set(names), key=lambda name: (natural_key(name), name))


def name_classes(folders: Iterable[str], known: Sequence[str] | None = None) -> dict[str, str]:
    """Folder path below the root -> class name: the last part of the path if that tells all folders apart.

    Where the names are known already (of the training pictures), whole paths are used if all of them are known.
    """
    folders = sorted(set(folders))
    leaves = [PurePosixPath(folder).name for folder in folders]
    whole = set(folders) <= set(known) if known else len(set(leaves)) < len(leaves)
    return {folder: folder if whole else leaf for folder, leaf in zip(folders, leaves, strict=True)}


def from_folders(
    location: str,
    keys: Sequence[str],
    folders: Sequence[str],
    read: Callable[[int], bytes | Image.Image],
    *,
    empty_folders: Iterable[str] = (),
    known: Sequence[str] | None = None,
    labelled: bool = True,
) -> PictureSource:
    """A source whose classes are folders: one folder per key ("" for none)."""
    if not keys:
        raise UserError(f"no pictures in {location}; looked for {', '.join(EXTENSIONS)}")
    loose = [key for key, folder in zip(keys, folders, strict=True) if folder == ""]
    if loose and labelled:
        raise UserError(
            f"{location}: {len(loose)} picture(s) such as {loose[0]} lie in no class folder; "
            f"expected CLASS/PICTURE, with a folder for each class"
        )
    # Known names make an empty folder as good as a missing one.
    names = name_classes([*folders, *(() if known else empty_folders)], known)
    classes = sorted_classes(names.values())
    label = {name: index for index, name in enumerate(classes)}
    labels = np.array([label[names[folder]] for folder in folders], dtype=np.int64)
    return PictureSource(location, tuple(classes), labels, keys, read)


def some_of(source: PictureSource, count: int) -> PictureSource:
    """`count` pictures of all classes alike: every k-th of a fixed shuffle."""
    if count > len(source):
        raise UserError(f"{count} pictures wanted, {source.location} has {len(source)}")
    chosen = np.sort(np.random.default_rng(0).permutation(len(source))[:count])
    return dataclasses.replace(
        source,
        labels=source.labels[chosen],
        keys=PackedStrings(source.keys[int(i)] for i in chosen),
        read=_Chosen(source.read, chosen),
    )


@dataclass(frozen=True)
class _Chosen:
    read: Callable[[int], bytes | Image.Image]
    indices: np.ndarray

    def __call__(self, index: int) -> bytes | Image.Image:
        return self.read(int(self.indices[index]))
