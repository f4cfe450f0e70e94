"""From pictures to the labels that are kept, on the device: the best classes at every place, and what the rest weighs.

Shapes: B batch, S side of the picture in pixels (one for each scale), K classes of the annotator, L classes of the
labels, k kept ones, h and w places of the first scale's last feature map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alltokens.labels.annotator import Color, PlaceScores
from alltokens.labels.class_map import ClassMap

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TopLabels(NamedTuple):
    """The label maps of a batch as they are stored, and whether they can be."""

    ids: Tensor  # (B, k, h, w) int32
    scores: Tensor  # (B, k, h, w) float32, falling
    tail: Tensor  # (B, h, w) float32: log-sum-exp of the other L - k classes' scores, -inf if there are none
    usable: Tensor  # (B,) bool: all of them are numbers that float16 can hold


class Labeller(nn.Module):
    """`labeller(pictures) -> TopLabels`, of the same pictures as bytes (B, 3, S, S) in each scale.

    Raw scores are averaged: over the mirrored pictures with `flip`, and over the scales, whose maps are resized to the
    first one's.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        places: PlaceScores,
        class_map: ClassMap,
        *,
        mean: Color,
        std: Color,
        kept: int,
        flip: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.places, self.merge = places, class_map.merging()
        self.kept, self.flip, self.precision = kept, flip, precision
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, pictures: Sequence[Tensor]) -> TopLabels:
        return top_labels(self.scores(pictures), self.kept)

    def scores(self, pictures: Sequence[Tensor]) -> Tensor:
        """(B, L, h, w) float32."""
        total: Tensor | None = None
        for picture in pictures:
            # Planes or pixels, as the model will read them, while they are bytes; then numbers, then in place.
            picture = picture.contiguous(memory_format=self._layout(picture))
            scores = self._seen(picture.float().sub_(self.mean).div_(self.std))
            if total is None:
                total = scores
            else:
                total = total + F.interpolate(scores, total.shape[2:], mode="bilinear", align_corners=False)
        assert total is not None
        return self.merge(total / len(pictures))

    def _layout(self, picture: Tensor) -> torch.memory_format:
        quick = self.precision != "fp32" and picture.is_cuda
        return torch.channels_last if quick else torch.contiguous_format

    def _seen(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, K, h, w) float32."""
        with torch.autocast(images.device.type, PRECISIONS[self.precision], enabled=self.precision != "fp32"):
            scores = self.places(images).float()
            return (scores + self.places(images.flip(3)).float().flip(3)) / 2 if self.flip else scores


def top_labels(scores: Tensor, kept: int) -> TopLabels:
    """The `kept` highest of (B, L, h, w) scores, and the log-sum-exp of all others."""
    scores = scores.permute(0, 2, 3, 1)  # (B, h, w, L), as a head gives them: rows of classes lie together
    best, ids = scores.topk(kept, dim=3)
    tail = scores.scatter(3, ids, -torch.inf).logsumexp(3)
    usable = best.half().isfinite().flatten(1).all(1) & (tail.half() < torch.inf).flatten(1).all(1)
    ids, best = (part.permute(0, 3, 1, 2).contiguous() for part in (ids.int(), best))  # (B, k, h, w)
    return TopLabels(ids, best, tail, usable)
