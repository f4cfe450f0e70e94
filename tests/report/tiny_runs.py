"""Runs so small that three take a few seconds: two seeds of one setting, and one taught by label maps."""

from __future__ import annotations

from pathlib import Path

import torch

from alltokens.core.label_maps import LabelMap
from alltokens.engine.feeding import open_pictures
from alltokens.engine.runs import train
from alltokens.labels.manifest import Description
from alltokens.labels.writer import LabelWriter
from tests.tiny import tiny_config

LVVIT = {
    "model": {
        "name": "lvvit_t",
        "drop_path": 0.0,
        "options": {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "stem_channels": 8},
    },
    "train": {"epochs": 2, "ema_decay": None},
    "log": {"every_steps": 2},
}


def make_runs(folder: Path) -> list[Path]:
    """aligned-0 and aligned-1 (CutMix, TL-Align), tokens (token labels, MixToken)."""
    runs: list[Path] = []
    for seed in (0, 1):
        chosen = {"mixer": {"name": "cutmix", "patch_size": 8}, "follower": "tl_align"}
        options = LVVIT | {"train": {**LVVIT["train"], "seed": seed}, "supervision": chosen}
        train(tiny_config(**options), run_dir=folder / f"aligned-{seed}", quiet=True)
        runs.append(folder / f"aligned-{seed}")
    taught = {"source": "tokens", "mixer": {"name": "mixtoken"}, "dense_weight": 0.5}
    labels = str(make_labels(folder / "labels"))
    train(
        tiny_config(**LVVIT | {"supervision": taught, "data": {"labels": labels}}),
        run_dir=folder / "tokens",
        quiet=True,
    )
    return [*runs, folder / "tokens"]


def make_labels(path: Path) -> Path:
    """A store over the tiny run's training pictures: the class of each, and a little of the next one, in every cell."""
    source = open_pictures(tiny_config().data, "train")
    first = torch.as_tensor(source.labels).long()
    ids = torch.stack([first, (first + 1) % 10], 1)[:, :, None, None].expand(-1, -1, 4, 4)  # (B, k, h, w)
    scores = torch.tensor([3.0, 1.0])[None, :, None, None].expand(ids.shape)
    writer = LabelWriter(path, Description((4, 4), 2, 10, class_names=source.class_names, annotator="by hand"))
    writer.append(list(source.keys), LabelMap(ids.int(), scores, torch.zeros(len(ids), 4, 4)))
    writer.finish()
    return path
