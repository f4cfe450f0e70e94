"""Where labels come from: the targets of a batch before anything is mixed.

Shapes: B batch, N = h * w tokens, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from alltokens.core.label_maps import Axes, LabelMap, Tail, sample_class_targets, sample_token_targets
from alltokens.core.losses import smooth_one_hot
from alltokens.core.token_loss import Rule, blend_ground_truth
from alltokens.core.token_targets import TokenTargets
from alltokens.errors import UserError, unknown

SOURCES = ("class", "relabel", "tokens")

SourceName = Literal["class", "relabel", "tokens"]


@dataclass(frozen=True)
class Source:
    """The label of a picture, and of its tokens.

    - `class`: the data set's label, for the picture and for every token;
    - `relabel`: the label map's label of the crop that is seen, likewise;
    - `tokens`: that for the picture, and for every token its own place in the label map.

    smoothing, tail and axes: see `sample_token_targets`. ground_truth: blend what the map says of the picture with the
    data set's label, by a rule of `blend_ground_truth`.
    """

    name: str = "class"
    smoothing: float = 0.0
    tail: Tail = "zero"
    axes: Axes = "right"
    ground_truth: Rule | None = None

    def __post_init__(self) -> None:
        if self.name not in SOURCES:
            raise unknown("source", self.name, SOURCES)
        if not 0 <= self.smoothing < 1:
            raise UserError(f"smoothing must lie in [0, 1), got {self.smoothing}")
        for what, value, allowed in (
            ("tail", self.tail, ("zero", "true")),
            ("axes", self.axes, ("right", "official")),
            ("ground_truth", self.ground_truth, (None, "official", "sensible")),
        ):
            if value not in allowed:
                raise unknown(what, str(value), [str(word) for word in allowed])

    @property
    def reads_maps(self) -> bool:
        return self.name != "class"

    def class_targets(self, batch: Any, num_classes: int) -> Tensor:
        """(B, K): what each whole picture shows."""
        if not self.reads_maps:
            return smooth_one_hot(batch.label, num_classes, self.smoothing)
        maps, matrix = self._maps(batch), batch.matrix
        targets = sample_class_targets(maps, matrix, num_classes, self.smoothing, tail=self.tail, axes=self.axes)
        return targets if self.ground_truth is None else self._blended(targets, batch.label)

    def token_targets(self, batch: Any, class_targets: Tensor, grid: tuple[int, int], num_classes: int) -> TokenTargets:
        """What each token shows."""
        if self.name != "tokens":
            return TokenTargets.of_pictures(class_targets, grid)
        maps, matrix = self._maps(batch), batch.matrix
        return sample_token_targets(maps, matrix, grid, num_classes, self.smoothing, tail=self.tail, axes=self.axes)

    def _blended(self, targets: Tensor, labels: Tensor) -> Tensor:
        assert self.ground_truth is not None
        return blend_ground_truth(targets, labels, self.ground_truth)

    def _maps(self, batch: Any) -> LabelMap:
        maps: Any = getattr(batch, "maps", ())
        if len(maps) == 0:
            raise UserError(
                f"the source {self.name!r} reads label maps, and this batch has none: open the pictures with them, "
                "PictureDataset(pictures, transform, labels=LabelStore.open(...)); `alltokens annotate` makes a store"
            )
        return LabelMap(*maps)
