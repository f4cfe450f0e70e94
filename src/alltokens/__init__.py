"""Train vision transformers with a true label for every token."""

from alltokens.core.losses import blend_targets, smooth_one_hot, soft_cross_entropy
from alltokens.core.mixing import (
    draw_block_mix,
    draw_cutmix,
    draw_mixtoken,
    draw_mixup,
    draw_random_mix,
    mix_images,
)
from alltokens.core.plan import MixPlan
from alltokens.errors import UnsupportedModel, UserError
from alltokens.version import __version__

__all__ = [
    "MixPlan",
    "UnsupportedModel",
    "UserError",
    "__version__",
    "blend_targets",
    "draw_block_mix",
    "draw_cutmix",
    "draw_mixtoken",
    "draw_mixup",
    "draw_random_mix",
    "mix_images",
    "smooth_one_hot",
    "soft_cross_entropy",
]
