"""What the tests of transforms and of their operations share."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image

MOVES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


def noise_picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(20, 230, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same_distribution(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Kolmogorov and Smirnov: 1.95 is passed once in a thousand times by equal ones (the draws are fixed by seed)."""
    everything = np.concatenate((ours, theirs))
    below_ours = np.searchsorted(np.sort(ours), everything, side="right") / len(ours)
    below_theirs = np.searchsorted(np.sort(theirs), everything, side="right") / len(theirs)
    assert np.abs(below_ours - below_theirs).max() < 1.95 * math.sqrt(1 / len(ours) + 1 / len(theirs))
