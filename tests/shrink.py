"""Any recipe in a form that trains in a second: a quarter of the width, few blocks, 64 px, a few scenes, one thread.

Recipes that read label maps read some of those scenes' own: their truth, and two other classes.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import ResNet
from timm.models.swin_transformer import SwinTransformer

from alltokens.core.label_maps import LabelMap
from alltokens.data.scenes import SCENE_CLASSES
from alltokens.data.sources import open_scenes
from alltokens.engine.assembly import model_arguments
from alltokens.engine.config import RunConfig
from alltokens.engine.loading import parse_yaml, to_yaml
from alltokens.labels.manifest import Description
from alltokens.labels.writer import LabelWriter
from alltokens.models.cost import weightless
from alltokens.models.lvvit import LVViT
from alltokens.models.pvt import DIMS, PyramidVisionTransformer

SIDE = 64
BATCH = 8
PICTURES = 2 * BATCH
GRID = (5, 5)


def shrunken(config: RunConfig) -> RunConfig:
    """The recipe's own mixing, augmentation and schedule on two batches of scenes."""
    reads_maps = config.supervision.source != "class"
    return replace(
        config,
        model=replace(
            config.model, name=_smallest(config), pretrained=False, options=config.model.options | _small(config)
        ),
        data=replace(
            config.data,
            root="scenes",
            train=None,
            val=None,
            image_size=SIDE,
            cache_size=None,
            num_classes=None,
            labels=label_store() if reads_maps else None,
            annotator=None,
            train_pictures=PICTURES,
            val_pictures=BATCH,
            allow_empty_classes=True,
            workers=0,
        ),
        schedule=replace(config.schedule, warmup_epochs=0.0, cooldown_epochs=0.0),
        train=replace(config.train, epochs=1, batch_size=BATCH, precision="fp32", compile="off", device="cpu"),
        evaluation=replace(config.evaluation, every_epochs=1),
        log=replace(config.log, every_steps=1, trackers=()),
        compare=None,
    )


def _smallest(config: RunConfig) -> str:
    """timm's Mixers take neither width nor depth as options."""
    return "mixer_s16_224" if config.model.name.startswith("mixer_") else config.model.name


def _small(config: RunConfig) -> dict[str, Any]:
    model = _look(config.model.name, to_yaml(model_arguments(config)))
    if isinstance(model, SwinTransformer):
        return {"embed_dim": model.embed_dim // 4, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
    if isinstance(model, PyramidVisionTransformer):  # its depths belong to its name
        return {"dims": tuple(dim // 4 for dim in DIMS), "heads": (1, 1, 2, 2)}
    if isinstance(model, MlpMixer):
        return {"mlp_ratio": (0.5, 0.25)}
    if isinstance(model, ResNet):
        return {"layers": (1, 1, 1, 1), "channels": (8, 16, 32, 64), "stem_width": 8}
    heads = model.blocks[0].attn.num_heads
    small_heads = max(1, heads // 4)
    width = model.embed_dim // 4
    depth = max(config.supervision.follower.layers or (2,))  # a recipe that names layers keeps them
    stem = {"stem_channels": 8} if isinstance(model, LVViT) else {}
    return {"embed_dim": width - width % small_heads, "depth": depth, "num_heads": small_heads} | stem


@functools.cache
def _look(name: str, arguments: str) -> Any:
    return weightless(name, **parse_yaml(arguments, name))


@functools.cache
def label_store() -> str:
    """A store for the shrunken recipes' training pictures, gone when the process ends."""
    generator = torch.Generator().manual_seed(0)
    source = open_scenes(PICTURES, SIDE)
    first = torch.from_numpy(source.labels)[:, None, None, None].expand(-1, 1, *GRID)
    others = (first + torch.randint(1, 5, (PICTURES, 2, *GRID), generator=generator).cumsum(1)) % len(SCENE_CLASSES)
    scores = 4 * torch.rand(PICTURES, 3, *GRID, generator=generator).sort(1, descending=True).values
    maps = LabelMap(torch.cat([first, others], 1), scores, torch.zeros(PICTURES, *GRID))
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    described = Description(GRID, 3, len(SCENE_CLASSES), class_names=tuple(SCENE_CLASSES), annotator="made up")
    with LabelWriter(Path(folder.name) / "labels", described) as writer:
        writer.append(list(source.keys), maps)
        return str(writer.finish().path)


_folders: list[tempfile.TemporaryDirectory[str]] = []
