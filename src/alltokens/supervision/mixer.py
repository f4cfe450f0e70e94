"""Which mix a batch gets: a mixer is a small value that draws a MixPlan.

Shapes: B batch, H and W picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from alltokens.core.mixing import Size, draw_block_mix, draw_cutmix, draw_mixtoken, draw_mixup, draw_random_mix
from alltokens.core.plan import MixPlan
from alltokens.errors import UserError, unknown

MIXERS = ("none", "mixup", "cutmix", "mixup+cutmix", "random", "block", "mixtoken")
ON_PATCHES = ("random", "block", "mixtoken")  # these need a patch size


@dataclass(frozen=True)
class Mixer:
    """How two pictures are mixed, and how often.

    `probability` is the chance that anything is mixed, `switch_probability` the chance that mixup+cutmix takes CutMix.
    `then_mixup` is the chance that MixUp, by `mixup_alpha`, comes on top of a mix of places (Token Labeling, table 3).
    With `per_sample` every sample has its own mix, and all chances are drawn for each sample.
    """

    name: str = "none"
    alpha: float = 1.0
    mixup_alpha: float = 0.8
    patch_size: int | None = None  # cutmix: snap to this grid; random, block, mixtoken: the patch, else the model's
    probability: float = 1.0
    switch_probability: float = 0.5
    then_mixup: float = 0.0
    per_sample: bool = False

    def __post_init__(self) -> None:
        if self.name not in MIXERS:
            raise unknown("mixer", self.name, MIXERS)
        for name in ("probability", "switch_probability", "then_mixup"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"the mixer's {name} must lie in [0, 1], got {value}")
        for name, value in (("alpha", self.alpha), ("mixup_alpha", self.mixup_alpha)):
            if not value > 0:
                raise UserError(f"the mixer's {name} must be above 0, got {value}")
        if self.then_mixup and self.name in ("none", "mixup", "mixup+cutmix"):
            raise UserError(f"then_mixup puts MixUp on top of a mix of places; the mixer {self.name} is none")

    @property
    def active(self) -> bool:
        return self.name != "none" and self.probability > 0

    def draw(self, batch: int, image_size: Size, generator: torch.Generator | None = None) -> MixPlan:
        """A plan on the CPU; all randomness comes from `generator`."""
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
        if not self.active:
            return MixPlan.identity(batch, size)
        plan = self._draw_always(batch, size, generator)
        if self.then_mixup:
            mixup = draw_mixup(batch, size, self.mixup_alpha, per_sample=self.per_sample, generator=generator)
            on_top = self._coin(self.then_mixup, batch, generator)
            plan = plan.then(replace(mixup, mask=torch.where(on_top, mixup.mask, 0.0), place=plan.place))
        if self.probability < 1:
            keep = self._coin(self.probability, batch, generator)
            plan = replace(plan, mask=torch.where(keep, plan.mask, torch.zeros(())))
        return plan

    def _draw_always(self, batch: int, size: tuple[int, int], generator: torch.Generator | None) -> MixPlan:
        each = self.per_sample
        if self.patch_size is None and self.name in ON_PATCHES:
            raise UserError(f"the mixer {self.name} mixes whole patches: tell it the patch_size, in pixels")
        patch = self.patch_size or 1
        match self.name:
            case "mixup":
                return draw_mixup(batch, size, self.alpha, per_sample=each, generator=generator)
            case "cutmix":
                return draw_cutmix(batch, size, self.alpha, patch_size=patch, per_sample=each, generator=generator)
            case "random":
                return draw_random_mix(batch, size, self.alpha, patch_size=patch, per_sample=each, generator=generator)
            case "block":
                return draw_block_mix(batch, size, self.alpha, patch_size=patch, per_sample=each, generator=generator)
            case "mixtoken":
                return draw_mixtoken(batch, size, self.alpha, patch_size=patch, per_sample=each, generator=generator)
            case _:
                mixup = draw_mixup(batch, size, self.mixup_alpha, per_sample=each, generator=generator)
                cutmix = draw_cutmix(batch, size, self.alpha, patch_size=patch, per_sample=each, generator=generator)
                use_cutmix = self._coin(self.switch_probability, batch, generator)
                return replace(mixup, mask=torch.where(use_cutmix, cutmix.mask, mixup.mask))

    def _coin(self, probability: float, batch: int, generator: torch.Generator | None) -> torch.Tensor:
        """(B|1, 1, 1) bool: true with the given chance."""
        count = batch if self.per_sample else 1
        device = generator.device if generator is not None else "cpu"
        return torch.rand(count, 1, 1, generator=generator, device=device).cpu() < probability
