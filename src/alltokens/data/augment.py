"""What a random augmentation draws: numbers only, no pixels.

Shapes: n pictures, L colour layers, E erased boxes at most.

`draw` gives the parameters of n pictures at once; the picture form (transforms.py) asks for one, the device form
(device_augment.py) for a batch, so that both have the same distributions. Ranges and odds are timm's, as in its
`create_transform`. What differs, on purpose: the moves of RandAugment (turn, shear, shift) are put together into one
affine map and come before its colour operations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alltokens.core import geometry
from alltokens.errors import UserError, unknown

Interpolation = Literal["random", "bilinear", "bicubic"]
EraseMode = Literal["pixel", "const"]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ATTEMPTS = 10  # a box that does not fit is drawn again this often, for crops and for erasing (timm, torchvision)
STRONGEST = 10.0  # RandAugment's magnitudes go from 0 to this
ERASED_AREA = (0.02, 1 / 3)  # timm's RandomErasing: share of the picture, and height to width
ERASED_ASPECT = (0.3, 1 / 0.3)


class Operation(NamedTuple):
    """One operation of RandAugment; its argument is start + span * strength, strength in [0, 1]."""

    name: str
    start: float = 0.0
    span: float = 0.0
    signed: bool = False  # half of the time the other way
    whole: bool = False  # the span's part is cut to a whole number


PLAIN = (
    Operation("Identity"),
    Operation("AutoContrast"),
    Operation("Equalize"),
    Operation("Invert"),
    Operation("Posterize", 0, 4, whole=True),  # bits kept
    Operation("Solarize", 0, 256, whole=True),  # levels from here on are inverted
    Operation("SolarizeAdd", 0, 110, whole=True),  # added to levels below 128
    Operation("Color", 0.1, 1.8),  # 1 changes nothing, here and for the next three
    Operation("Contrast", 0.1, 1.8),
    Operation("Brightness", 0.1, 1.8),
    Operation("Sharpness", 0.1, 1.8),
    Operation("Rotate", 0, 30, signed=True),  # degrees
    Operation("ShearX", 0, 0.3, signed=True),
    Operation("ShearY", 0, 0.3, signed=True),
    Operation("TranslateXRel", 0, 0.45, signed=True),  # share of the side
    Operation("TranslateYRel", 0, 0.45, signed=True),
)
# "inc1": the same operations, each of them stronger with the magnitude.
_STRONGER = {
    "Posterize": Operation("Posterize", 4, -4, whole=True),
    "Solarize": Operation("Solarize", 256, -256, whole=True),
    **{name: Operation(name, 1, 0.9, signed=True) for name in ("Color", "Contrast", "Brightness", "Sharpness")},
}
INCREASING = tuple(_STRONGER.get(operation.name, operation) for operation in PLAIN)
NUMBER = {operation.name: number for number, operation in enumerate(PLAIN)}
IDENTITY = NUMBER["Identity"]
FIRST_MOVE = NUMBER["Rotate"]  # operations from here on move the picture, those before it colour it


@dataclass(frozen=True)
class RandAugment:
    """How RandAugment draws: `layers` operations a picture, each applied with `probability`."""

    magnitude: float = 10.0
    layers: int = 2
    deviation: float = 0.0  # of the magnitude, normal; infinite: uniform from 0 to the magnitude
    increasing: bool = False
    probability: float = 0.5

    @classmethod
    def parse(cls, text: str) -> RandAugment:
        """Read timm's spelling, as in "rand-m9-n2-mstd0.5-inc1-p0.5"; what is left out has timm's default."""
        first, *pieces = text.split("-")
        shape = "'rand-mM-nN-mstdS-incI-pP', each piece at most once, as in 'rand-m9-mstd0.5-inc1'"
        if first != "rand":
            raise UserError(f"rand_augment must look like {shape}; got {text!r}")
        values: dict[str, float] = {}
        for piece in pieces:
            match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", piece)
            if match is None or match[1] in values:
                raise UserError(f"cannot read the piece {piece!r} of rand_augment {text!r}; it must look like {shape}")
            if match[1] not in ("m", "n", "mstd", "inc", "p"):
                raise unknown("piece of rand_augment", match[1], ("m", "n", "mstd", "inc", "p"), f"Write {shape}.")
            values[match[1]] = float(match[2])
        magnitude, layers, increasing = values.get("m", 10.0), values.get("n", 2.0), values.get("inc", 0.0)
        deviation, probability = values.get("mstd", 0.0), values.get("p", 0.5)
        if magnitude > STRONGEST or layers != int(layers) or layers < 1 or increasing not in (0, 1) or probability > 1:
            raise UserError(
                f"rand_augment {text!r}: m must be in [0, {STRONGEST:g}], n a whole number from 1, inc 0 or 1, "
                "p in [0, 1] and mstd at least 0 (above 100: magnitudes uniform up to m)"
            )
        deviation = math.inf if deviation > 100 else deviation
        return cls(magnitude, int(layers), deviation, bool(increasing), probability)


@dataclass(frozen=True)
class Augmentation:
    """Everything a random augmentation may do."""

    size: tuple[int, int]  # (height, width) of the network's input
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: Interpolation
    horizontal_flip: float
    vertical_flip: float
    rand_augment: RandAugment | None
    color_jitter: tuple[float, float, float]  # brightness, contrast, saturation; only without rand_augment, as in timm
    erase_probability: float
    erase_mode: EraseMode
    erase_count: int

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high or (name == "scale" and high > 1):
                limit = "0 < low <= high <= 1" if name == "scale" else "0 < low <= high"
                raise UserError(f"{name} must be (low, high) with {limit}, got {getattr(self, name)}")
        for name in ("horizontal_flip", "vertical_flip", "erase_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is a probability and must be in [0, 1], got {getattr(self, name)}")
        if self.interpolation not in ("random", "bilinear", "bicubic"):
            raise unknown("interpolation", self.interpolation, ("random", "bilinear", "bicubic"))
        if self.erase_mode not in ("pixel", "const"):
            raise unknown("erase_mode", self.erase_mode, ("pixel", "const"))
        if self.erase_count < 1:
            raise UserError(
                f"erase_count must be at least 1, got {self.erase_count}; to erase nothing set erase_probability=0"
            )
        if len(self.color_jitter) != 3 or min(self.color_jitter) < 0:
            raise UserError(
                "color_jitter must be one number or (brightness, contrast, saturation), none below 0, "
                f"got {self.color_jitter}"
            )


class Drawn(NamedTuple):
    """The parameters of n pictures."""

    box: Floats  # (n, 4): left, top, width, height of the crop, in whole pixels of the source
    bicubic: NDArray[np.bool_]  # (n,)
    flips: NDArray[np.bool_]  # (n, 2): horizontal, vertical
    moves: Tensor | None  # (n, 2, 3) float64: RandAugment's, after the flips; None where no picture has any
    operations: Integers  # (n, L): colour operations in order, numbers of PLAIN
    arguments: Floats  # (n, L)
    erased: Integers  # (n, E, 4): top, bottom, left, right in pixels of the crop; empty where bottom is 0


def draw(augmentation: Augmentation, heights: Integers, widths: Integers, rng: np.random.Generator) -> Drawn:
    """Draw for n pictures of these sizes."""
    pictures = len(heights)
    box = draw_crop(heights, widths, augmentation.scale, augmentation.ratio, rng)
    odds = (0.5, augmentation.horizontal_flip, augmentation.vertical_flip)
    coins = rng.random((pictures, 3)) < odds
    if augmentation.interpolation != "random":
        coins[:, 0] = augmentation.interpolation == "bicubic"
    moves = None
    if augmentation.rand_augment is not None:
        operations, arguments = draw_rand_augment(augmentation.rand_augment, pictures, rng)
        moving = operations >= FIRST_MOVE
        if moving.any():
            moves = _moves(operations, arguments, augmentation.size)
            operations = np.where(moving, IDENTITY, operations)
    else:
        operations, arguments = draw_color_jitter(augmentation.color_jitter, pictures, rng)
    erased = draw_erasing(augmentation, pictures, rng)
    return Drawn(box, coins[:, 0], coins[:, 1:], moves, operations, arguments, erased)


def draw_crop(
    heights: Integers,
    widths: Integers,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Floats:
    """(n, 4): left, top, width, height: area uniform in `scale`, width to height log-uniform in `ratio`, place uniform.

    When no attempt fits: the greatest central box whose ratio is allowed.
    """
    tall, wide = heights[:, None], widths[:, None]  # (n, 1)
    area, aspect = _areas_and_aspects(scale, ratio, len(heights), rng)
    area *= tall * wide
    width, height = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    width, height = np.maximum(width, 1), np.maximum(height, 1)  # of tiny pictures
    fits = (width <= wide) & (height <= tall)
    rows, first = np.arange(len(heights)), fits.argmax(axis=1)
    fitting = fits[rows, first]
    width = np.where(fitting, width[rows, first], np.clip(np.rint(heights * ratio[1]), 1, widths))
    height = np.where(fitting, height[rows, first], np.clip(np.rint(widths / ratio[0]), 1, heights))
    place = np.where(fitting[:, None], rng.random((len(heights), 2)), 0.5)
    left = np.floor(place[:, 0] * (widths - width + fitting))
    top = np.floor(place[:, 1] * (heights - height + fitting))
    return np.stack((left, top, width, height), axis=1)


def draw_rand_augment(settings: RandAugment, pictures: int, rng: np.random.Generator) -> tuple[Integers, Floats]:
    """(n, L) numbers of operations (Identity where the coin says no) and (n, L) arguments."""
    shape = (pictures, settings.layers)
    chosen = rng.integers(1, len(PLAIN), size=shape)
    coins = rng.random((2, *shape))
    if math.isinf(settings.deviation):
        magnitude = rng.uniform(0, settings.magnitude, size=shape)
    else:
        magnitude = rng.normal(settings.magnitude, settings.deviation, size=shape)
    table = INCREASING_ARGUMENTS if settings.increasing else PLAIN_ARGUMENTS
    start, span, signed, whole = table[:, chosen]
    amount = span * (np.clip(magnitude, 0, STRONGEST) / STRONGEST)
    amount = np.where(whole > 0, np.trunc(amount), amount)
    amount = np.where((signed > 0) & (coins[0] < 0.5), -amount, amount)
    return np.where(coins[1] < settings.probability, chosen, IDENTITY), start + amount


def draw_color_jitter(
    strengths: tuple[float, float, float], pictures: int, rng: np.random.Generator
) -> tuple[Integers, Floats]:
    """(n, L), (n, L): brightness, contrast and saturation, in a random order, each factor uniform about 1."""
    used = [place for place, strength in enumerate(strengths) if strength > 0]
    kinds = np.array([NUMBER[name] for name in ("Brightness", "Contrast", "Color")])[used]
    order = rng.permuted(np.broadcast_to(np.arange(len(used)), (pictures, len(used))), axis=1)
    strength = np.array(strengths)[used][order]
    return kinds[order], rng.uniform(np.maximum(0, 1 - strength), 1 + strength)


def draw_erasing(augmentation: Augmentation, pictures: int, rng: np.random.Generator) -> Integers:
    """(n, E, 4): top, bottom, left, right; the number of boxes uniform from 1 to E, the area shared among them."""
    (height, width), most = augmentation.size, augmentation.erase_count
    erased = np.zeros((pictures, most, 4), dtype=np.int64)
    hit = np.flatnonzero(rng.random(pictures) < augmentation.erase_probability)
    if len(hit) == 0:
        return erased
    count = rng.integers(1, most + 1, size=len(hit)).repeat(most)  # (h * E,)
    area, aspect = _areas_and_aspects(ERASED_AREA, ERASED_ASPECT, len(count), rng)
    area *= height * width / count[:, None]
    tall, wide = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    rows, first = np.arange(len(count)), fits.argmax(axis=1)
    tall, wide, fitting = tall[rows, first], wide[rows, first], fits[rows, first]
    place = rng.random((len(count), 2))
    top = np.floor(place[:, 0] * (height - tall + 1))
    left = np.floor(place[:, 1] * (width - wide + 1))
    used = fitting & (rows % most < count)
    boxes = np.where(used[:, None], np.stack((top, top + tall, left, left + wide), axis=1), 0)
    erased[hit] = boxes.reshape(len(hit), most, 4)
    return erased


def _areas_and_aspects(
    area: tuple[float, float], aspect: tuple[float, float], count: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Two (count, ATTEMPTS): areas uniform, ratios of the sides log-uniform."""
    uniform = rng.random((2, count, ATTEMPTS))
    low, high = math.log(aspect[0]), math.log(aspect[1])
    return area[0] + (area[1] - area[0]) * uniform[0], np.exp(low + (high - low) * uniform[1])


def _moves(operations: Integers, arguments: Floats, size: tuple[int, int]) -> Tensor:
    """(n, 2, 3): the layers' moves one after the other. Shears leave the top left corner in place, as timm's do."""
    total = geometry.identity().double().expand(len(operations), 2, 3)
    for numbers, values in zip(operations.T, arguments.T, strict=True):
        for name, move in _MOVES.items():
            chosen = numbers == NUMBER[name]
            if chosen.any():
                total = geometry.compose(total, move(torch.from_numpy(np.where(chosen, values, 0.0)), size))
    return total


_MOVES: dict[str, Callable[[Tensor, tuple[int, int]], Tensor]] = {
    "Rotate": geometry.rotate,
    "ShearX": lambda amount, size: geometry.shear(amount, 0.0, size, centre=(0.0, 0.0)),
    "ShearY": lambda amount, size: geometry.shear(0.0, amount, size, centre=(0.0, 0.0)),
    "TranslateXRel": lambda share, size: geometry.translate(_whole_pixels(share, size[1]), 0.0),
    "TranslateYRel": lambda share, size: geometry.translate(0.0, _whole_pixels(share, size[0])),
}


def _whole_pixels(share: Tensor, side: int) -> Tensor:
    """A shift by whole pixels moves them as they are: no blur, and much quicker."""
    return (share * side).round() / side


def _argument_table(operations: tuple[Operation, ...]) -> Floats:
    """(4, operations): start, span, signed, whole."""
    return np.array([operation[1:] for operation in operations], dtype=np.float64).T


PLAIN_ARGUMENTS = _argument_table(PLAIN)
INCREASING_ARGUMENTS = _argument_table(INCREASING)
