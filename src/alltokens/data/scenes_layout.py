"""What stands where in an embedded picture: all that its class map depends on.

Shapes: S the picture's side in pixels, h and w the part of it that a thing may cover.

A scene is laid out in fractions of the picture's side, so that the same numbers give the same scene at every size. The
arithmetic keeps to the rule that scenes_shapes.py states, and the random numbers are a stream of their own: how a
picture is coloured cannot move anything in it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from alltokens.data.scenes_shapes import CLUTTER, SHAPES, Field, Form, Shape, Variation, stick, unit_scale

# The class map's id where there is no object. No class can ever have it (maps are uint8), so a background that is taken
# for a class by mistake is an index error, not an eleventh class that passes silently.
BACKGROUND = 255

SCENE_CLASSES: tuple[str, ...] = tuple(SHAPES)

REACH = 1.35  # a thing, stretched and sheared, ends within this distance of its centre (in scales)


class Draws:
    """Random numbers in [0, 1): the upper 53 bits of Philox's raw output.

    numpy promises the raw stream of a bit generator for good, but not what its Generator makes of it. Philox is
    counter-based: seed and split are its key, the picture and what the numbers are for its counter, so that no picture
    depends on another.
    """

    def __init__(self, seed: int, split: int, index: int, purpose: int) -> None:
        key = np.array([seed, split], dtype=np.uint64)
        self._bits = np.random.Philox(key=key, counter=np.array([0, 0, purpose, index], dtype=np.uint64))
        self._ahead: list[float] = []

    def array(self, *shape: int) -> Field:
        raw = np.asarray(self._bits.random_raw(math.prod(shape)), dtype=np.uint64) >> np.uint64(11)
        return (raw.astype(np.float64) * 2.0**-53).reshape(shape)

    def between(self, low: float = 0.0, high: float = 1.0) -> float:
        if not self._ahead:
            self._ahead = self.array(128).tolist()
        return low + (high - low) * self._ahead.pop()

    def below(self, count: int) -> int:
        return int(self.between(0, count))

    def chance(self, probability: float) -> bool:
        return self.between() < probability


class Pose(NamedTuple):
    """A thing's centre and scale in fractions of the picture's side, its turn, and how it is bent out of shape."""

    x: float
    y: float
    scale: float
    cosine: float
    sine: float
    shear: float
    stretch: float
    mirror: float  # 1 or -1


class Thing(NamedTuple):
    class_id: int  # BACKGROUND for clutter
    shape: Shape
    pose: Pose
    variation: Variation


class Sighting(NamedTuple):
    """A thing at a picture's size: the part that it may cover, and its distances there and `pad` pixels around."""

    rows: slice
    columns: slice
    x: Field  # (h + 2 pad, w + 2 pad) coordinates in the thing's own frame
    y: Field
    form: Form


def lay_out(draws: Draws) -> list[Thing]:
    """Clutter and two to four objects of different classes from the back to the front; the last object is the main one.

    The main object shows at least three times the area of any other, is near the middle, little turned, and only a
    stick may be in front of it: a small transformer has to learn the classes from nothing within minutes.
    """
    things = [
        _clutter(draws, CLUTTER[draws.below(len(CLUTTER))], draws.between(0.04, 0.13))
        for _ in range(2 + draws.below(5))
    ]
    classes = list(range(len(SHAPES)))
    sides = [draws.between(0.43, 0.55)]  # the roots of the objects' areas, the main one's first
    centres = [(draws.between(0.43, 0.57), draws.between(0.43, 0.57))]
    for _ in range(1 + draws.below(3)):
        sides.append(sides[0] * draws.between(0.3, 0.42))
        centres.append(_free_place(draws, sides, centres))
    objects: list[Thing] = []
    for side, (x, y) in zip(sides, centres, strict=True):
        class_id = classes.pop(draws.below(len(classes)))
        shape = SHAPES[SCENE_CLASSES[class_id]]
        pose = _pose(draws, x, y, side * unit_scale(shape), max_half_tangent=0.22)  # up to 25 degrees
        objects.append(Thing(class_id, shape, pose, _variation(draws)))
    things += reversed(objects)
    if draws.chance(0.25):
        things.append(_clutter(draws, stick, draws.between(0.15, 0.3)))
    return things


def sight(thing: Thing, size: int, pad: int) -> Sighting:
    pose, half = thing.pose, REACH * thing.pose.scale
    top, bottom = max(0, math.floor((pose.y - half) * size)), min(size, math.ceil((pose.y + half) * size))
    left, right = max(0, math.floor((pose.x - half) * size)), min(size, math.ceil((pose.x + half) * size))
    down = ((np.arange(top - pad, bottom + pad) + 0.5) / size - pose.y)[:, None] / pose.scale
    across = ((np.arange(left - pad, right + pad) + 0.5) / size - pose.x)[None, :] / pose.scale
    y = (down * pose.cosine - across * pose.sine) * pose.stretch
    x = ((across * pose.cosine + down * pose.sine) * pose.mirror + pose.shear * y) / pose.stretch
    return Sighting(slice(top, bottom), slice(left, right), x, y, thing.shape(x, y, thing.variation))


def turn(half_tangent: float) -> tuple[float, float]:
    """Cosine and sine of an angle from the tangent of its half: exact arithmetic where math.cos is not."""
    square = half_tangent * half_tangent
    return (1 - square) / (1 + square), 2 * half_tangent / (1 + square)


def _clutter(draws: Draws, shape: Shape, scale: float) -> Thing:
    pose = _pose(draws, draws.between(), draws.between(), scale, max_half_tangent=0.9)
    return Thing(BACKGROUND, shape, pose, _variation(draws))


def _free_place(draws: Draws, sides: list[float], centres: list[tuple[float, float]]) -> tuple[float, float]:
    """A centre for the last of `sides`: the first of a few that keeps away from the others, or the one farthest off."""
    wanted = draws.between(0.7, 0.85)  # in sums of both sides; near the lower end things overlap
    best, best_room = (0.5, 0.5), -1.0
    for _ in range(8):
        x, y = draws.between(0.08, 0.92), draws.between(0.08, 0.92)
        room = min(
            math.sqrt((x - other_x) * (x - other_x) + (y - other_y) * (y - other_y)) / (sides[-1] + side)
            for side, (other_x, other_y) in zip(sides, centres, strict=False)
        )
        if room > best_room:
            best, best_room = (x, y), room
        if room > wanted:
            break
    return best


def _pose(draws: Draws, x: float, y: float, scale: float, max_half_tangent: float) -> Pose:
    cosine, sine = turn(draws.between(-max_half_tangent, max_half_tangent))
    shear, stretch = draws.between(-0.18, 0.18), draws.between(0.87, 1.15)
    return Pose(x, y, scale, cosine, sine, shear, stretch, mirror=1.0 if draws.chance(0.5) else -1.0)


def _variation(draws: Draws) -> Variation:
    return draws.between(), draws.between(), draws.between(), draws.between()
