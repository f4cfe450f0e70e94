"""From a picture source to samples.

Shapes: N pictures, B batch, C channels, H and W the network's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from alltokens.core.transfer import sent
from alltokens.data.picture_source import PictureSource, with_class_names
from alltokens.data.pictures import MAX_PIXELS, UnreadablePicture, decode_picture
from alltokens.data.sampler import Draw
from alltokens.data.sources import open_source
from alltokens.errors import UserError, unknown

Transform = Callable[[Image.Image, torch.Generator | None], tuple[Tensor, Tensor]]
OnBadPicture = Literal["error", "skip", "mark"]

IGNORED = -1  # the label of a picture that an evaluation could not read

_MOST_SKIPPED = 100  # so many unreadable pictures in a row mean that the disk is gone


class LabelMaps(Protocol):
    """A label store, as far as a dataset needs it: the picture's maps (a NamedTuple of tensors) by its key."""

    def __getitem__(self, key: str, /) -> Any: ...


class Sample(NamedTuple):
    """One picture, or a batch of them after `default_collate`; what differs between the two is typed Any."""

    image: Tensor  # (C, H, W), batched (B, C, H, W)
    label: Any  # int, batched (B,) int64
    key: Any  # str, batched B of them: of the picture that was really used
    matrix: Tensor  # (2, 3), batched (B, 2, 3): from the network's input to the source picture
    maps: Any = ()  # a NamedTuple of tensors from the label store, if there is one
    trouble: Any = ""  # str, batched B of them: a line for each picture that could not be read

    def to(self, device: torch.device | str) -> Sample:
        """All tensors on `device` (a copy from pinned memory does not block); keys stay."""
        return _moved(self, torch.device(device))


class PictureDataset(Dataset[Sample]):
    """The samples of a source (or of a path, see `open_source`).

    `dataset[i]` draws its augmentation from torch's default generator; `dataset[Draw(i, seed)]` from a generator of
    that seed, so that the sample depends on nothing else. `on_bad_picture` says what an unreadable picture does:

    - `error`: stop, naming it;
    - `skip` (for training): the next readable picture takes its place;
    - `mark` (for evaluation): it comes as a black picture with the label -1, so that no other one counts twice.

    The last two tell of it in `Sample.trouble`, which reaches the main process with the batch.
    """

    def __init__(
        self,
        pictures: PictureSource | str | Path,
        transform: Transform,
        *,
        labels: LabelMaps | None = None,
        split: str | None = None,
        class_names: Sequence[str] | None = None,
        max_pixels: int = MAX_PIXELS,
        on_bad_picture: OnBadPicture = "error",
    ) -> None:
        if on_bad_picture not in ("error", "skip", "mark"):
            raise unknown("on_bad_picture", on_bad_picture, ("error", "skip", "mark"))
        if not isinstance(pictures, PictureSource):
            pictures = open_source(pictures, split, class_names=class_names)
        elif split is not None:
            raise UserError("split chooses within a path; give it to open_source when you open the source yourself")
        elif class_names is not None:
            pictures = with_class_names(pictures, class_names)
        self.source = pictures
        self.transform = transform
        self.label_maps = labels
        self.max_pixels = max_pixels
        self.on_bad_picture: OnBadPicture = on_bad_picture

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @property
    def num_classes(self) -> int:
        return len(self.source.class_names)

    @property
    def labels(self) -> np.ndarray:
        """The class of every picture, (N,) int64."""
        return self.source.labels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int | Draw) -> Sample:
        generator = None
        if isinstance(index, Draw):
            index, generator = index.index, torch.Generator().manual_seed(index.seed)
        picture, used, trouble = self._readable(range(len(self))[index])
        image, matrix = self.transform(picture, generator)
        key = self.source.keys[used]
        label = IGNORED if trouble and self.on_bad_picture == "mark" else int(self.source.labels[used])
        maps = () if self.label_maps is None else self.label_maps[key]
        return Sample(image, label, key, matrix, maps, "\n".join(trouble))

    def _readable(self, index: int) -> tuple[Image.Image, int, list[str]]:
        """The picture, or what stands in for it; the index of the one used; what was wrong with the others."""
        trouble: list[str] = []
        for step in range(most := min(_MOST_SKIPPED, len(self))):
            used = (index + step) % len(self)
            try:
                return load_picture(self.source, used, self.max_pixels), used, trouble
            except UnreadablePicture as error:
                if self.on_bad_picture == "error":
                    raise
                trouble.append(str(error))
                if self.on_bad_picture == "mark":
                    return Image.new("RGB", (1, 1)), used, trouble
        raise UnreadablePicture(f"{most} pictures in a row cannot be read; the last is {trouble[-1]}")


def load_picture(
    source: PictureSource, index: int, max_pixels: int = MAX_PIXELS, enough: int | None = None
) -> Image.Image:
    """A picture of a source, as `decode_picture` gives it; whatever is wrong with it is an UnreadablePicture."""
    name = f"{source.location}/{source.keys[index]}"
    try:
        encoded = source.read(index)
    except OSError as error:
        raise UnreadablePicture(f"{name}: cannot be read ({error.strerror or error})") from error
    return decode_picture(encoded, max_pixels=max_pixels, enough=enough, name=name)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return sent(value, device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(part, device) for part in value))
    return value
