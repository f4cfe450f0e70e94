"""The model that is looked into, and what goes with it: how pictures become its input, what its classes are called.

Shapes: B pictures, H and W the network's input.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from alltokens.data.transforms import Color, EvalTransform
from alltokens.engine.assembly import build_eval_transform, build_net
from alltokens.engine.config import RunConfig
from alltokens.engine.run_folder import RunFolder, load_config
from alltokens.errors import UserError, unknown
from alltokens.models.weights import CONFIG_FILE, load_weights


class Subject(NamedTuple):
    name: str
    net: nn.Module  # in evaluation mode
    transform: EvalTransform
    class_names: tuple[str, ...]  # empty: not known
    config: RunConfig | None  # of a run

    @property
    def image_size(self) -> tuple[int, int]:
        return self.transform.size

    @property
    def colours(self) -> dict[str, Color]:
        """What the drawing functions need to know of the input."""
        return {"mean": self.transform.mean, "std": self.transform.std}

    def images(self, pictures: Sequence[Image.Image]) -> Tensor:
        """(B, 3, H, W) on the CPU, as the model is evaluated."""
        return torch.stack([self.transform(picture)[0] for picture in pictures])


def open_run(run: Path, weights: str = "best") -> Subject:
    """The network of a run with the weights that it has kept."""
    config = load_config(run)
    if weights not in ("best", "last"):
        raise unknown("weights", weights, ("best", "last"))
    folder = RunFolder(run).weights / weights
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} has no weights yet: the run was stopped before its first evaluation")
    names = tuple(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["label_names"])
    untrained = dataclasses.replace(config, model=dataclasses.replace(config.model, pretrained=False))
    net = build_net(untrained, len(names))
    load_weights(net, folder)
    return Subject(run.resolve().name, net.eval(), build_eval_transform(config.augment, config.data), names, config)
