"""A tiny annotator, pictures for it, and what tests start in processes of their own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from alltokens.data.scenes import render_scenes
from alltokens.labels.annotate import annotate

CLASSES = tuple(f"class{index}" for index in range(10))
OPTIONS = {"image_size": 32, "batch_size": 4, "shard_size": 8, "kept": 3}


class Brittle(nn.Module):
    """A classifier that answers NaN for pictures that are white in the corner."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = timm.create_model("resnet18", num_classes=10, output_stride=8, channels=(8, 8, 8, 16))
        self.num_classes, self.num_features = 10, 16
        self.pretrained_cfg = {"architecture": "brittle", "label_names": CLASSES, "input_size": (3, 32, 32)}
        nn.init.normal_(self.net.fc.weight, std=0.5)

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        broken = (images[:, :, 0, 0] > 2.2).all(1)
        features = self.net.forward_features(images)
        return torch.where(broken[:, None, None, None], torch.nan, features)

    def forward_head(self, features: torch.Tensor) -> torch.Tensor:
        return self.net.forward_head(features)


def write_pictures(folder: Path, count: int = 43) -> None:
    """Class folders; picture 5 is no picture, picture 14 breaks the annotator, and so do all of 24 to 31."""
    scenes = render_scenes(count, 32)
    for index, pixels in enumerate(scenes.pictures):
        path = folder / CLASSES[index % 10] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    keys = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    (folder / keys[5]).write_bytes(b"no picture")
    for key in (keys[14], *keys[24:32]):
        Image.new("RGB", (32, 32), "white").save(folder / key)


def annotate_and_tell(pictures: Path, out: Path, told: Connection) -> None:
    """For a process that is killed: `told` hears of every batch."""
    torch.set_num_threads(1)
    told.send(0)
    annotate(Brittle(), pictures, out, workers=0, progress=lambda done, total: told.send(done), **OPTIONS)
    told.send("done")


def annotate_together(pictures: Path, out: Path, rank: int, world: int) -> None:
    """One of several processes; the first attempt stops in the middle, the second goes on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{out}.meeting", rank=rank, world_size=world)

    def stop(done: int, total: int | None) -> None:
        if done >= 12:
            raise InterruptedError

    try:
        annotate(Brittle(), pictures, out, workers=0, progress=stop, **OPTIONS)
    except InterruptedError:
        dist.barrier()
        assert len(annotate(Brittle(), pictures, out, workers=0, **OPTIONS)) == 33
    dist.destroy_process_group()
