"""How an embedded picture looks: colours, textures, shadows, light.

Shapes: S the picture's side in pixels, h and w the part of it that a thing covers. A canvas has its 3 colours first,
from 0 to 1; bytes with the colours last come out at the very end.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alltokens.data.scenes_layout import BACKGROUND, SCENE_CLASSES, Draws, Field, Sighting, Thing, lay_out, sight, turn

Colour = tuple[float, float, float]
Plane = NDArray[np.floating]

LAYOUT, LOOKS = 0, 1  # what a picture's two streams of random numbers are for


class Paint(NamedTuple):
    colour: Colour
    second: Colour  # of the texture
    accent: Colour | None
    texture: int
    frequency: float
    slant: tuple[float, float]  # the direction in which a texture repeats
    relief: float  # how strongly the light models the edges
    rim: float  # how much darker the edge is
    shadow: float


def draw_scene(seed: int, split: int, index: int, size: int) -> tuple[NDArray[np.uint8], int, NDArray[np.uint8]]:
    """One picture (S, S, 3), the class of its main object, and its class map (S, S)."""
    things, draws = lay_out(Draws(seed, split, index, LAYOUT)), Draws(seed, split, index, LOOKS)
    light_y, light_x = turn(draws.between(-0.75, 0.75))  # from above, up to about 75 degrees to either side
    light = (light_x, -light_y)
    canvas, ground = _background(draws, size)
    class_map = np.full((size, size), BACKGROUND, dtype=np.uint8)
    label = BACKGROUND
    pad = max(1, round(size / 40))
    for thing in things:
        sighting = sight(thing, size, pad)
        class_map[sighting.rows, sighting.columns][sighting.form.outline[pad:-pad, pad:-pad] < 0] = thing.class_id
        if thing.class_id == BACKGROUND:
            paint = _clutter_paint(draws, ground)
        else:
            paint, label = _object_paint(draws, ground, thing.class_id), thing.class_id
        _cast_shadow(canvas, thing, sighting, pad, light, paint.shadow)
        _paint(canvas, thing, sighting, pad, light, paint)
    return _develop(canvas, light, draws), label, class_map


# ------------------------------------------------------------------------------------------------ painting one thing


def _cast_shadow(
    canvas: Plane, thing: Thing, sighting: Sighting, pad: int, light: tuple[float, float], strength: float
) -> None:
    """Darkens what lies away from the light, two pads off; the edge is soft."""
    size = canvas.shape[1]
    top = sighting.rows.start - pad - 2 * round(light[1] * pad)
    left = sighting.columns.start - pad - 2 * round(light[0] * pad)
    height, width = sighting.x.shape
    rows = slice(max(0, -top), max(0, min(height, size - top)))
    columns = slice(max(0, -left), max(0, min(width, size - left)))
    sharpness = thing.pose.scale * min(24, size)
    dark = _cover(sighting.form.outline[rows, columns], sharpness) * np.float32(strength)
    canvas[:, top + rows.start : top + rows.stop, left + columns.start : left + columns.stop] *= 1 - dark


def _paint(canvas: Plane, thing: Thing, sighting: Sighting, pad: int, light: tuple[float, float], paint: Paint) -> None:
    inner = (slice(pad, -pad), slice(pad, -pad))
    sharpness = thing.pose.scale * canvas.shape[1]  # pixels in one unit of the thing's frame
    colour = _texture(paint, sighting.x[inner], sighting.y[inner])
    outline = sighting.form.outline.astype(np.float32)
    # The slope towards the light, from the outline's value one pad further on, models the rounded edge.
    down, right = pad + round(light[1] * pad), pad + round(light[0] * pad)
    inside = outline[inner]
    height, width = inside.shape
    slope = outline[down : down + height, right : right + width] - inside
    edge = 1 - np.minimum(inside * np.float32(-1 / 0.3), 1)  # 1 on the outline, 0 in the flat middle
    shade = slope * edge * np.float32(paint.relief * sharpness / pad) + 1
    shade -= np.maximum(edge * 3 - 2, 0) * np.float32(paint.rim)
    if paint.accent is not None:
        colour = colour + _cover(sighting.form.accent[inner], sharpness) * (_planes(paint.accent) - colour)
    part = canvas[:, sighting.rows, sighting.columns]
    part += _cover(inside, sharpness) * (colour * shade - part)


def _cover(distance: NDArray[np.floating], sharpness: float) -> Plane:
    """How much of each pixel is inside; the outline is one pixel wide where `sharpness` is pixels in a unit."""
    return np.clip(0.5 - distance * sharpness, 0, 1).astype(np.float32)


def _texture(paint: Paint, x: Field, y: Field) -> Plane:
    """The surface's colour (3, h, w), fixed to the object's own frame, so that it turns with it."""
    if paint.texture == 0:  # plain
        return np.broadcast_to(_planes(paint.colour), (3, *x.shape))
    along = (x * paint.slant[0] + y * paint.slant[1]) * paint.frequency
    if paint.texture == 1:  # stripes
        share = _wave(along) * 3 + 0.5
    elif paint.texture == 2:  # dots
        across = (y * paint.slant[0] - x * paint.slant[1]) * paint.frequency
        share = (_wave(along) + _wave(across)) * 4 - 0.6
    elif paint.texture == 3:  # checks
        across = (y * paint.slant[0] - x * paint.slant[1]) * paint.frequency
        share = _wave(along) * _wave(across) * 24 + 0.5
    else:  # from one colour to the other
        share = along / paint.frequency * 0.6 + 0.5
    share = np.clip(share, 0, 1).astype(np.float32)
    return _planes(paint.colour) + share * (_planes(paint.second) - _planes(paint.colour))


def _wave(phase: Field) -> Field:
    """A triangle wave of period 1 between -0.25 and 0.25."""
    return np.abs(phase - np.floor(phase) - 0.5) - 0.25


# ------------------------------------------------------------------------------------------------ colours


def _planes(colour: Colour) -> Plane:
    return np.array(colour, dtype=np.float32)[:, None, None]


def _from_hue(hue: float, saturation: float, value: float) -> Colour:
    def channel(offset: float) -> float:
        sector = (offset + 6 * hue) % 6
        return value - value * saturation * max(0.0, min(sector, 4 - sector, 1.0))

    return channel(5), channel(3), channel(1)


def _near(draws: Draws, colour: Colour, amount: float) -> Colour:
    """A colour beside another: brighter or darker, and a little off in hue."""
    shift = draws.between(-amount, amount)
    red, green, blue = (min(max(part + shift + draws.between(-amount / 3, amount / 3), 0.02), 0.98) for part in colour)
    return red, green, blue


def _apart(draws: Draws, other: Colour, distance: float, usual_hue: float | None = None) -> Colour:
    """A strong colour that can be told from another: the first of a few that is `distance` off, or the last.

    Most are brighter than most grounds. Were either equally often the brighter one, no average of pixels would carry
    a trace of the form, and small networks would stand still for long before they learn anything.
    """
    colour = other
    for _ in range(6):
        value = draws.between(0.65, 1.0) if draws.chance(0.85) else draws.between(0.15, 0.5)
        if usual_hue is not None and draws.chance(0.35):
            hue = usual_hue + draws.between(-0.05, 0.05)
        else:
            hue = draws.between()
        colour = _from_hue(hue, draws.between(0.35, 0.95), value)
        if sum(abs(mine - its) for mine, its in zip(colour, other, strict=True)) > 3 * distance:
            break
    return colour


def _object_paint(draws: Draws, ground: Colour, class_id: int) -> Paint:
    """Each class has a usual hue and a usual texture, kept to by one in three and by one in two of its objects."""
    colour = _apart(draws, ground, 0.28, usual_hue=class_id / len(SCENE_CLASSES))
    second = _near(draws, colour, 0.35) if draws.chance(0.6) else _apart(draws, ground, 0.2)
    accent = _apart(draws, colour, 0.15) if draws.chance(0.85) else None
    return Paint(
        colour,
        second,
        accent,
        texture=class_id % 5 if draws.chance(0.4) else draws.below(5),
        frequency=draws.between(1.6, 3.2),
        slant=turn(draws.between(-1, 1)),
        relief=draws.between(0.2, 0.5),
        rim=draws.between(0.1, 0.5),
        shadow=draws.between(0.3, 0.55),
    )


def _clutter_paint(draws: Draws, ground: Colour) -> Paint:
    colour = _near(draws, ground, 0.25)
    accent = _near(draws, colour, 0.1)
    return Paint(colour, colour, accent, texture=0, frequency=1.0, slant=(1.0, 0.0), relief=0.25, rim=0.2, shadow=0.25)


# ------------------------------------------------------------------------------------------------ background and light


def _background(draws: Draws, size: int) -> tuple[Plane, Colour]:
    """A lit surface (3, S, S), and its mean colour."""
    value = draws.between(0.2, 0.6) if draws.chance(0.85) else draws.between(0.6, 0.9)
    first = _from_hue(draws.between(), draws.between(0.08, 0.45), value)
    second = _near(draws, first, 0.22)
    line = (np.arange(size, dtype=np.float32) + 0.5) / np.float32(size)
    kind = draws.below(5)
    clouds = _noise(draws, size, 3 + draws.below(4))  # (S, S) in [0, 1]
    if kind == 0:  # cloth: two dyes that run into each other
        share = clouds * 1.6 - 0.3
    elif kind == 1:  # a horizon with a rolling edge
        height = draws.between(0.3, 0.7)
        share = (line[:, None] - height + (clouds[:1] - 0.5) * 0.3) * (size / 4) + 0.5
    elif kind == 2:  # boards, each of its own tone, with dark joints
        boards = 3 + draws.below(5)
        tones = draws.array(boards).astype(np.float32)
        place = line * boards
        joint = np.clip((0.5 - np.abs(place - np.floor(place) - 0.5)) * (size / boards) - 0.4, 0, 1)
        across = (tones[place.astype(np.intp)] * joint * 0.9)[:, None] + 0.3 * clouds
        share = across if draws.chance(0.5) else across.T
    elif kind == 3:  # tiles
        tiles = draws.between(2, 5)
        place = line * np.float32(tiles)
        side = np.abs(place - np.floor(place) - 0.5) - 0.25
        share = side[:, None] * side[None, :] * (size / 3) + 0.2 + 0.6 * clouds
    else:  # a wall that darkens towards one side
        share = line[:, None] * draws.between(-0.6, 0.6) + line[None, :] * draws.between(-0.6, 0.6) + clouds
    grain = _noise(draws, size, 16) * 0.16 + 0.92
    share = np.clip(share, 0, 1).astype(np.float32)
    canvas = (_planes(first) + share * (_planes(second) - _planes(first))) * grain
    red, green, blue = canvas.mean(axis=(1, 2)).tolist()
    return canvas, (red, green, blue)


def _develop(canvas: Plane, towards: tuple[float, float], draws: Draws) -> NDArray[np.uint8]:
    """The light's fall-off over the whole picture, the film's grain, and bytes (S, S, 3)."""
    size = canvas.shape[1]
    line = (np.arange(size, dtype=np.float32) + 0.5) / np.float32(size) - np.float32(0.5)
    fall_off = draws.between(0.1, 0.45)
    light = line[None, :] * np.float32(towards[0] * fall_off) + line[:, None] * np.float32(towards[1] * fall_off)
    light += np.float32(draws.between(0.9, 1.1))
    grain = draws.array(size, size).astype(np.float32) - np.float32(0.5)
    picture = canvas * light + grain * np.float32(draws.between(0.02, 0.07))
    return np.clip(picture.transpose(1, 2, 0) * np.float32(255) + np.float32(0.5), 0, 255).astype(np.uint8)


def _noise(draws: Draws, size: int, cells: int) -> Plane:
    """(S, S) in [0, 1]: random values on a lattice of `cells` cells, smoothly joined."""
    lattice = draws.array(cells + 1, cells + 1).astype(np.float32)
    below, share = _lattice_places(size, cells)
    rows = lattice[below] + share[:, None] * (lattice[below + 1] - lattice[below])  # (S, cells + 1)
    left = rows[:, below]
    return left + share * (rows[:, below + 1] - left)


@cache
def _lattice_places(size: int, cells: int) -> tuple[NDArray[np.intp], Plane]:
    place = (np.arange(size) + 0.5) * (cells / size)
    below = place.astype(np.intp)
    share = place - below
    return below, (share * share * (3 - 2 * share)).astype(np.float32)
