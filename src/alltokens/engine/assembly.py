"""From settings to objects: the network, the training step, the optimizer's target, the transforms.

What a recipe says is turned into plain library calls here and nowhere else; library use needs none of it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import timm
from torch import nn

from alltokens.data.transforms import EvalTransform, TrainTransform
from alltokens.engine.config import AugmentConfig, DataConfig, FollowerConfig, RunConfig
from alltokens.errors import UserError
from alltokens.follow.area import Area
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix
from alltokens.models.token_classifier import TokenClassifier
from alltokens.models.token_output import answers_for_tokens
from alltokens.models.weights import opening_folder
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.source import Source
from alltokens.supervision.step import Follower, Supervision, patch_size, token_grid


def model_arguments(config: RunConfig) -> dict[str, Any]:
    """What timm.create_model gets besides the name and the number of classes."""
    model, image_size = config.model, config.data.image_size
    arguments = dict(model.options)
    if arguments.get("img_size", image_size) not in (image_size, (image_size, image_size), [image_size, image_size]):
        raise UserError(
            f"model.options.img_size is {arguments['img_size']}, data.image_size is {image_size}; state one"
        )
    described = timm.models.get_pretrained_cfg(model.name.removeprefix("local-dir:"), allow_unregistered=True)
    if described is not None and described.fixed_input_size:
        arguments["img_size"] = image_size
    if model.drop_path:
        arguments["drop_path_rate"] = model.drop_path
    if config.supervision.is_dense and timm.models.is_model_in_modules(model.name, ["lvvit"]):
        arguments["dense"] = True
    return arguments


def build_net(config: RunConfig, num_classes: int) -> nn.Module:
    """The network of a recipe, made for its picture size, with a dense head if tokens are trained."""
    arguments, name = model_arguments(config), config.model.name
    try:
        with opening_folder(name):
            net = timm.create_model(name, pretrained=config.model.pretrained, num_classes=num_classes, **arguments)
    except TypeError as error:
        raise UserError(f"the model {name!r} does not take these model.options: {error}") from None
    except (AssertionError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the model {name!r} cannot be built with {arguments or 'its defaults'}: {reason}") from None
    patch, image_size = patch_size(net), config.data.image_size
    if patch and (image_size % patch[0] or image_size % patch[1]):
        low = image_size // patch[0] * patch[0]
        raise UserError(
            f"data.image_size {image_size} is not a multiple of the model's patch, {patch[0]}; "
            f"the nearest that are: {low} and {low + patch[0]}"
        )
    if config.supervision.is_dense and not answers_for_tokens(net):
        return TokenClassifier(net)
    return net


def build_step(net: nn.Module, config: RunConfig, num_classes: int) -> Supervision:
    chosen = config.supervision
    return Supervision(
        net,
        source=Source(
            chosen.source,
            smoothing=chosen.smoothing,
            tail=chosen.tail,
            axes=chosen.axes,
            ground_truth=chosen.ground_truth,
        ),
        mixer=Mixer(**asdict(chosen.mixer)),
        follower=_follower(net, chosen.follower),
        dense_weight=chosen.dense_weight,
        class_weight=chosen.class_weight,
        participation=chosen.participation,
        num_classes=num_classes,
    )


def _follower(net: nn.Module, chosen: FollowerConfig) -> Follower:
    match chosen.name:
        case "tl_align":
            return TLAlign(net, chosen.layers, chosen.residual, chosen.drop_path_aware)
        case "transmix":
            return TransMix(net, official=chosen.official)
        case _:
            return Area(token_grid(net))


def build_train_transform(augment: AugmentConfig, data: DataConfig) -> TrainTransform:
    return TrainTransform(
        data.image_size,
        scale=augment.scale,
        ratio=augment.ratio,
        interpolation=augment.interpolation,
        horizontal_flip=augment.horizontal_flip,
        vertical_flip=augment.vertical_flip,
        rand_augment=augment.rand_augment,
        color_jitter=augment.color_jitter,
        erase_probability=augment.erase_probability,
        erase_mode=augment.erase_mode,
        erase_count=augment.erase_count,
        labels_follow=augment.labels_follow,
        mean=augment.mean,
        std=augment.std,
    )


def build_eval_transform(augment: AugmentConfig, data: DataConfig) -> EvalTransform:
    return EvalTransform(
        data.image_size,
        crop_fraction=augment.crop_fraction,
        mode=augment.evaluation,
        mean=augment.mean,
        std=augment.std,
    )


def preprocessing(config: RunConfig) -> dict[str, Any]:
    """What timm needs to know to feed the model as it was evaluated here."""
    size = config.data.image_size
    return {
        "input_size": [3, size, size],
        "crop_pct": config.augment.crop_fraction,
        "crop_mode": config.augment.evaluation,
        "interpolation": "bicubic",
        "mean": list(config.augment.mean),
        "std": list(config.augment.std),
    }
