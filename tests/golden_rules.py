"""The rules by which the golden numbers' weights and inputs were made: nothing but numpy's old generator and a name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


def golden_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Rule 1: a state dict from {official key: shape}."""
    return {name: torch.from_numpy(np.asarray(_weight(name, tuple(shape)))) for name, shape in shapes.items()}


def golden_input(seed: int, shape: Sequence[int]) -> Tensor:
    """Rule 2: standard normal numbers, used as pictures that are normalised already."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(tuple(shape)).astype(np.float32))


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    """All arrays of a golden `.npz` file."""
    with np.load(GOLDEN / name) as arrays:
        return dict(arrays)


def golden_json(name: str) -> dict:
    return json.loads((GOLDEN / name).read_text())


def official_tl_align_box(seed: int, grid: int = 14) -> tuple[float, tuple[int, int, int, int]]:
    """The published draw for one batch (FACTS 3.2): (own share, box in patches (top, bottom, left, right))."""
    random = np.random.RandomState(seed)
    random.rand()  # whether to mix at all: always
    own_share = random.beta(1.0, 1.0)
    half = int(grid * np.sqrt(1 - own_share)) // 2
    centre = [random.randint(grid), random.randint(grid)]
    edges = [int(np.clip(middle + side * half, 0, grid)) for middle in centre for side in (-1, 1)]
    return own_share, (edges[0], edges[1], edges[2], edges[3])


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = np.random.RandomState(zlib.crc32(name.encode("ascii"))).standard_normal(shape)
    last = name.rsplit(".", 1)[-1]
    if last == "num_batches_tracked":
        return np.zeros(shape, dtype=np.int64)
    if last == "running_mean":
        values = 0.1 * normal
    elif last == "running_var":
        values = 0.5 + np.abs(normal)
    elif last in ("pos_embed", "cls_token", "dist_token"):
        values = 0.2 * normal
    elif last == "bias":
        values = 0.02 * normal
    elif len(shape) == 1:
        values = 1 + 0.1 * normal
    else:
        values = normal / np.sqrt(np.prod(shape[1:]))
    return np.asarray(values, dtype=np.float32)
