"""The pictures that somebody names on the command line: files, folders, or whatever else holds pictures.

Pictures are read when they are looked at, so a folder may hold any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from alltokens.data.datasets import load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import decode_picture
from alltokens.data.sources import open_source
from alltokens.errors import UserError

SCENES = 64  # so many are drawn where "scenes" stands for pictures


class Named(NamedTuple):
    name: str
    picture: Image.Image
    label: str  # its class, "" where nobody says


class _Place(NamedTuple):
    """Where a picture is: a file, or one of a source's."""

    file: Path | None
    source: PictureSource | None
    index: int


class NamedPictures:
    """All pictures of several files and places, in order; `len`, and one by its number."""

    def __init__(self, locations: Sequence[str | Path], class_names: Sequence[str] = ()) -> None:
        """class_names: a file in a folder of such a name is taken to be of that class."""
        self._classes = set(class_names)
        self._places: list[_Place] = []
        for location in locations:
            path = Path(location).expanduser()
            if path.is_file() and path.suffix != ".tar":
                self._places.append(_Place(path, None, 0))
            else:
                source = _open(str(location))
                self._places += [_Place(None, source, index) for index in range(len(source))]
        if not self._places:
            raise UserError("which pictures? Name files, folders, or 'scenes', which alltokens draws itself")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Named:
        file, source, index = self._places[number]
        if file is not None:
            try:
                encoded = file.read_bytes()
            except OSError as error:
                raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
            return Named(file.name, decode_picture(encoded, name=str(file)), self._class_of(file.parent.name))
        assert source is not None
        key = source.keys[index]
        label = source.class_names[int(source.labels[index])] if source.class_names else ""
        return Named(key, load_picture(source, index), label or self._class_of(Path(key).parent.name))

    def some(self, most: int) -> list[Named]:
        """At most so many: all that were named one by one first, then evenly chosen ones of the folders."""
        files = [at for at, place in enumerate(self._places) if place.file is not None][:most]
        others = [at for at, place in enumerate(self._places) if place.file is None]
        wanted = min(most - len(files), len(others))
        if wanted > 0:
            files += [others[at] for at in np.linspace(0, len(others) - 1, wanted).round().astype(int)]
        return [self[at] for at in files]

    def _class_of(self, folder: str) -> str:
        return folder if folder in self._classes else ""


def _open(location: str) -> PictureSource:
    if location == "scenes":
        location = "scenes:val"
    if location.startswith("scenes:"):
        from alltokens.data.sources import open_scenes

        return open_scenes(SCENES, 224, split=location.removeprefix("scenes:"))
    if not Path(location).expanduser().exists() and not location.startswith("hfds:"):
        raise UserError(f"no picture {location}: there is no such file or folder")
    return open_source(location, labelled=False)
