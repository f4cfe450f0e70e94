"""Pictures in a dataset of the Hugging Face `datasets` library (the extra `alltokens[huggingface]`).

Shapes: N pictures.

Rows of such a dataset have no path, so a picture's key is its split and row: "train/00000012".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alltokens.data.picture_source import PackedStrings, PictureSource, sorted_classes
from alltokens.errors import UserError

if TYPE_CHECKING:
    import datasets

IMAGE_COLUMNS = ("image", "img", "picture")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class")


@dataclass(frozen=True)
class ImageColumn:
    """Reads the encoded bytes of a row's picture."""

    dataset: datasets.Dataset
    column: str

    def __call__(self, index: int) -> bytes:
        picture = self.dataset[index][self.column]
        return picture["bytes"] if picture["bytes"] is not None else Path(picture["path"]).read_bytes()


def open_saved(root: Path, split_names: tuple[str, ...] | None) -> PictureSource:
    """A folder written by `save_to_disk`."""
    return _from_dataset(str(root), *_one_split(str(root), _library().load_from_disk(str(root)), split_names))


def open_dataset(name: str, split_names: tuple[str, ...] | None) -> PictureSource:
    """Whatever `datasets.load_dataset` finds under this name: a folder of parquet files, a dataset of the hub."""
    try:
        loaded = _library().load_dataset(name)
    except (OSError, ValueError) as error:  # the library's own errors are among these
        raise UserError(f"the datasets library cannot load {name!r}: {error}") from error
    return _from_dataset(f"hfds:{name}", *_one_split(name, loaded, split_names))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("this needs the datasets library: pip install 'alltokens[huggingface]'") from error
    return datasets


def _one_split(name: str, loaded: Any, split_names: tuple[str, ...] | None) -> tuple[datasets.Dataset, str]:
    splits = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    if split_names is None and len(splits) == 1:
        split_names = tuple(splits)
    split = next((wanted for wanted in split_names or () if wanted in splits), None)
    if split is None:
        wanted = f"no split {' or '.join(split_names)}; it holds" if split_names else "several splits; say which of"
        raise UserError(f"{name} has {wanted} {', '.join(splits)}")
    return splits[split], split


def _from_dataset(location: str, dataset: datasets.Dataset, split: str) -> PictureSource:
    library = _library()
    features = dataset.features
    image = _column(location, features, [n for n, f in features.items() if isinstance(f, library.Image)], IMAGE_COLUMNS)
    classes = [n for n, f in features.items() if isinstance(f, library.ClassLabel)]
    label = _column(location, features, classes or [n for n in LABEL_COLUMNS if n in features], LABEL_COLUMNS)
    values = np.asarray(dataset.select_columns([label]).with_format("numpy")[:][label])
    if classes:
        names = list(features[label].names)
    elif np.issubdtype(values.dtype, np.integer):
        names = [str(index) for index in range(int(values.max(initial=-1)) + 1)]
    else:
        names = sorted_classes(map(str, values))
        index = {name: number for number, name in enumerate(names)}
        values = np.array([index[str(value)] for value in values])
    keys = PackedStrings(f"{split}/{row:08d}" for row in range(len(dataset)))
    pictures = dataset.select_columns([image]).cast_column(image, library.Image(decode=False))
    return PictureSource(location, tuple(names), values.astype(np.int64), keys, ImageColumn(pictures, image))


def _column(location: str, features: Any, candidates: list[str], usual: tuple[str, ...]) -> str:
    if len(candidates) == 1:
        return candidates[0]
    for name in usual:
        if name in candidates:
            return name
    found = f"several fit: {', '.join(candidates)}" if candidates else f"its columns are {', '.join(features)}"
    raise UserError(f"{location} needs one column called {' or '.join(usual)}; {found}")
