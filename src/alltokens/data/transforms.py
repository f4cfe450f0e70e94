"""From a picture to the network's input, and to the matrix that says where each place of it came from.

Shapes: H and W the network's input; pictures are PIL, RGB.

A transform is called with a picture and returns (tensor (3, H, W) float32, matrix (2, 3) float32): see core/geometry.py
for the matrix. Everything drawn comes from `generator`, or from torch's own where none is given (a DataLoader seeds
that one for every worker).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from alltokens.core import geometry
from alltokens.core.draws import numpy_generator
from alltokens.data.augment import (
    Augmentation,
    EraseMode,
    Interpolation,
    RandAugment,
    draw,
)
from alltokens.data.color import recolor
from alltokens.errors import UserError, unknown

Size = int | tuple[int, int]
Color = tuple[float, float, float]
LabelsFollow = Literal["all", "crop"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# From this factor on, PIL first averages whole blocks of pixels: quicker than any filter, and it looks the same.
_MUCH_SMALLER = 4.0


class TrainTransform:
    """A random resized crop, flips, RandAugment or colour jitter, normalisation and random erasing.

    The odds and ranges are timm's. Pixels: the crop is resized, antialiased, straight out of the picture; all moves of
    RandAugment are one affine map of that crop, filled with the mean colour outside; then the colours; erasing comes
    after the normalisation and changes no geometry. `labels_follow="crop"` keeps RandAugment's moves out of the matrix,
    so that label maps follow crops and flips alone: an ablation, not a wish.
    """

    def __init__(
        self,
        size: Size = 224,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "random",
        horizontal_flip: float = 0.5,
        vertical_flip: float = 0.0,
        rand_augment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: float | Color = 0.0,
        erase_probability: float = 0.25,
        erase_mode: EraseMode = "pixel",
        erase_count: int = 1,
        mean: Color = IMAGENET_MEAN,
        std: Color = IMAGENET_STD,
        labels_follow: LabelsFollow = "all",
    ) -> None:
        if labels_follow not in ("all", "crop"):
            raise unknown("labels_follow", labels_follow, ("all", "crop"))
        self.labels_follow: LabelsFollow = labels_follow
        self.augmentation = Augmentation(
            size=_pair(size),
            scale=scale,
            ratio=ratio,
            interpolation=interpolation,
            horizontal_flip=horizontal_flip,
            vertical_flip=vertical_flip,
            rand_augment=None if rand_augment is None else RandAugment.parse(rand_augment),
            color_jitter=_three(color_jitter),
            erase_probability=erase_probability,
            erase_mode=erase_mode,
            erase_count=erase_count,
        )
        self.mean, self.std = _checked_colors(mean, std)
        self._mean, self._std = _in_levels(mean), _in_levels(std)

    @property
    def size(self) -> tuple[int, int]:
        return self.augmentation.size

    @property
    def fill(self) -> tuple[int, ...]:
        """The mean colour in levels: what is shown outside of the crop."""
        return tuple(min(255, round(255 * value)) for value in self.mean)

    def __call__(self, picture: Image.Image, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        _check(picture)
        source_width, source_height = picture.size
        rng = numpy_generator(generator)
        drawn = draw(self.augmentation, np.array([source_height]), np.array([source_width]), rng)
        left, top, box_width, box_height = drawn.box[0].tolist()
        resample = Image.Resampling.BICUBIC if drawn.bicubic[0] else Image.Resampling.BILINEAR
        box = (int(left), int(top), int(left + box_width), int(top + box_height))
        shown = resized_crop(picture, box, self.size, resample)
        told = move = geometry.flip(*drawn.flips[0].tolist())
        if drawn.moves is not None:
            move = geometry.compose(move.double(), drawn.moves[0])
        if self.labels_follow == "all":
            told = move
        shown = moved(shown, move, resample, self.fill)
        matrix = geometry.compose(
            geometry.crop(
                left / source_width, top / source_height, box_width / source_width, box_height / source_height
            ),
            told.float(),
        )
        for operation, argument in zip(drawn.operations[0].tolist(), drawn.arguments[0].tolist(), strict=True):
            shown = recolor(shown, operation, argument)
        image = to_tensor(shown, self._mean, self._std)
        for top, bottom, left, right in drawn.erased[0].tolist():
            if bottom > top:
                _erase(image[:, top:bottom, left:right], self.augmentation.erase_mode, generator)
        return image, matrix

    def __repr__(self) -> str:
        return f"TrainTransform({self.augmentation}, mean={self.mean}, std={self.std})"


class EvalTransform:
    """The middle of the picture: its shorter side resized to size / crop_fraction, then cropped, in one resampling.

    `mode="squash"` resizes both sides to that, whatever the picture's proportions.
    """

    def __init__(
        self,
        size: Size = 224,
        crop_fraction: float = 0.875,
        interpolation: str = "bicubic",
        mean: Color = IMAGENET_MEAN,
        std: Color = IMAGENET_STD,
        mode: str = "center",
    ) -> None:
        if not 0 < crop_fraction <= 1:
            raise UserError(f"crop_fraction must be in (0, 1], got {crop_fraction}")
        if interpolation not in RESAMPLING:
            raise unknown("interpolation", interpolation, RESAMPLING)
        if mode not in ("center", "squash"):
            raise unknown("mode", mode, ("center", "squash"))
        self.size = _pair(size)
        self.crop_fraction = crop_fraction
        self.interpolation = interpolation
        self.mean, self.std = _checked_colors(mean, std)
        self._mean, self._std = _in_levels(mean), _in_levels(std)
        self.mode = mode

    def __call__(self, picture: Image.Image, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """`generator` is taken so that both transforms are called alike; nothing is drawn."""
        return to_tensor(self.shown(picture), self._mean, self._std), self.matrix(picture.size)

    def matrix(self, source: tuple[int, int]) -> Tensor:
        """(width, height) of the source -> (2, 3), from the network's input to the source."""
        left, top, width, height = self.box(source)
        across, down = source
        return geometry.crop(left / across, top / down, width / across, height / down)

    def shown(self, picture: Image.Image) -> Image.Image:
        """What the network sees, still a picture."""
        _check(picture)
        left, top, width, height = self.box(picture.size)
        box = (left, top, left + width, top + height)
        return picture.resize((self.size[1], self.size[0]), RESAMPLING[self.interpolation], box=box)

    def box(self, source: tuple[int, int]) -> tuple[float, float, float, float]:
        """(width, height) of the source -> left, top, width, height of what is shown, in its pixels.

        Sizes and corners are rounded where timm's two steps, resize and crop, round them.
        """
        size = self.size[::-1]  # width, height, as all that follows
        resized = [int(side / self.crop_fraction) for side in size]
        if self.mode == "center":
            # The side that has to grow most (in a square, the shorter one) is resized to what is wanted.
            first = 0 if resized[0] * source[1] >= resized[1] * source[0] else 1
            resized[1 - first] = resized[first] * source[1 - first] // source[first]
        pixel = [source[axis] / resized[axis] for axis in (0, 1)]
        left, top = (round((resized[axis] - size[axis]) / 2) * pixel[axis] for axis in (0, 1))
        # PIL refuses a box that is rounded to beyond the edge.
        return left, top, min(size[0] * pixel[0], source[0] - left), min(size[1] * pixel[1], source[1] - top)

    def __repr__(self) -> str:
        return (
            f"EvalTransform({self.size}, crop_fraction={self.crop_fraction}, interpolation={self.interpolation!r}, "
            f"mean={self.mean}, std={self.std}, mode={self.mode!r})"
        )


RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resized_crop(
    picture: Image.Image, box: tuple[int, int, int, int], size: tuple[int, int], resample: Image.Resampling
) -> Image.Image:
    """The box (left, top, right, bottom) of an RGB picture, antialiased, at (height, width)."""
    height, width = size
    if max((box[2] - box[0]) / width, (box[3] - box[1]) / height) >= _MUCH_SMALLER:
        return picture.resize((width, height), resample, box=box, reducing_gap=_MUCH_SMALLER / 2)
    pixels = resized_pixels(picture, box, size, resample).contiguous()
    return Image.frombuffer("RGB", (width, height), pixels.numpy(), "raw", "RGB", 0, 1)


def resized_pixels(
    picture: Image.Image, box: tuple[int, int, int, int], size: tuple[int, int], resample: Image.Resampling
) -> Tensor:
    """The same as (height, width, 3) uint8, whatever the sizes.

    torch has PIL's own filter for bytes and runs it two to five times as fast. (Its two passes may come in the other
    order; what overshoots in between is cut off, which shows in noise only.)
    """
    cropped = torch.frombuffer(bytearray(picture.crop(box).tobytes()), dtype=torch.uint8)
    cropped = cropped.view(1, box[3] - box[1], box[2] - box[0], 3).permute(0, 3, 1, 2)  # channels last
    mode = "bicubic" if resample == Image.Resampling.BICUBIC else "bilinear"
    return F.interpolate(cropped, size, mode=mode, antialias=True)[0].permute(1, 2, 0)


def to_tensor(picture: Image.Image, mean: Tensor, std: Tensor) -> Tensor:
    """An RGB picture -> (3, H, W) float32: levels less `mean`, over `std`, both (3, 1, 1) and in levels.

    Planes first, then numbers, then two passes in place: several times quicker than through strided bytes.
    """
    planes = bytearray().join(band.tobytes() for band in picture.split())
    levels = torch.frombuffer(planes, dtype=torch.uint8).view(3, picture.height, picture.width)
    return levels.float().sub_(mean).div_(std)


def moved(picture: Image.Image, matrix: Tensor, resample: Image.Resampling, fill: tuple[int, ...]) -> Image.Image:
    """The picture resampled by a (2, 3) matrix; what only mirrors or shifts by whole pixels is not resampled."""
    width, height = picture.size
    (a, b, c), (d, e, f) = matrix.tolist()
    if (abs(a), b, d, abs(e)) != (1, 0, 0, 1):
        # PIL wants the matrix in pixels, counted from the corner of the picture as ours is.
        in_pixels = (a, b * width / height, c * width, d * height / width, e, f * height)
        return picture.transform(picture.size, Image.Transform.AFFINE, in_pixels, resample, fillcolor=fill)
    if a < 0:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if e < 0:
        picture = picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    # The mirrored picture starts where the matrix takes 1, the other one where it takes 0.
    left = round(width * (c if a > 0 else 1 - c))
    top = round(height * (f if e > 0 else 1 - f))
    if left or top:
        canvas = Image.new("RGB", picture.size, fill)
        canvas.paste(picture, (-left, -top))
        return canvas
    return picture


def _erase(region: Tensor, mode: EraseMode, generator: torch.Generator | None) -> None:
    """Fill a part of a tensor that was just made."""
    if mode == "const":
        region.zero_()
    else:
        region.copy_(torch.randn(region.shape, generator=generator))


def _check(picture: Image.Image) -> None:
    if picture.mode != "RGB":
        raise UserError(f"a transform takes RGB pictures, this one is {picture.mode}; call picture.convert('RGB')")


def _checked_colors(mean: Color, std: Color) -> tuple[Color, Color]:
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UserError(f"mean and std must be three numbers each, std above 0; got {mean} and {std}")
    return mean, std


def _in_levels(color: Color) -> Tensor:
    """-> (3, 1, 1), as pixels count."""
    return 255 * torch.tensor(color)[:, None, None]


def _three(strengths: float | Color) -> Color:
    return (strengths, strengths, strengths) if isinstance(strengths, int | float) else strengths


def _pair(size: Size) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if min(pair) < 1:
        raise UserError(f"size must be positive, got {size}")
    return pair
