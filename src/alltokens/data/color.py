"""The colour operations of augmentation, for PIL pictures and for batches of tensors.

Shapes: ... any leading dimensions, B batch, H and W picture, V = 256 levels.

For pictures PIL has them all. For batches, each picture with its own operation, all but two are a table of 256 levels
per channel, computed from the argument and from what the picture holds (its extremes, its mean, its histogram); the
other two, Color and Sharpness, move towards (or away from) a grey or a smoothed picture. Both forms agree to a level.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageEnhance, ImageOps
from torch import Tensor

from alltokens.data.augment import NUMBER, PLAIN

LEVELS = 256


def recolor(picture: Image.Image, operation: int, argument: float) -> Image.Image:
    """One colour operation, by its number in `augment.PLAIN`, on an RGB picture."""
    name = PLAIN[operation].name
    return picture if name == "Identity" else _OF_PICTURES[name](picture, argument)


_OF_PICTURES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "AutoContrast": lambda picture, _: ImageOps.autocontrast(picture),
    "Equalize": lambda picture, _: ImageOps.equalize(picture),
    "Invert": lambda picture, _: ImageChops.invert(picture),
    # ImageOps.posterize refuses 0 bits, which the greatest magnitude asks for: a black picture.
    "Posterize": lambda picture, bits: picture.point([v >> (8 - int(bits)) << (8 - int(bits)) for v in range(256)] * 3),
    "Solarize": lambda picture, threshold: ImageOps.solarize(picture, int(threshold)),
    "SolarizeAdd": lambda picture, added: picture.point(
        [min(255, v + int(added)) if v < 128 else v for v in range(256)] * 3
    ),
    "Color": lambda picture, factor: ImageEnhance.Color(picture).enhance(factor),
    "Contrast": lambda picture, factor: ImageEnhance.Contrast(picture).enhance(factor),
    "Brightness": lambda picture, factor: ImageEnhance.Brightness(picture).enhance(factor),
    "Sharpness": lambda picture, factor: ImageEnhance.Sharpness(picture).enhance(factor),
}


def recolor_batch(images: Tensor, operations: Tensor, arguments: Tensor, equalized: Tensor) -> Tensor:
    """(B, 3, H, W) uint8, one operation (B,) and argument (B,) each -> a new batch; no sample waits for the host.

    `equalized` holds the rows that Equalize is for, the only ones whose histograms are made, filled up with B.
    """
    # Extremes are taken of numbers, not of bytes: what torch 2.15 compiles for amin of uint8 on a CPU is wrong.
    pixels = images.float()
    red, green, blue = images.int().unbind(1)  # (B, H, W) each
    gray = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16  # PIL's weights, in 1/65536
    argument = arguments[:, None]  # (B, 1)
    mean = gray.float().mean(dim=(1, 2)).add(0.5).floor()[:, None]  # (B, 1)
    tables = _levels(images.device).expand(*images.shape[:2], LEVELS)  # (B, 3, V)
    candidates = {
        "AutoContrast": autocontrast_table(pixels.amin(dim=(2, 3)), pixels.amax(dim=(2, 3))),
        "Equalize": _equalize_tables(images, equalized),
        "Contrast": contrast_table(mean, argument),
        **{name: table(argument) for name, table in _TABLES.items()},
    }
    for name, candidate in candidates.items():
        tables = torch.where((operations == NUMBER[name])[:, None, None], candidate, tables)
    colored = tables.gather(2, images.flatten(2).long()).view(images.shape).float()
    is_color = (operations == NUMBER["Color"])[:, None, None, None]
    blended = is_color | (operations == NUMBER["Sharpness"])[:, None, None, None]
    away = torch.where(is_color, gray[:, None].float(), _smooth(pixels))
    factor = torch.where(blended, arguments[:, None, None, None], 1.0)
    away = torch.where(blended, away, colored)
    return _whole((colored - away).mul_(factor).add_(away)).to(torch.uint8)


def invert_table(argument: Tensor) -> Tensor:
    return (LEVELS - 1 - _levels(argument.device)).expand(*argument.shape, LEVELS)


def posterize_table(bits: Tensor) -> Tensor:
    """(...) bits kept -> (..., V). 0 bits keep nothing: a black picture."""
    step = torch.exp2(8 - bits.clamp(0, 8))[..., None].int()
    return _levels(bits.device) // step * step


def solarize_table(threshold: Tensor) -> Tensor:
    """(...) -> (..., V): levels from the threshold on are inverted."""
    levels = _levels(threshold.device)
    return torch.where(levels < threshold[..., None], levels, LEVELS - 1 - levels)


def solarize_add_table(added: Tensor) -> Tensor:
    """(...) -> (..., V): the dark half of the levels is made lighter."""
    levels = _levels(added.device)
    return torch.where(levels < 128, (levels + added[..., None].int()).clamp(max=LEVELS - 1), levels)


def brightness_table(factor: Tensor) -> Tensor:
    return _whole(factor[..., None] * _levels(factor.device))


def contrast_table(mean: Tensor, factor: Tensor) -> Tensor:
    """(...) the rounded mean of the grey picture, (...) -> (..., V): away from that mean, or towards it."""
    return _whole(mean[..., None] + factor[..., None] * (_levels(mean.device) - mean[..., None]))


def autocontrast_table(low: Tensor, high: Tensor) -> Tensor:
    """(...) darkest and lightest level -> (..., V): stretched over all levels; one single level stays."""
    low, high = low[..., None].int(), high[..., None].int()
    levels = _levels(low.device)
    stretched = ((levels - low) * (LEVELS - 1)).clamp(min=0) // (high - low).clamp(min=1)
    return torch.where(high > low, stretched.clamp(max=LEVELS - 1), levels)


def equalize_table(histogram: Tensor) -> Tensor:
    """(..., V) counts -> (..., V): as many pixels below as the level says. Too few pixels, or levels: as it was.

    The lightest level that occurs does not count (PIL's rule, after ImageMagick's).
    """
    histogram = histogram.int()
    levels = _levels(histogram.device)
    lightest = torch.where(histogram > 0, levels, 0).amax(dim=-1, keepdim=True)
    step = (histogram.sum(dim=-1, keepdim=True) - histogram.gather(-1, lightest.long())) // (LEVELS - 1)
    below = histogram.cumsum(dim=-1) - histogram
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=LEVELS - 1).int()
    return torch.where(step > 0, table, levels)


_TABLES = {
    "Invert": invert_table,
    "Posterize": posterize_table,
    "Solarize": solarize_table,
    "SolarizeAdd": solarize_add_table,
    "Brightness": brightness_table,
}


def _levels(device: torch.device) -> Tensor:
    return torch.arange(LEVELS, dtype=torch.int32, device=device)


def _whole(values: Tensor) -> Tensor:
    """New values -> levels as PIL makes them of a blend: clipped, then cut (not rounded) to whole numbers."""
    return values.clamp_(0, LEVELS - 1).int()


def _equalize_tables(images: Tensor, rows: Tensor) -> Tensor:
    """(B, 3, H, W), (R,) -> (B, 3, V): the equalizing tables of those rows; rows of number B lead nowhere."""
    batch = len(images)
    some = images[rows.clamp(max=batch - 1)].flatten(2).long()  # (R, 3, H * W)
    planes = torch.arange(3 * len(rows), device=images.device).view(-1, 3, 1)
    places = (some + LEVELS * planes).flatten()
    histogram = torch.zeros(3 * len(rows) * LEVELS, dtype=torch.int32, device=images.device)
    histogram = histogram.scatter_add(0, places, torch.ones_like(places, dtype=torch.int32)).view(-1, 3, LEVELS)
    tables = _levels(images.device).repeat(batch + 1, 3, 1)
    return tables.index_copy(0, rows, equalize_table(histogram))[:batch]


def _smooth(pixels: Tensor) -> Tensor:
    """(B, 3, H, W) float32 levels -> the mean of 3 x 3 pixels, the middle one counting 5 times; edges stay."""
    inner = pixels[..., 1:-1, 1:-1]
    # In place on the new sum: on a GPU these passes cost what their memory costs.
    smoothed = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1).add_(inner, alpha=4)
    return pixels + F.pad(smoothed.div_(13).add_(0.5).floor_().sub_(inner), (1, 1, 1, 1))
