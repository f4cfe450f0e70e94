"""A run so small that it takes a second: 96 scenes of 32 px, a two-block ViT."""

from __future__ import annotations

import shlex
from typing import Any

from alltokens.engine.config import RunConfig
from alltokens.engine.loading import build

TINY = {
    "model": {
        "name": "vit_tiny_patch16_224",
        "drop_path": 0.2,
        "options": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "data": {"root": "scenes", "image_size": 32, "train_pictures": 96, "val_pictures": 40, "workers": 0},
    "augment": {"scale": [0.5, 1.0], "rand_augment": None, "erase_probability": 0.25, "crop_fraction": 1.0},
    "supervision": {"mixer": {"name": "mixup+cutmix", "probability": 0.8}},
    "optimizer": {"lr": 1e-3, "clip_norm": 1.0},
    "schedule": {"warmup_epochs": 1},
    "train": {"epochs": 3, "batch_size": 16, "ema_decay": 0.9, "device": "cpu"},
    "log": {"every_steps": 4},
}


def tiny_config(**sections: dict[str, Any]) -> RunConfig:
    """tiny_config(train={"epochs": 1}) is TINY with these settings laid over it."""
    merged = {key: {**TINY.get(key, {}), **sections.get(key, {})} for key in {*TINY, *sections}}
    return build(RunConfig, merged, "tiny")


# The same as a command; --run-dir comes behind it.
COMMAND = shlex.split(
    "train quickstart_class --train.epochs 1 --train.batch_size 16 --train.device cpu --schedule.warmup_epochs 0 "
    "--data.image_size 32 --data.train_pictures 64 --data.val_pictures 20 --log.every_steps 1 "
    "--model.name vit_tiny_patch16_224 --model.options '{patch_size: 8, embed_dim: 24, depth: 1, num_heads: 2}'"
)
