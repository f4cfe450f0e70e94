"""Any recipe in a form that trains in a second: a quarter of the width, few blocks, 64 px, a few scenes, one thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import timm
from timm.models.swin_transformer import SwinTransformer

from alltokens.engine.config import RunConfig
from alltokens.models.cost import weightless
from alltokens.models.pvt import DIMS, PyramidVisionTransformer

SIDE = 64
BATCH = 16


def shrunken(config: RunConfig) -> RunConfig:
    """The recipe's own mixing, augmentation and schedule on two batches of scenes. For ViT, Swin and PVT."""
    return replace(
        config,
        model=replace(config.model, pretrained=False, options=config.model.options | _small(config)),
        data=replace(
            config.data,
            root="scenes",
            train=None,
            val=None,
            image_size=SIDE,
            cache_size=None,
            num_classes=None,
            train_pictures=2 * BATCH,
            val_pictures=BATCH,
            allow_empty_classes=True,
            workers=0,
        ),
        schedule=replace(config.schedule, warmup_epochs=0.0, cooldown_epochs=0.0),
        train=replace(config.train, epochs=1, batch_size=BATCH, precision="fp32", compile="off", device="cpu"),
        evaluation=replace(config.evaluation, every_epochs=1),
        log=replace(config.log, every_steps=1, trackers=()),
    )


def _small(config: RunConfig) -> dict[str, Any]:
    options = config.model.options
    model: Any = timm.create_model(config.model.name, **options) if options else weightless(config.model.name)
    if isinstance(model, SwinTransformer):
        return {"embed_dim": model.embed_dim // 4, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
    if isinstance(model, PyramidVisionTransformer):  # its depths belong to its name
        return {"dims": tuple(dim // 4 for dim in DIMS), "heads": (1, 1, 2, 2)}
    heads = model.blocks[0].attn.num_heads
    small_heads = max(1, heads // 4)
    width = model.embed_dim // 4
    depth = max(config.supervision.follower.layers or (2,))  # a recipe that names layers keeps them
    return {"embed_dim": width - width % small_heads, "depth": depth, "num_heads": small_heads}
