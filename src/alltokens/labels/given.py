"""The pictures that an annotator is given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alltokens.data.picture_source import PictureSource
from alltokens.data.sources import open_source
from alltokens.errors import UserError
from alltokens.labels.class_map import AnnotatorClasses, match_classes
from alltokens.labels.picture_batches import Picture
from alltokens.labels.store import LabelStore


def open_folder(location: str | Path, split: str | None, class_map: object = None) -> PictureSource:
    """The pictures at `location`, with their classes where they have several.

    Pictures that all lie in one folder have no classes. For the annotator's own classes no folders are needed at all.
    """
    try:
        return open_source(location, split, allow_empty_classes=True)
    except UserError:
        pictures = open_source(location, split, labelled=False)
        if class_map != "own" and len({key.rpartition("/")[0] for key in pictures.keys}) > 1:
            raise
        return pictures


def labels_in(store: LabelStore, source: PictureSource) -> dict[str, int] | None:
    """The pictures' labels in the store's classes, by key; None for pictures without classes.

    It is an error if a class of the pictures cannot be found among the store's.
    """
    names, stored = source.class_names, store.manifest.class_names
    if not names:
        return None
    if names == stored or (not stored and len(names) == store.manifest.num_classes):
        numbers = list(range(len(names)))
    elif not stored:
        raise UserError(
            f"{store.path} counts {store.manifest.num_classes} classes without names, the pictures have {len(names)}"
        )
    else:
        numbers = [ids[0] for ids in match_classes(names, AnnotatorClasses.called(stored)).members]
    return {key: numbers[label] for key, label in zip(source.keys, source.labels.tolist(), strict=True) if label >= 0}


def class_words(store: LabelStore, source: PictureSource | None = None) -> list[str]:
    """What people call the store's classes; where it has no names, the pictures may have them."""
    what = store.manifest
    if what.class_names:
        return list(AnnotatorClasses.called(what.class_names).words)
    if source is not None and len(source.class_names) == what.num_classes:
        return list(source.class_names)
    return [f"class {index}" for index in range(what.num_classes)]


def open_given(
    pictures: Any, split: str | None, class_map: object, out: Path
) -> PictureSource | Iterable[tuple[Picture, str]]:
    """A source of a path, anything else as it is. The store must not lie among the pictures, where it is a class."""
    if isinstance(pictures, str | Path):
        pictures = open_folder(pictures, split, class_map)
    elif split is not None:
        raise UserError("split chooses within a path; give it to open_source when you open the pictures yourself")
    if isinstance(pictures, PictureSource):
        folder = Path(pictures.location)
        if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{out} lies in the folder of the pictures, {folder}; put the label maps beside it")
    return pictures
