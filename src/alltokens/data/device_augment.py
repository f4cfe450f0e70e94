"""The training augmentation for whole batches on an accelerator: for small data sets kept there, decoded.

Shapes: B batch, S and R height and width of the stored pictures, H and W the network's input, L colour layers,
E erased boxes at most.

What is drawn is drawn as for single pictures (augment.draw), on the CPU, and goes over in one transfer; nothing
comes back, so the host never waits. Each pixel is then sampled once, by one matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.core import geometry
from alltokens.core.draws import numpy_generator
from alltokens.core.transfer import sent_ahead
from alltokens.data.augment import NUMBER, Drawn, draw
from alltokens.data.color import recolor_batch
from alltokens.data.transforms import TrainTransform
from alltokens.errors import UserError


class Parameters(NamedTuple):
    """One batch's draws on the device of the pictures."""

    matrix: Tensor  # (B, 2, 3): from the output to the stored picture
    told: Tensor  # (B, 2, 3): that, or without RandAugment's moves where labels shall not follow them
    within: Tensor  # (B, 2, 3): from the output to the crop; outside of it the fill is shown
    operations: Tensor  # (B, L)
    arguments: Tensor  # (B, L)
    erased: Tensor  # (B, E, 4): top, bottom, left, right


class DeviceAugment:
    """`TrainTransform` for a batch of stored pictures, with the same odds and the same results but for resampling.

    Pictures may be stored squashed: with their original sizes given, crops keep their proportions in the original.
    Differences to the picture form: with interpolation "random" the whole batch is bilinear or bicubic; and instead of
    antialiasing by each crop's own size, each output pixel is the mean of n x n samples, n the rounded ratio of the
    stored side to the network's (1 for pictures of 128 at 112).

    `backend` compiles the pixel work ("inductor" on a GPU); None runs it as it is.
    """

    def __init__(self, transform: TrainTransform, backend: str | None = None) -> None:
        self.transform = transform
        self._constants: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._apply = augment_batch
        if backend is not None:
            self._apply = torch.compile(augment_batch, backend=backend, fullgraph=True)

    def __call__(
        self, pictures: Tensor, sizes: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, 3, S, R) uint8 and (B, 2) original height and width -> (B, 3, H, W) float32, (B, 2, 3) float32."""
        if pictures.ndim != 4 or pictures.shape[1] != 3 or pictures.dtype != torch.uint8:
            raise UserError(f"pictures must be (B, 3, H, W) uint8, got {tuple(pictures.shape)} of {pictures.dtype}")
        batch, stored = len(pictures), pictures.shape[2:]
        if sizes is None:
            sizes = torch.tensor(stored).expand(batch, 2)
        if tuple(sizes.shape) != (batch, 2):
            raise UserError(f"sizes must be ({batch}, 2), height and width of each picture, got {tuple(sizes.shape)}")
        if sizes.device.type != "cpu":
            raise UserError("sizes must be on the CPU, where crops are drawn: reading them from a device would wait")
        heights, widths = sizes.numpy().astype(np.int64).T
        rng = numpy_generator(generator)
        augmentation = self.transform.augmentation
        drawn = draw(augmentation, heights, widths, rng)
        noise = None
        if augmentation.erase_probability > 0 and augmentation.erase_mode == "pixel":
            seeded = torch.Generator(pictures.device).manual_seed(int(rng.integers(2**63)))
            noise = torch.randn(batch, 3, *self.transform.size, device=pictures.device, generator=seeded)
        follow_all = self.transform.labels_follow == "all"
        parameters = _parameters(drawn, heights, widths, pictures.device, follow_all)
        images = self._apply(
            pictures,
            parameters,
            _equalized_rows(drawn, pictures.device),
            noise,
            *self._colors(pictures.device),
            size=self.transform.size,
            interpolation="bicubic" if drawn.bicubic[0] else "bilinear",
            moves=augmentation.rand_augment is not None,
            erase=augmentation.erase_probability > 0,
        )
        return images, parameters.told

    def _colors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Fill, mean and std (3, 1, 1) in levels, taken over once: a copy of plain memory would wait for the device."""
        if device not in self._constants:
            mean, std = (255 * torch.tensor(color) for color in (self.transform.mean, self.transform.std))
            fill = torch.tensor(self.transform.fill, dtype=torch.float32)
            self._constants[device] = (_planes(fill, device), _planes(mean, device), _planes(std, device))
        return self._constants[device]


def augment_batch(
    pictures: Tensor,
    parameters: Parameters,
    equalized: Tensor,
    noise: Tensor | None,
    fill: Tensor,
    mean: Tensor,
    std: Tensor,
    *,
    size: tuple[int, int],
    interpolation: str,
    moves: bool,
    erase: bool,
) -> Tensor:
    """(B, 3, S, R) uint8 -> (B, 3, H, W) float32, normalised. Tensors only: can be compiled whole.

    `equalized` (L, X) are the rows to equalize in each layer, see `recolor_batch`; colours are (3, 1, 1), in levels.
    """
    images = sample(pictures, parameters.matrix, size, interpolation)
    if moves:
        x, y = geometry.coordinates(parameters.within, size)  # (B, H, W) each
        inside = ((x - 0.5).abs() <= 0.5) & ((y - 0.5).abs() <= 0.5)
        images = torch.where(inside[:, None], images, fill)
    if len(equalized) > 0:
        images = images.round().to(torch.uint8)
        for layer, rows in enumerate(equalized.unbind(0)):
            images = recolor_batch(images, parameters.operations[:, layer], parameters.arguments[:, layer], rows)
    images = (images - mean).div_(std)
    if erase:
        rows = torch.arange(size[0], device=pictures.device)
        columns = torch.arange(size[1], device=pictures.device)
        top, bottom, left, right = parameters.erased.unsqueeze(-2).unbind(-1)  # (B, E, 1) each
        hit = ((rows >= top) & (rows < bottom))[..., None] & ((columns >= left) & (columns < right))[:, :, None]
        images = torch.where(hit.any(dim=1)[:, None], 0.0 if noise is None else noise, images)
    return images


def sample(pictures: Tensor, matrix: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """(B, 3, S, R) uint8, (B, 2, 3) -> (B, 3, H, W) float32 levels; beyond the edge the edge goes on."""
    per_side = max(1, round(max(pictures.shape[2] / size[0], pictures.shape[3] / size[1])))
    grid = geometry.grid_for(matrix, (size[0] * per_side, size[1] * per_side))
    images = F.grid_sample(pictures.float(), grid, interpolation, "border", align_corners=False)
    if per_side > 1:
        images = F.avg_pool2d(images, per_side)
    return images.clamp_(0, 255) if interpolation == "bicubic" else images  # it overshoots


def _parameters(
    drawn: Drawn, heights: np.ndarray, widths: np.ndarray, device: torch.device, follow_all: bool
) -> Parameters:
    """The draws, packed into one float32 tensor for one transfer. All whole numbers are small: they stay exact."""
    left, top, width, height = drawn.box.T
    box = geometry.crop(
        *(torch.from_numpy(side) for side in (left / widths, top / heights, width / widths, height / heights))
    )
    across, down = torch.from_numpy(drawn.flips).unbind(1)
    within = flipped = geometry.flip(across, down).double()
    if drawn.moves is not None:
        within = geometry.compose(within, drawn.moves)
    batch, layers = drawn.operations.shape
    matrix = geometry.compose(box, within)
    parts = (
        matrix,
        matrix if follow_all else geometry.compose(box, flipped),
        within,
        torch.from_numpy(drawn.operations),
        torch.from_numpy(drawn.arguments),
        torch.from_numpy(drawn.erased),
    )
    packed = torch.cat([part.flatten(1).float() for part in parts], dim=1)
    packed = sent_ahead(packed, device)
    matrix, told, within, operations, arguments, erased = packed.split(
        [6, 6, 6, layers, layers, 4 * drawn.erased.shape[1]], dim=1
    )
    matrix, told, within = (part.view(-1, 2, 3) for part in (matrix, told, within))
    return Parameters(matrix, told, within, operations, arguments, erased.reshape(batch, -1, 4))


def _equalized_rows(drawn: Drawn, device: torch.device) -> Tensor:
    """(L, X): for each layer the rows to equalize, filled up with B.

    X is a multiple of an eighth of the batch, far more than RandAugment draws in a layer (1 in 30): nearly always the
    same, so that nothing is compiled twice.
    """
    batch = len(drawn.operations)
    hits = (drawn.operations == NUMBER["Equalize"]).T  # (L, B)
    step = max(8, -(-batch // 8))
    most = int(hits.sum(axis=1).max(initial=1))
    rows = np.sort(np.where(hits, np.arange(batch), batch), axis=1)  # the hits first
    padded = np.full((len(hits), step * -(-most // step)), batch)
    kept = min(batch, padded.shape[1])
    padded[:, :kept] = rows[:, :kept]
    return sent_ahead(torch.from_numpy(padded), device)


def _planes(color: Tensor, device: torch.device) -> Tensor:
    return color[:, None, None].to(device)
