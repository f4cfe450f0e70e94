"""Where pictures and their classes come from: folders, tars, WebDataset shards, Hugging Face datasets, scenes.

Shapes: N pictures.

`open_source` looks at what it is given and returns a PictureSource: names, labels and keys of all pictures, held
compactly in memory, and a `read` that fetches the bytes of one. Everything is a map from an index, WebDataset shards
too (their members are found once by offset), so that shuffling, resuming and evaluation are exact.

timm's readers are not used: its folder reader does not see an empty class folder, its tar reader shares one open file
among forked workers (and reads pickles), its WebDataset reader is iterable only. Classes are sorted as timm sorts them.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from alltokens.data import hugging_face, shards
from alltokens.data.picture_source import PackedStrings, PictureSource, from_folders, usable, with_class_names
from alltokens.data.pictures import is_picture_name
from alltokens.errors import UserError, unknown

Progress = Callable[[int], None]

# The names under which a split is looked for, in this order.
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test"),
    "test": ("test", "testing"),
}

SCENE_COUNTS = {"train": 6000, "val": 1000}  # what "scenes:train" and "scenes:val" hold


def open_source(
    location: str | Path,
    split: str | None = None,
    *,
    class_names: Sequence[str] | None = None,
    labelled: bool = True,
    allow_empty_classes: bool = False,
    progress: Progress | None = None,
) -> PictureSource:
    """The pictures at `location`:

    - a folder of class folders, at any depth. A class is a folder that holds pictures; it is called by its own name,
      or by its path below the root when two folders share a name;
    - a `.tar` of class folders (or of one tar per class), or a folder of such tars;
    - a folder of WebDataset shards: tars with `x.jpg` beside `x.cls` or `x.json` (which has a "label"), and perhaps a
      `classnames.txt` beside the shards;
    - a Hugging Face dataset on disk (saved by `save_to_disk`, or a folder of parquet files), or "hfds:" and what
      `datasets.load_dataset` takes;
    - "scenes:train" or "scenes:val", the pictures that alltokens draws itself.

    `split` chooses among `train`, `val`, `test` (folders, tars, or shards of that name) where the location holds
    several. `class_names`, from the training pictures, makes labels agree by name: a class without a picture here
    shifts nothing, a class that is not among them is an error. `labelled=False` takes all pictures, labels -1.
    `progress` is called with how many were found so far, after each folder.
    """
    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    name = str(location)
    if name == "scenes" or name.startswith("scenes:"):
        source = _open_scenes(name, split)
    elif name.startswith("hfds:"):
        source = hugging_face.open_dataset(name.removeprefix("hfds:"), SPLITS[split] if split else None)
    else:
        source = _open_path(Path(location).expanduser(), split, class_names, labelled, progress)
    if not labelled:
        return dataclasses.replace(source, class_names=(), labels=np.full(len(source), -1, dtype=np.int64))
    return with_class_names(source, class_names) if class_names else usable(source, allow_empty_classes)


def find_splits(root: str | Path) -> dict[str, list[Path]]:
    """The splits in a folder: a folder `train` or a `train.tar`, or else the tars with that word in their names."""
    entries = sorted(Path(root).iterdir()) if Path(root).is_dir() else []
    tars = [path for path in entries if path.suffix == ".tar"]
    exact = {path.stem.lower(): [path] for path in tars}
    exact |= {path.name.lower(): [path] for path in entries if path.is_dir()}
    worded: dict[str, list[Path]] = {}
    for path in tars:
        for word in set(re.split(r"[-_.]", path.stem.lower())):
            worded.setdefault(word, []).append(path)
    found = {
        split: [named[name] for named in (exact, worded) for name in names if name in named]
        for split, names in SPLITS.items()
    }
    return {split: paths[0] for split, paths in found.items() if paths}


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """Reads the picture of a key below a folder."""

    root: str
    keys: Sequence[str]

    def __call__(self, index: int) -> bytes:
        with open(os.path.join(self.root, self.keys[index]), "rb") as file:  # noqa: PTH118, PTH123 (hot path)
            return file.read()


@dataclass(frozen=True, eq=False)
class ArrayPictures:
    """Pictures that are in memory, (N, S, S, 3) uint8."""

    pictures: np.ndarray

    def __call__(self, index: int) -> Image.Image:
        return Image.fromarray(np.asarray(self.pictures[index]))


def open_folder(
    root: Path, known: Sequence[str] | None = None, labelled: bool = True, progress: Progress | None = None
) -> PictureSource:
    """A folder of class folders at any depth; hidden files and folders are passed over."""
    keys: list[str] = []
    empty: list[str] = []
    for folder, children, files in os.walk(root, followlinks=True):
        children[:] = [child for child in sorted(children) if child[0] != "." and not _leads_back(Path(folder, child))]
        below = Path(folder).relative_to(root).as_posix()
        pictures = [name if below == "." else f"{below}/{name}" for name in files if is_picture_name(name)]
        keys += pictures
        if progress:
            progress(len(keys))
        if not pictures and not children and below != ".":
            empty.append(below)
    keys.sort()
    folders = [key.rpartition("/")[0] for key in keys]
    packed = PackedStrings(keys)
    read = FolderFiles(str(root), packed)
    return from_folders(str(root), packed, folders, read, empty_folders=empty, known=known, labelled=labelled)


def open_scenes(count: int, size: int = 64, seed: int = 0, split: str = "train") -> PictureSource:
    """Pictures drawn by alltokens.data.scenes; their keys are "train/000012"."""
    from alltokens.data.scenes import SCENE_CLASSES, load_scenes

    scenes = load_scenes(count, size, seed, split)
    keys = PackedStrings(f"{split}/{index:06d}" for index in range(count))
    labels = np.asarray(scenes.labels, dtype=np.int64)
    return PictureSource(f"scenes:{split}", tuple(SCENE_CLASSES), labels, keys, ArrayPictures(scenes.pictures))


def _leads_back(folder: Path) -> bool:
    """Whether a folder is a link to one that it lies in: walking it would not end."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _open_scenes(name: str, split: str | None) -> PictureSource:
    named = name.partition(":")[2] or None
    if None not in (named, split) and named != split:
        raise UserError(f"{name} already names its split; split={split!r} contradicts it")
    split = named or split or "train"
    if split not in SCENE_COUNTS:
        raise unknown("split of the scenes", split, SCENE_COUNTS)
    return open_scenes(SCENE_COUNTS[split], split=split)


def _open_path(
    root: Path, split: str | None, known: Sequence[str] | None, labelled: bool, progress: Progress | None
) -> PictureSource:
    if not root.exists():
        siblings = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
        near = difflib.get_close_matches(root.name, siblings, n=1, cutoff=0.5)
        guess = f" Did you mean {root.parent / near[0]}?" if near else ""
        raise UserError(f"no such file or folder: {root}.{guess}")
    if root.is_file() and root.suffix != ".tar":
        raise UserError(f"{root} is neither a folder nor a .tar file; unpack it, or repack it as an uncompressed .tar")
    if root.is_dir() and any((root / name).exists() for name in ("state.json", "dataset_dict.json")):
        return hugging_face.open_saved(root, SPLITS[split] if split else None)
    if root.is_dir() and (any(root.glob("*.parquet")) or any(root.glob("data/*.parquet"))):
        return hugging_face.open_dataset(str(root), SPLITS[split] if split else None)
    splits = find_splits(root)
    if split is not None:
        if split not in splits:
            apart = "say where each part is: data.train and data.val"
            there = (
                f"it holds {', '.join(splits)}"
                if splits
                else f"make folders of these names in it, or {apart}"
                if root.is_dir()
                else f"a tar holds one split; {apart}"
            )
            raise UserError(f"{root} has no split {split!r} (looked for {', '.join(SPLITS[split])}); {there}")
        first = splits[split][0]
        if first.is_dir() or first.stem.lower() in SPLITS[split]:  # train/ or train.tar, and not part-train-000.tar
            return _open_path(first, None, known, labelled, progress)
        return shards.open_tars(root, splits[split], known, labelled)
    if len({paths[0] for paths in splits.values()}) > 1:
        raise UserError(f"{root} holds the splits {', '.join(splits)}; say which with split=")
    tars = [root] if root.is_file() else sorted(root.glob("*.tar"))
    return shards.open_tars(root, tars, known, labelled) if tars else open_folder(root, known, labelled, progress)
