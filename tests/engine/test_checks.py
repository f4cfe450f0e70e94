import re

import pytest

from alltokens.engine.checks import check
from alltokens.engine.config import RunConfig
from alltokens.engine.loading import build
from alltokens.errors import UserError


def config(path, value):
    """The defaults, with one setting changed: config('train.epochs', 3)."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return build(RunConfig, value, "test")


def test_the_defaults_are_sound():
    check(RunConfig())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.epochs", 0),
        ("train.batch_size", -1),
        ("train.accumulate", 0),
        ("train.ema_decay", 1.0),
        ("data.image_size", 0),
        ("data.num_classes", 0),
        ("data.workers", -1),
        ("augment.repeats", 0),
        ("augment.horizontal_flip", 1.5),
        ("augment.erase_probability", -0.1),
        ("augment.scale", [0.0, 1.0]),
        ("augment.ratio", [2.0, 1.0]),
        ("augment.crop_fraction", 0.0),
        ("supervision.smoothing", 1.0),
        ("supervision.mixer.alpha", 0.0),
        ("supervision.mixer.probability", 2.0),
        ("supervision.mixer.switch_probability", -1.0),
        ("supervision.mixer.patch_size", 0),
        ("model.drop_path", 1.0),
        ("optimizer.lr", 0.0),
        ("optimizer.lr", "nan"),
        ("optimizer.weight_decay", -1.0),
        ("optimizer.weight_decay", "nan"),
        ("optimizer.betas", [0.9, 1.0]),
        ("optimizer.eps", 0.0),
        ("optimizer.momentum", -0.5),
        ("augment.std", [0.2, 0.0, 0.2]),
        ("optimizer.clip_norm", 0.0),
        ("optimizer.layer_decay", 0.0),
        ("schedule.min_lr", -1e-5),
        ("evaluation.every_epochs", 0),
        ("checkpoint.every_minutes", 0.0),
        ("log.every_steps", 0),
    ],
)
def test_a_setting_out_of_range_is_named(path, value):
    with pytest.raises(UserError, match=re.escape(path)):
        check(config(path, value))


@pytest.mark.parametrize(
    ("path", "value", "near"),
    [
        ("model.name", "deit_smal_patch16_224", "deit_small_patch16_224"),
        ("model.name", "resnet5O", "resnet50"),
        ("optimizer.name", "adamww", "adamw"),
    ],
)
def test_an_unknown_name_gets_its_nearest_match(path, value, near):
    with pytest.raises(UserError, match=f"{value}.*Did you mean '{near}'"):
        check(config(path, value))


def test_a_pretrained_tag_and_a_local_folder_are_names_of_models():
    check(config("model.name", "vit_tiny_patch16_224.augreg_in21k"))
    check(config("model.name", "local-dir:runs/mine/weights/best"))


def test_warmup_must_leave_time_to_train():
    values = {"train": {"epochs": 5}, "schedule": {"warmup_epochs": 5}}
    with pytest.raises(UserError, match="warmup_epochs"):
        check(build(RunConfig, values, "test"))


@pytest.mark.parametrize("mixer", ["cutmix", "mixup+cutmix", "random", "block"])
def test_snapped_boxes_must_fit_the_picture(mixer):
    values = {"data": {"image_size": 100}, "supervision": {"mixer": {"name": mixer, "patch_size": 16}}}
    with pytest.raises(UserError, match=r"100 does not divide into patches of supervision.mixer.patch_size 16"):
        check(build(RunConfig, values, "test"))


def test_mixup_does_not_mind_patches():
    check(
        build(
            RunConfig, {"data": {"image_size": 100}, "supervision": {"mixer": {"name": "mixup", "patch_size": 16}}}, ""
        )
    )
