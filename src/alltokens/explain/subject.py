"""The model that is looked into, and what goes with it: how pictures become its input, what its classes are called.

Shapes: B pictures, H and W the network's input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from PIL import Image
from torch import Tensor, nn

from alltokens.data.transforms import Color, EvalTransform
from alltokens.engine.assembly import build_eval_transform, build_net
from alltokens.engine.config import RunConfig
from alltokens.engine.run_folder import RunFolder, load_config
from alltokens.errors import UserError, unknown
from alltokens.labels.annotator import create_annotator
from alltokens.labels.class_map import AnnotatorClasses
from alltokens.models.weights import load_weights, read_class_names


class Subject(NamedTuple):
    name: str
    net: nn.Module  # in evaluation mode
    transform: EvalTransform
    class_names: tuple[str, ...]  # empty: not known
    config: RunConfig | None  # of a run
    folder: Path | None = None  # of a run

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


def open_subject(target: str, *, weights: str = "best", options: Mapping[str, Any] | None = None) -> Subject:
    """A run folder, or a model: timm's name, `local-dir:FOLDER`, NAME@WEIGHTS with weights of one's own, NAME@random.

    `weights` are those of a run (best or last), `options` go to timm for a model. What a run or the model's weights
    say of preprocessing holds.
    """
    if (Path(target) / "config.yaml").is_file():
        return open_run(Path(target), weights)
    if Path(target).is_dir():
        raise UserError(f"{target} is a folder, but no run (no config.yaml); timm's weights: local-dir:{target}")
    name, _, given = (target, "", "") if target.startswith("local-dir:") else target.partition("@")
    if given == "random":
        net = _untrained(name, options or {})
    else:
        net = create_annotator(name, weights=given or None, options=options)
    return Subject(target, net.eval(), _transform_of(net), _names_of(net), None)


def open_run(run: Path, weights: str = "best") -> Subject:
    """The network of a run with the weights that it has kept."""
    config = load_config(run)
    if weights not in ("best", "last"):
        raise unknown("weights", weights, ("best", "last"))
    folder = RunFolder(run).weights / weights
    names = read_class_names(folder)
    untrained = dataclasses.replace(config, model=dataclasses.replace(config.model, pretrained=False))
    net = build_net(untrained, len(names))
    load_weights(net, folder)
    transform = build_eval_transform(config.augment, config.data)
    return Subject(run.resolve().name, net.eval(), transform, names, config, run)


def _untrained(name: str, options: Mapping[str, Any]) -> nn.Module:
    if not timm.is_model(name.split(".", 1)[0]):
        raise unknown("model", name, timm.list_models(), hint="`alltokens models PATTERN` lists them.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return timm.create_model(name, pretrained=False, **options)
        except TypeError as error:
            raise UserError(f"the model {name!r} does not take these options: {error}") from None


def _transform_of(net: nn.Module) -> EvalTransform:
    """As the model says that it was trained; its own picture size where it has just one."""
    described: dict[str, Any] = {**timm.models.PretrainedCfg().__dict__, **(getattr(net, "pretrained_cfg", None) or {})}
    embed = getattr(net, "patch_embed", None)
    size = getattr(embed, "img_size", None) or tuple(described["input_size"][-2:])
    return EvalTransform(
        size,
        crop_fraction=described["crop_pct"],
        interpolation="bilinear" if described["interpolation"] == "bilinear" else "bicubic",
        mean=tuple(described["mean"]),
        std=tuple(described["std"]),
    )


def _names_of(net: nn.Module) -> tuple[str, ...]:
    """In words where the model has the classes of ImageNet, as it says itself otherwise."""
    classes = AnnotatorClasses.of(net)
    return tuple(words[0] for words in classes.synonyms) if classes.synonyms and classes.synonyms[0] else classes.names
