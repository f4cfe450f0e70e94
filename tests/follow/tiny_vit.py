"""A ViT that takes a moment, and what it is followed by."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from alltokens.follow.tl_align import TLAlign
from tests.follow.test_families import sharp

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "num_classes": 5}


def tiny(depth: int = 3, **options) -> VisionTransformer:
    return sharp(lambda: VisionTransformer(depth=depth, **TINY, **options), torch.float32)


def followed(model: nn.Module, images, plan, run=None, **options) -> TLAlign:
    aligner = TLAlign(model, **options)
    try:
        with aligner.follow(plan):
            (run or model)(images)
    finally:
        aligner.detach()
    return aligner
