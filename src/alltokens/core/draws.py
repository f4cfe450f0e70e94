"""Randomness as an argument: cheap small draws that a torch generator decides."""

from __future__ import annotations

import numpy as np
import torch


def numpy_generator(generator: torch.Generator | None) -> np.random.Generator:
    """A numpy generator seeded with one number out of `generator`, or of torch's own where none is given."""
    device = generator.device if generator is not None else "cpu"
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator, device=device)))
