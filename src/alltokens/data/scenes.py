"""The embedded pictures: small scenes with a class for every pixel, drawn, not downloaded.

Shapes: n pictures, S their side in pixels.

A scene shows two to four objects of ten classes on a lit, cluttered ground. Its label is the class of its main object:
the largest, in front of the others, near the middle. Sizes are drawn the same way for all classes. Each class has a
usual colour and a usual texture, but many of its objects have others, so that only the form tells for sure.

What a picture shows depends on (seed, split, its number) alone: asking for more pictures keeps the first ones, and
another size shows the same scenes in another resolution.

For the same arguments class maps are the same, byte by byte, on every machine; pictures are on one machine.
(7,000 pictures of 64x64 take about 10 seconds on one core, so no processes are started.)
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from alltokens.data.scenes_drawing import draw_scene
from alltokens.data.scenes_layout import BACKGROUND, SCENE_CLASSES
from alltokens.errors import UserError, unknown

__all__ = ["BACKGROUND", "SCENE_CLASSES", "Scenes", "contact_sheet", "load_scenes", "render_scenes"]

SPLITS = {"train": 0, "val": 1, "test": 2}
RENDERER_VERSION = 1  # part of a cache file's name: raise it with every change of what is drawn

# Ten colours that are told apart beside each other, for contact sheets.
_MAP_COLOURS = (
    (230, 60, 60), (245, 160, 40), (240, 220, 70), (130, 200, 70), (40, 140, 80),
    (70, 200, 210), (60, 110, 230), (140, 80, 210), (230, 110, 190), (165, 110, 70),
)  # fmt: skip


class Scenes(NamedTuple):
    pictures: NDArray[np.uint8]  # (n, S, S, 3)
    labels: NDArray[np.int64]  # (n,) the main object's class
    class_maps: NDArray[np.uint8]  # (n, S, S) the class seen at every pixel, BACKGROUND where there is none


def render_scenes(count: int, size: int = 64, seed: int = 0, split: str = "train") -> Scenes:
    """Draws the first `count` pictures of a split."""
    _check(count, size, seed, split)
    return _scenes(_render(count, size, seed, split))


def load_scenes(
    count: int, size: int = 64, seed: int = 0, split: str = "train", cache: Path | str | None = None
) -> Scenes:
    """The same as `render_scenes`, kept on disk from the first call on and memory-mapped from there.

    `cache` is the folder; by default alltokens/scenes in $XDG_CACHE_HOME or ~/.cache. The arrays may be written to: the
    file never changes.
    """
    _check(count, size, seed, split)
    path = _cache_folder(cache) / f"v{RENDERER_VERSION}-{size}px-seed{seed}-{split}-{count}.npy"
    try:
        return _read(path, count, size, seed, split)
    except (FileNotFoundError, NotADirectoryError):
        pass  # nothing is kept yet
    except (OSError, ValueError, EOFError) as error:
        warnings.warn(f"{path} cannot be used ({error}); its pictures are drawn again", stacklevel=2)
    records = _render(count, size, seed, split)
    try:
        _write(path, records)
    except OSError as error:
        warnings.warn(f"the pictures could not be kept in {path.parent} ({error}); they stay in memory", stacklevel=2)
    return _scenes(records)


def contact_sheet(scenes: Scenes, columns: int = 10, scale: int = 2, class_maps: bool = False) -> Image.Image:
    """The pictures in rows, named by their labels; `class_maps` puts each one's map, in colours, to its right.

    docs/images/scenes.png is `contact_sheet(render_scenes(28), columns=4, class_maps=True)`.
    """
    if columns < 1 or scale < 1:
        raise UserError(f"columns and scale must be at least 1, got {columns} and {scale}")
    if not len(scenes.pictures):
        raise UserError("a contact sheet needs at least one picture, got none")
    palette = np.full((256, 3), 40, dtype=np.uint8)
    palette[: len(_MAP_COLOURS)] = _MAP_COLOURS
    side, gap, caption = scenes.pictures.shape[1] * scale, 4, 14
    width = side * (2 if class_maps else 1)
    columns = min(columns, len(scenes.pictures))
    rows = -(-len(scenes.pictures) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (side + caption + gap) + gap), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (picture, label, class_map) in enumerate(zip(*scenes, strict=True)):
        left = gap + index % columns * (width + gap)
        top = gap + index // columns * (side + caption + gap)
        tiles = [picture, palette[class_map]] if class_maps else [picture]
        tile = Image.fromarray(np.concatenate(tiles, axis=1))
        sheet.paste(tile.resize((width, side), Image.Resampling.NEAREST), (left, top))
        pen.text((left + 1, top + side), SCENE_CLASSES[label], fill="black")
    return sheet


def _record(size: int) -> np.dtype:
    # One record a picture, so that the cache is a single file that can be memory-mapped and replaced at once.
    return np.dtype([("picture", "u1", (size, size, 3)), ("class_map", "u1", (size, size)), ("label", "u1")])


def _render(count: int, size: int, seed: int, split: str) -> np.ndarray:
    records = np.empty(count, dtype=_record(size))
    for index in range(count):
        records[index] = _draw(index, size, seed, split)
    return records


def _draw(index: int, size: int, seed: int, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    picture, label, class_map = draw_scene(seed, SPLITS[split], index, size)
    return picture, class_map, label


def _scenes(records: np.ndarray) -> Scenes:
    return Scenes(records["picture"], records["label"].astype(np.int64), records["class_map"])


def _check(count: int, size: int, seed: int, split: str) -> None:
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if count < 1 or size < 8:
        raise UserError(f"count must be at least 1 and size at least 8 pixels, got {count} and {size}")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed must be between 0 and 2**64 - 1, got {seed}")


def _cache_folder(cache: Path | str | None) -> Path:
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alltokens" / "scenes"


def _read(path: Path, count: int, size: int, seed: int, split: str) -> Scenes:
    # Copy on write: the arrays can be handed to torch without a warning, and the file stays as it is.
    records = np.load(path, mmap_mode="c", allow_pickle=False)
    if records.dtype != _record(size) or records.shape != (count,):
        raise ValueError(f"it holds {records.shape} of another kind")
    # Two pictures drawn anew tell a file of another renderer, or one full of zeros, for a few milliseconds.
    for index in {0, count - 1}:
        _, class_map, label = _draw(index, size, seed, split)
        if label != records[index]["label"] or not np.array_equal(class_map, records[index]["class_map"]):
            raise ValueError(f"its picture {index} is not what this version draws")
    return _scenes(records)


def _write(path: Path, records: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, records, allow_pickle=False)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
