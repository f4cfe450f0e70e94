"""The MixPlan: who each sample is mixed with, and which share of every place comes from that partner.

Shapes: B batch, H and W picture (pixels), h and w token grid.

`partner_share`, a number in [0, 1], is the one quantity of a mix: per pixel it is the mask, per token the mask's mean
over the token's pixels, per sample the mean over the picture. The mixed value of any place is
`(1 - partner_share) * own + partner_share * partner`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from alltokens.core.transfer import sent_ahead
from alltokens.errors import UserError

Place = Literal["pixels", "embedding"]


@dataclass(frozen=True)
class MixPlan:
    """How one batch is mixed. Lives on the device of the batch."""

    partner: Tensor  # (B,) int64: index of the sample that is mixed in
    mask: Tensor  # (B|1, H, W) float in [0, 1]: the partner's share of every pixel
    place: Place = "pixels"  # where the mix happens: in the picture, or after the patch embedding

    def __post_init__(self) -> None:
        if self.partner.ndim != 1 or self.partner.dtype != torch.int64:
            raise UserError(
                f"partner must be a (B,) int64 tensor, got {tuple(self.partner.shape)} of {self.partner.dtype}"
            )
        if self.mask.ndim != 3 or self.mask.shape[0] not in (1, len(self.partner)):
            raise UserError(
                f"mask must be (1, H, W) or ({len(self.partner)}, H, W), one per sample of the batch, "
                f"got {tuple(self.mask.shape)}"
            )
        if not self.mask.is_floating_point():
            raise UserError(f"mask must be floating point (the partner's share per pixel), got {self.mask.dtype}")
        if self.place not in ("pixels", "embedding"):
            raise UserError(f"place must be 'pixels' or 'embedding', got {self.place!r}")

    @classmethod
    def from_box(
        cls,
        partner: Tensor,
        box: Tensor | tuple[int, int, int, int],
        image_size: tuple[int, int],
        place: Place = "pixels",
    ) -> MixPlan:
        """Paste the partner inside a box (top, bottom, left, right) in pixels; (B, 4) is a box per sample."""
        height, width = image_size
        box = torch.as_tensor(box, device=partner.device).reshape(-1, 4, 1)  # (B|1, 4, 1)
        top, bottom, left, right = box.unbind(1)
        rows = torch.arange(height, device=partner.device)
        columns = torch.arange(width, device=partner.device)
        in_rows = (rows >= top) & (rows < bottom)  # (B|1, H)
        in_columns = (columns >= left) & (columns < right)  # (B|1, W)
        return cls(partner, (in_rows[:, :, None] & in_columns[:, None, :]).float(), place)

    @classmethod
    def identity(cls, batch: int, image_size: tuple[int, int], place: Place = "pixels") -> MixPlan:
        """The plan that mixes nothing: every sample is its own partner and takes no share of it."""
        return cls(torch.arange(batch), torch.zeros(1, *image_size), place)

    @property
    def image_size(self) -> tuple[int, int]:
        return self.mask.shape[1], self.mask.shape[2]

    @property
    def share(self) -> Tensor:
        """(B,): the partner's share of each whole picture."""
        return self.mask.mean(dim=(1, 2)).expand(len(self.partner))

    def token_share(self, grid: tuple[int, int]) -> Tensor:
        """(B, h, w): the partner's share of each token; a token that the box's edge splits gets its exact ratio.

        The picture is cut into h x w equal parts, whether or not they fall on whole pixels.
        """
        height, width = self.image_size
        rows = _overlap(height, grid[0], self.mask)  # (h, H)
        columns = _overlap(width, grid[1], self.mask)  # (w, W)
        return (rows @ self.mask @ columns.T).clamp(0, 1).expand(len(self.partner), *grid)

    def to(self, device: torch.device | str) -> MixPlan:
        """On `device`; the host does not wait for what the device still has to do."""
        return replace(self, partner=sent_ahead(self.partner, device), mask=sent_ahead(self.mask, device))

    def then(self, other: MixPlan) -> MixPlan:
        """The one plan that does what mixing by `self` and then mixing the results by `other` does.

        Both must have the same partners, and partners must be mutual (i's partner has i as its own): then only two
        pictures are ever in a sample, and one share still says everything. The result's place is the later one's.
        """
        if not torch.equal(self.partner, other.partner):
            raise UserError("plans compose only when both have the same partners")
        mutual = self.partner[self.partner]
        if not torch.equal(mutual, torch.arange(len(self.partner), device=self.partner.device)):
            raise UserError("plans compose only when partners are mutual (as the default, the flipped batch, is)")
        mine = self.mask.expand(len(self.partner), *self.image_size)
        # A partner's mixed picture holds the share 1 - mask of the partner itself: that is what `other` pastes.
        pasted = 1 - mine[self.partner]
        mask = torch.lerp(mine, pasted, other.mask.expand_as(mine))
        shared = self.mask.shape[0] == other.mask.shape[0] == 1
        return MixPlan(self.partner, mask[:1] if shared else mask, other.place)


def flipped_partner(batch: int, device: torch.device | str | None = None) -> Tensor:
    """(B,): sample i is mixed with sample B-1-i, as timm and the published programs do (FACTS section 1)."""
    return torch.arange(batch - 1, -1, -1, device=device)


def _overlap(size: int, parts: int, like: Tensor) -> Tensor:
    """(parts, size): which fraction of each of `parts` equal stretches lies on each of `size` pixels; rows sum to 1."""
    edges = torch.arange(parts + 1, device=like.device, dtype=torch.float64) * (size / parts)
    pixel = torch.arange(size, device=like.device, dtype=torch.float64)
    low = torch.maximum(edges[:-1, None], pixel)
    high = torch.minimum(edges[1:, None], pixel + 1)
    return ((high - low).clamp(min=0) * (parts / size)).to(like.dtype)
