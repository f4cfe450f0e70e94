"""The ten shapes of the embedded pictures, as signed distances.

Shapes: h and w pixels of the part of a picture that a shape is evaluated on.

A shape takes the coordinates of pixels in its own frame (x right, y down, everything within about 1 of the origin) and
four numbers in [0, 1) that vary it inside its class. It answers two (h, w) distances, negative inside: of its outline,
and of an accent inside it that may be painted in another colour.

This file and scenes_layout.py decide the class maps. They use only + - * / sqrt abs min max floor and comparisons in
float64, on single elements: IEEE 754 fixes the last bit of these, so that every class map is the same, byte by byte, on
every machine. (sin, exp, hypot, sums and matrix products are not: their last bits depend on the machine's libraries.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float64]
Variation = tuple[float, float, float, float]
Point = tuple[float, float]


class Form(NamedTuple):
    outline: Field  # (h, w) signed distance, negative inside
    accent: Field  # (h, w) the same for the part that may have another colour


Shape = Callable[[Field, Field, Variation], Form]


def ring(x: Field, y: Field, v: Variation) -> Form:
    half_width = _mix(0.13, 0.22, v[0])
    band = np.abs(_disc(x, y, 0, 0, 0.78)) - half_width
    stone = _disc(x, y, 0, -0.78, _mix(0.2, 0.32, v[1]))
    return Form(np.minimum(band, stone), stone)


def star(x: Field, y: Field, v: Variation) -> Form:
    points = 5 if v[0] < 0.7 else 6
    # Fold the plane into one arm: `along` is the coordinate on the axis of the nearest tip, `across` the one beside it.
    axes = _DIRECTIONS[points]
    along = x * axes[0][0] + y * axes[0][1]
    for axis_x, axis_y in axes[1:]:
        along = np.maximum(along, x * axis_x + y * axis_y)
    square = x * x + y * y
    across = np.sqrt(np.maximum(square - along * along, 0.0))
    waist = _mix(0.38, 0.5, v[1])
    half_turn_x, half_turn_y = _HALF_TURNS[points]
    run, rise = waist * half_turn_x - 1, waist * half_turn_y
    length = math.sqrt(run * run + rise * rise)
    return Form(((along - 1) * rise - across * run) / length, np.sqrt(square) - _mix(0.2, 0.34, v[2]))


def cross(x: Field, y: Field, v: Variation) -> Form:
    half_width, bar_length = _mix(0.19, 0.28, v[0]), _mix(0.62, 0.9, v[1])
    upright = _box(x, y, 0, 0, half_width, 0.95)
    bar = _box(x, y, 0, _mix(-0.3, 0, v[2]), bar_length, half_width)
    return Form(np.minimum(upright, bar), np.maximum(upright, bar))


def crescent(x: Field, y: Field, v: Variation) -> Form:
    bite = _disc(x, y, _mix(0.36, 0.5, v[0]), _mix(-0.1, 0.1, v[1]), _mix(0.68, 0.76, v[2]))
    return Form(np.maximum(_disc(x, y, 0, 0, 0.95), -bite), _disc(x, y, -0.66, _mix(-0.3, 0.3, v[3]), 0.15))


def arrow(x: Field, y: Field, v: Variation) -> Form:
    neck, half_head = _mix(-0.15, 0.15, v[0]), _mix(0.5, 0.72, v[1])
    head = _convex(x, y, (0, -0.95), (half_head, neck), (-half_head, neck))
    shaft = _box(x, y, 0, 0.4, _mix(0.13, 0.24, v[2]), 0.55)
    return Form(np.minimum(head, shaft), head)


def house(x: Field, y: Field, v: Variation) -> Form:
    eaves, half_width = _mix(-0.25, 0.05, v[0]), _mix(0.55, 0.68, v[1])
    walls = _box(x, y, 0, (eaves + 0.78) / 2, half_width, (0.78 - eaves) / 2)
    roof = _convex(x, y, (0, -0.9), (half_width + 0.18, eaves), (-half_width - 0.18, eaves))
    chimney = _box(x, y, 0.4, -0.55, 0.11, 0.33)
    door = _box(x, y, _mix(-0.3, 0.3, v[2]), 0.54, 0.15, 0.25)
    window = _disc(x, y, 0, eaves - 0.2, 0.15)
    return Form(np.minimum(np.minimum(walls, roof), chimney), np.minimum(door, window))


def fish(x: Field, y: Field, v: Variation) -> Form:
    # The body is the lens between two discs; it is `half_height` high and about 0.75 long to each side.
    half_height = _mix(0.36, 0.48, v[0])
    radius = (0.75 * 0.75 + half_height * half_height) / (2 * half_height)
    body = np.maximum(
        _disc(x, y, -0.2, radius - half_height, radius),
        _disc(x, y, -0.2, half_height - radius, radius),
    )
    spread = _mix(0.36, 0.52, v[1])
    tail = np.maximum(_convex(x, y, (0.2, 0), (0.95, -spread), (0.95, spread)), -_disc(x, y, 1.05, 0, 0.24))
    fin = _convex(x, y, (-0.35, -0.2), (_mix(-0.1, 0.2, v[2]), -half_height - 0.24), (0.2, -0.2))
    eye = _disc(x, y, -0.6, -0.07, 0.105)
    return Form(np.minimum(np.minimum(body, tail), fin), eye)


def mushroom(x: Field, y: Field, v: Variation) -> Form:
    brim, half_foot = _mix(-0.12, 0.12, v[0]), _mix(0.18, 0.32, v[1])
    dome = np.sqrt(x * x + 1.2 * (y - brim) * (y - brim)) - _mix(0.78, 0.92, v[2])
    cap = np.maximum(dome, y - brim)
    stem = _convex(x, y, (-0.2, brim - 0.1), (0.2, brim - 0.1), (half_foot, 0.88), (-half_foot, 0.88))
    return Form(np.minimum(cap, stem), np.maximum(stem, brim - y))


def key(x: Field, y: Field, v: Variation) -> Form:
    bow_radius = _mix(0.36, 0.46, v[0])
    bow = np.abs(_disc(x, y, 0, bow_radius - 0.95, bow_radius * 0.72)) - bow_radius * 0.3
    shaft = _box(x, y, 0, 0.3, 0.11, 0.65)
    reach = _mix(0.22, 0.32, v[1])
    teeth = np.minimum(
        _box(x, y, reach / 2, 0.82, reach / 2 + 0.1, 0.11),
        _box(x, y, reach / 2, _mix(0.42, 0.52, v[2]), reach / 2 + 0.06, 0.1),
    )
    return Form(np.minimum(np.minimum(bow, shaft), teeth), bow)


def hourglass(x: Field, y: Field, v: Variation) -> Form:
    waist, half_width = _mix(0.06, 0.13, v[0]), _mix(0.5, 0.64, v[1])
    slope = (half_width - waist) / 0.8
    height = np.abs(y)
    glass = np.maximum((np.abs(x) - waist - slope * height) / math.sqrt(1 + slope * slope), height - 0.8)
    plates = np.maximum(np.abs(height - 0.82) - _mix(0.08, 0.14, v[2]), np.abs(x) - half_width - 0.1)
    return Form(np.minimum(glass, plates), plates)


SHAPES: dict[str, Shape] = {
    shape.__name__: shape for shape in (ring, star, cross, crescent, arrow, house, fish, mushroom, key, hourglass)
}


def stick(x: Field, y: Field, v: Variation) -> Form:
    """Clutter: a thin stick or blade."""
    outline = _convex(x, y, (-0.06, -1.0), (0.06, -1.0), (_mix(0.02, 0.12, v[0]), 1.0), (_mix(-0.12, -0.02, v[1]), 1.0))
    return Form(outline, outline + 1)


def pebble(x: Field, y: Field, v: Variation) -> Form:
    """Clutter: a round stone."""
    flatness = _mix(1.0, 2.2, v[0])
    return Form(np.sqrt(x * x + flatness * (y * y)) - 0.9, y + 1)


def leaf(x: Field, y: Field, v: Variation) -> Form:
    """Clutter: a pointed leaf with its middle vein."""
    radius = _mix(1.1, 1.6, v[0])
    half = np.maximum(_disc(x, y, radius - 0.4, 0, radius), _disc(x, y, 0.4 - radius, 0, radius))
    return Form(half, np.abs(x) - 0.05)


CLUTTER: tuple[Shape, ...] = (stick, pebble, leaf)


@cache
def unit_scale(shape: Shape) -> float:
    """The scale that gives the shape's middle variation an area of 1, so that size does not tell the classes apart."""
    cells = 96
    line = (np.arange(cells) + 0.5) * (3 / cells) - 1.5
    outline = shape(line[None, :] + 0 * line[:, None], line[:, None] + 0 * line[None, :], (0.5, 0.5, 0.5, 0.5)).outline
    return 1 / math.sqrt(int(np.count_nonzero(outline < 0)) * 9 / (cells * cells))


def _mix(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _disc(x: Field, y: Field, centre_x: float, centre_y: float, radius: float) -> Field:
    x, y = x - centre_x, y - centre_y
    return np.sqrt(x * x + y * y) - radius


def _box(x: Field, y: Field, centre_x: float, centre_y: float, half_width: float, half_height: float) -> Field:
    return np.maximum(np.abs(x - centre_x) - half_width, np.abs(y - centre_y) - half_height)


def _convex(x: Field, y: Field, *corners: Point) -> Field:
    """Inside all the edges; corners run clockwise as seen."""
    outline = None
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        run, rise = x1 - x0, y1 - y0
        length = math.sqrt(run * run + rise * rise)
        across, down = rise / length, run / length
        edge = x * across - y * down - (x0 * across - y0 * down)
        outline = edge if outline is None else np.maximum(outline, edge)
    assert outline is not None
    return outline


def _direction(turn: float) -> Point:
    # Nine digits: far coarser than any library's error, so that the tables are the same everywhere.
    return round(math.sin(2 * math.pi * turn), 9), -round(math.cos(2 * math.pi * turn), 9)


_DIRECTIONS = {points: [_direction(arm / points) for arm in range(points)] for points in (5, 6)}
_HALF_TURNS = {
    points: (round(math.cos(math.pi / points), 9), round(math.sin(math.pi / points), 9)) for points in (5, 6)
}
