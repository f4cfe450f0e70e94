"""What a run's settings must fulfil together, before anything is loaded: each breach its own message."""

from __future__ import annotations

from alltokens.engine.config import RunConfig
from alltokens.errors import UserError, unknown


def check(config: RunConfig) -> None:
    """Raise a UserError for the first setting that cannot work."""
    _ranges(config)
    _supervision(config)
    _model(config)
    _optimizer(config)


def _ranges(config: RunConfig) -> None:
    train, data, augment, mixer = config.train, config.data, config.augment, config.supervision.mixer
    at_least_one = {
        "train.epochs": train.epochs,
        "train.batch_size": train.batch_size,
        "train.accumulate": train.accumulate,
        "data.image_size": data.image_size,
        "data.num_classes": data.num_classes,
        "data.max_pixels": data.max_pixels,
        "data.train_pictures": data.train_pictures,
        "data.val_pictures": data.val_pictures,
        "data.cache_size": data.cache_size,
        "augment.repeats": augment.repeats,
        "augment.erase_count": augment.erase_count,
        "evaluation.every_epochs": config.evaluation.every_epochs,
        "evaluation.batch_size": config.evaluation.batch_size,
        "checkpoint.every_epochs": config.checkpoint.every_epochs,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "log.every_steps": config.log.every_steps,
        "supervision.mixer.patch_size": mixer.patch_size,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    probabilities = {
        "augment.horizontal_flip": augment.horizontal_flip,
        "augment.vertical_flip": augment.vertical_flip,
        "augment.erase_probability": augment.erase_probability,
        "supervision.mixer.probability": mixer.probability,
        "supervision.mixer.switch_probability": mixer.switch_probability,
        "supervision.mixer.then_mixup": mixer.then_mixup,
    }
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name} is a probability: it must lie in [0, 1], got {value}")
    below_one = {
        "supervision.smoothing": config.supervision.smoothing,
        "model.drop_path": config.model.drop_path,
        "train.ema_decay": train.ema_decay or 0.0,
        "optimizer.momentum": config.optimizer.momentum,
        **{f"optimizer.betas[{place}]": beta for place, beta in enumerate(config.optimizer.betas or ())},
    }
    for name, value in below_one.items():
        if not 0 <= value < 1:
            raise UserError(f"{name} must lie in [0, 1), got {value}")
    positive = {
        "optimizer.lr": config.optimizer.lr,
        "supervision.mixer.alpha": mixer.alpha,
        "supervision.mixer.mixup_alpha": mixer.mixup_alpha,
        "optimizer.clip_norm": config.optimizer.clip_norm,
        "train.timeout_minutes": train.timeout_minutes,
        "optimizer.lr_per": config.optimizer.lr_per,
        "checkpoint.every_minutes": config.checkpoint.every_minutes,
        "optimizer.layer_decay": config.optimizer.layer_decay,
        "optimizer.eps": config.optimizer.eps,
        "augment.crop_fraction": augment.crop_fraction,
        "augment.std": min(augment.std),
        "supervision.participation": config.supervision.participation,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise UserError(f"{name} must be above 0, got {value}")
    not_negative = {
        "schedule.warmup_epochs": config.schedule.warmup_epochs,
        "schedule.warmup_lr": config.schedule.warmup_lr,
        "schedule.min_lr": config.schedule.min_lr,
        "schedule.cooldown_epochs": config.schedule.cooldown_epochs,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "data.workers": data.workers or 0,
        "augment.color_jitter": augment.color_jitter,
        "supervision.dense_weight": config.supervision.dense_weight or 0.0,
        "supervision.class_weight": config.supervision.class_weight,
    }
    for name, value in not_negative.items():
        if not value >= 0:
            raise UserError(f"{name} must not be negative, got {value}")
    for name, (low, high) in {"augment.scale": augment.scale, "augment.ratio": augment.ratio}.items():
        if not 0 < low <= high:
            raise UserError(f"{name} must be [low, high] with 0 < low <= high, got [{low}, {high}]")
    if augment.rand_augment is not None:
        from alltokens.data.augment import RandAugment

        RandAugment.parse(augment.rand_augment)
    if config.schedule.warmup_epochs >= train.epochs + config.schedule.cooldown_epochs:
        raise UserError(
            f"schedule.warmup_epochs ({config.schedule.warmup_epochs}) must be fewer than train.epochs ({train.epochs})"
        )
    snapped = mixer.name not in ("none", "mixup") and mixer.patch_size
    if snapped and data.image_size % snapped:
        raise UserError(
            f"data.image_size {data.image_size} does not divide into patches of "
            f"supervision.mixer.patch_size {mixer.patch_size}"
        )


def _supervision(config: RunConfig) -> None:
    chosen, mixer = config.supervision, config.supervision.mixer
    follower = chosen.follower
    for option, belongs in (("layers", "tl_align"), ("drop_path_aware", "tl_align"), ("official", "transmix")):
        if getattr(follower, option) and follower.name != belongs:
            raise UserError(f"supervision.follower.{option} is for the follower {belongs}, not for {follower.name}")
    if follower.residual != "average" and follower.name != "tl_align":
        raise UserError(f"supervision.follower.residual is for the follower tl_align, not for {follower.name}")
    if follower.name != "area" and mixer.name == "none":
        raise UserError(f"the follower {follower.name} needs a mixer: nothing is mixed, so there is nothing to follow")
    if mixer.then_mixup and mixer.name in ("none", "mixup", "mixup+cutmix"):
        raise UserError(f"supervision.mixer.then_mixup puts MixUp on top of a mix of places; {mixer.name} is none")
    if chosen.participation > 1:
        raise UserError(f"supervision.participation is a share: it must lie in (0, 1], got {chosen.participation}")
    if chosen.source == "class":
        for option, what in (("labels", "names a label store"), ("annotator", "makes a label store")):
            if getattr(config.data, option) is not None:
                raise UserError(
                    f"data.{option} {what}, but supervision.source class does not read it: take tokens or relabel"
                )
        for option, default in (("tail", "zero"), ("axes", "right"), ("ground_truth", None)):
            if getattr(chosen, option) != default:
                raise UserError(f"supervision.{option} is for label maps: supervision.source tokens or relabel")
    elif config.data.labels is None and config.data.annotator is None:
        raise UserError(
            f"supervision.source {chosen.source} reads label maps: say where they are with data.labels STORE. "
            "`alltokens annotate --model NAME --data DIR --out STORE` makes them, or data.annotator NAME just before"
        )
    if chosen.participation < 1 and not chosen.is_dense:
        raise UserError("supervision.participation is for a dense loss; dense_weight is 0")
    if chosen.dense_weight == chosen.class_weight == 0:
        raise UserError("supervision.dense_weight and class_weight are both 0: there is nothing to train on")


def _model(config: RunConfig) -> None:
    import timm

    if config.model.name.startswith("local-dir:"):
        return
    architecture = config.model.name.split(".", 1)[0]
    if not timm.is_model(architecture):
        raise unknown("model", config.model.name, timm.list_models(), hint="`alltokens models PATTERN` lists them.")


def _optimizer(config: RunConfig) -> None:
    from timm.optim import list_optimizers  # pyright: ignore[reportPrivateImportUsage]

    names = [str(name) for name in list_optimizers()]
    if config.optimizer.name.lower() not in names:
        raise unknown("optimizer", config.optimizer.name, names)
