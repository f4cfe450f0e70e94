"""Drawing mixes, and applying them.

Shapes: B batch, C channels, H and W picture, h and w grid of patches.

Every `draw_*` returns a MixPlan on the CPU and takes all its randomness from `generator`: one 63-bit number per call,
which seeds a numpy generator (torch has no beta distribution that takes a generator). The partner of sample i is
sample B-1-i. `per_sample=True` draws a mask for every sample, otherwise the batch shares one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from alltokens.core.draws import numpy_generator
from alltokens.core.plan import MixPlan, Place, flipped_partner
from alltokens.errors import UserError

Size = int | tuple[int, int]


def mix_images(images: Tensor, plan: MixPlan) -> Tensor:
    """(B, C, H, W) -> a new (B, C, H, W): each picture with its partner's share of every pixel."""
    if plan.place != "pixels":
        raise UserError("this plan mixes after the patch embedding, not pictures; see mix_embeddings")
    if images.shape[-2:] != plan.image_size or len(images) != len(plan.partner):
        raise UserError(
            f"a plan for {len(plan.partner)} pictures of {plan.image_size[0]}x{plan.image_size[1]} "
            f"cannot mix a batch of shape {tuple(images.shape)}"
        )
    mask = plan.mask.unsqueeze(1).to(images.dtype)  # (B|1, 1, H, W)
    # lerp is exact where the mask is 0 or 1: a pasted pixel is the partner's, bit by bit.
    return torch.lerp(images, images[plan.partner], mask)


def draw_mixup(
    batch: int,
    image_size: Size,
    alpha: float = 0.8,
    *,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """MixUp: every pixel, and so every token, takes the same share, drawn from Beta(alpha, alpha)."""
    rng = numpy_generator(generator)
    size = _pair(image_size, "image_size")
    share = _beta(rng, alpha, batch if per_sample else 1)
    mask = torch.tensor(share, dtype=torch.float32)[:, None, None].expand(-1, *size)
    return MixPlan(flipped_partner(batch), mask)


def draw_cutmix(
    batch: int,
    image_size: Size,
    alpha: float = 1.0,
    *,
    patch_size: Size | None = None,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """CutMix: a box of the partner, its area drawn from Beta(alpha, alpha), its centre anywhere, clipped at the edges.

    `patch_size` snaps the box to that grid, so that no patch is split (as the published TL-Align draws it, FACTS 3.2).
    """
    size = _pair(image_size, "image_size")
    patch = _pair(patch_size if patch_size is not None else 1, "patch_size")
    return _draw_box(batch, size, patch, alpha, per_sample, generator, place="pixels")


def draw_mixtoken(
    batch: int,
    image_size: Size,
    alpha: float = 1.0,
    *,
    patch_size: Size,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """MixToken: CutMix's box on the grid of patches, mixed after the patch embedding (FACTS section 1)."""
    size, patch = _pair(image_size, "image_size"), _pair(patch_size, "patch_size")
    return _draw_box(batch, size, patch, alpha, per_sample, generator, place="embedding")


def draw_random_mix(
    batch: int,
    image_size: Size,
    alpha: float = 1.0,
    *,
    patch_size: Size,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """Patches anywhere, as MAE masks them: their number from Beta(alpha, alpha), every set equally likely."""

    def patches(rng: np.random.Generator, grid: tuple[int, int]) -> np.ndarray:
        cells = grid[0] * grid[1]
        chosen = np.zeros(cells, dtype=bool)
        chosen[rng.permutation(cells)[: round(float(_beta(rng, alpha, 1)[0]) * cells)]] = True
        return chosen.reshape(grid)

    return _draw_patches(batch, image_size, patch_size, per_sample, generator, patches)


def draw_block_mix(
    batch: int,
    image_size: Size,
    alpha: float = 1.0,
    *,
    patch_size: Size,
    min_patches: int = 16,
    min_aspect: float = 0.3,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> MixPlan:
    """Blocks of patches, as BEiT masks them: rectangles are laid over one another until the drawn number is reached.

    The number of patches comes from Beta(alpha, alpha). A block has at least `min_patches` patches (or all that are
    still missing) and a height to width ratio between `min_aspect` and its inverse; the last one is cut to fit.
    """
    if min_patches < 1 or not 0 < min_aspect <= 1:
        raise UserError(f"min_patches must be at least 1 and min_aspect in (0, 1], got {min_patches}, {min_aspect}")

    def patches(rng: np.random.Generator, grid: tuple[int, int]) -> np.ndarray:
        chosen = np.zeros(grid, dtype=bool)
        wanted = round(float(_beta(rng, alpha, 1)[0]) * chosen.size)
        while (missing := wanted - int(chosen.sum())) > 0:
            area = rng.uniform(min(min_patches, missing), missing)
            aspect = math.exp(rng.uniform(math.log(min_aspect), -math.log(min_aspect)))
            height = int(np.clip(round(math.sqrt(area * aspect)), 1, grid[0]))
            width = int(np.clip(round(math.sqrt(area / aspect)), 1, grid[1]))
            top, left = rng.integers(grid[0] - height + 1), rng.integers(grid[1] - width + 1)
            block = np.zeros_like(chosen)
            block[top : top + height, left : left + width] = True
            rows, columns = np.nonzero(block & ~chosen)
            chosen[rows[:missing], columns[:missing]] = True
        return chosen

    return _draw_patches(batch, image_size, patch_size, per_sample, generator, patches)


def _draw_box(
    batch: int,
    size: tuple[int, int],
    patch: tuple[int, int],
    alpha: float,
    per_sample: bool,
    generator: torch.Generator | None,
    place: Place,
) -> MixPlan:
    rng = numpy_generator(generator)
    grid = _grid(size, patch)
    count = batch if per_sample else 1
    side = np.sqrt(_beta(rng, alpha, count))  # the box's side over the picture's, the same for both axes
    box = np.empty((count, 4), dtype=np.int64)
    for axis in (0, 1):
        length = np.rint(grid[axis] * side).astype(np.int64)
        # The published programs cut twice half the side rounded down: never an odd length, and on a grid of 14 patches
        # a noticeably smaller share than was drawn (FACTS 3.2). Here every length can come.
        low = rng.integers(grid[axis], size=count) - length // 2
        box[:, 2 * axis] = np.clip(low, 0, grid[axis]) * patch[axis]
        box[:, 2 * axis + 1] = np.clip(low + length, 0, grid[axis]) * patch[axis]
    return MixPlan.from_box(flipped_partner(batch), torch.as_tensor(box), size, place)


def _draw_patches(
    batch: int,
    image_size: Size,
    patch_size: Size,
    per_sample: bool,
    generator: torch.Generator | None,
    patches: Callable[[np.random.Generator, tuple[int, int]], np.ndarray],
) -> MixPlan:
    rng = numpy_generator(generator)
    size, patch = _pair(image_size, "image_size"), _pair(patch_size, "patch_size")
    grid = _grid(size, patch)
    chosen = np.stack([patches(rng, grid) for _ in range(batch if per_sample else 1)])  # (B|1, h, w)
    mask = torch.as_tensor(chosen).float()
    mask = mask.repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)  # (B|1, H, W)
    return MixPlan(flipped_partner(batch), mask)


def _beta(rng: np.random.Generator, alpha: float, count: int) -> np.ndarray:
    if not alpha > 0:
        raise UserError(f"alpha must be above 0, got {alpha}; to mix nothing use the mixer 'none' or a probability")
    return rng.beta(alpha, alpha, size=count)


def _pair(size: Size, name: str) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if min(pair) < 1:
        raise UserError(f"{name} must be positive, got {size}")
    return pair


def _grid(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    if size[0] % patch[0] or size[1] % patch[1]:
        raise UserError(f"pictures of {size[0]}x{size[1]} do not divide into patches of {patch[0]}x{patch[1]}")
    return size[0] // patch[0], size[1] // patch[1]
