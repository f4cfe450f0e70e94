"""The page of a label store: pictures under their maps, to find a wrong label or a second object by eye.

Shapes: S pictures measured, P pictures on the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alltokens.core.label_maps import LabelMap
from alltokens.data.datasets import load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture
from alltokens.errors import UserError
from alltokens.labels.given import class_words, labels_in
from alltokens.labels.measure import Measures, measure, remarkable
from alltokens.labels.store import LabelStore
from alltokens.report.html import coded_map, picture_uri, write_page
from alltokens.version import __version__


class WrittenPage(NamedTuple):
    file: Path
    pictures: int  # on the page
    measured: int  # of which those were chosen
    bytes: int


def write_label_page(
    store: LabelStore,
    source: PictureSource,
    out: str | Path,
    *,
    pictures: int = 300,
    side: int = 192,
    progress: Callable[[int, int], None] | None = None,
) -> WrittenPage:
    """Write the page of the `pictures` most remarkable maps of a store (and some ordinary ones).

    `source` has the pictures; its labels are compared with the maps if its classes are found among theirs. `side` is
    that of the embedded pictures, in pixels.
    """
    if pictures < 1 or side < 16:
        raise UserError(f"a page needs at least one picture of 16 pixels, got {pictures} of {side}")
    places = {key: index for index, key in enumerate(source.keys)}
    keys = list(filter(places.__contains__, store.keys()))
    if not keys:
        raise UserError(
            f"none of the {len(store):,} pictures of {store.path} is in {source.location}, such as "
            f"{next(store.keys())!r}: keys are paths below the folder of the pictures, with extension"
        )
    try:
        labels = labels_in(store, source)
    except UserError:
        labels = None
    found = measure(store, labels, keys=keys, progress=progress)
    entries, unreadable = [], 0
    for at in remarkable(found, pictures).tolist():
        try:
            picture = load_picture(source, places[keys[at]])
        except UnreadablePicture:
            unreadable += 1
            continue
        entries.append(_entry(found, at) | {"image": picture_uri(picture, side), "map": _coded(store, keys[at])})
        entries[-1] |= {"width": picture.width, "height": picture.height}
    counted = found.doubt[~np.isnan(found.doubt)]
    size = write_page(
        "labels.html",
        Path(out),
        store=store,
        location=source.location,
        measured=len(keys),
        missing=len(store) - len(keys),
        unreadable=unreadable,
        agreement=float((counted <= 0).mean()) if len(counted) else None,
        version=__version__,
        data={"names": class_words(store, source), "comparable": labels is not None, "pictures": entries},
    )
    return WrittenPage(Path(out), len(entries), len(keys), size)


def _entry(found: Measures, at: int) -> dict[str, Any]:
    """What was measured of one picture, for the page; None for what does not exist."""
    values = {name: getattr(found, name)[at].item() for name in Measures._fields if name != "keys"}
    rounded = {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}
    return {"key": found.keys[at]} | {name: None if value != value else value for name, value in rounded.items()}


def _coded(store: LabelStore, key: str) -> dict[str, Any]:
    return coded_map(LabelMap(*store[key]), store.manifest.num_classes)
