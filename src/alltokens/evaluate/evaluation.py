"""A run or a model on a set of pictures: top-1, top-5, loss and cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from alltokens.data.datasets import PictureDataset, Sample
from alltokens.data.loader import evaluation_loader
from alltokens.data.sampler import evaluation_indices
from alltokens.data.sources import find_splits, open_source
from alltokens.data.transforms import EvalTransform
from alltokens.engine.assembly import build_eval_transform, build_net
from alltokens.engine.config import DataConfig, RunConfig, TrainConfig
from alltokens.engine.feeding import MOST_WORKERS, open_pictures
from alltokens.engine.metrics import Scores
from alltokens.engine.picture_progress import PictureProgress
from alltokens.engine.run_folder import RunFolder, load_config
from alltokens.engine.runtime import Runtime, start_runtime
from alltokens.engine.together import together
from alltokens.errors import TrainingFailed, UnsupportedModel, UserError, unknown
from alltokens.evaluate.scoring import score
from alltokens.evaluate.token_truth import TokenTruth, class_maps_of, measure, pictures_with_truth
from alltokens.models.cost import gmacs, parameter_count
from alltokens.models.weights import first_line, load_weights, opening_folder, read_class_names
from alltokens.supervision.step import Supervision


class Evaluation(NamedTuple):
    target: str
    data: str
    top1: float  # percent
    top5: float
    loss: float
    pictures: int
    skipped: int  # that could not be read
    classes: int
    parameters: int
    gmacs: float
    image_size: int
    seconds: float
    token_accuracy: float | None = None  # percent, as the two below; where the class of every pixel is known
    pointing: float | None = None
    token_iou: float | None = None


def evaluate(
    target: str,
    *,
    data: str | None = None,
    split: str = "val",
    weights: str = "best",
    batch_size: int | None = None,
    image_size: int | None = None,
    workers: int | None = None,
    precision: str = "fp32",
    device: str = "auto",
    on_bad_picture: str = "error",
    masks: str | None = None,
    quiet: bool = False,
) -> Evaluation | None:
    """Score a run folder, a timm model, or `local-dir:` weights. Exact for any number of processes.

    A run brings its own pictures and transform; `data` names others, whose classes must have the run's names. A model
    needs `data`. All processes take part; the main one gets the result, the others None. A long evaluation says on
    stderr how far it is, unless it is to be `quiet`. Predictions of tokens are scored where their truth is known: on
    scenes, and with trimaps given as `masks` (a folder or tar).
    """
    settings = TrainConfig(precision=precision, device=device)  # type: ignore[arg-type]
    runtime = start_runtime(settings)
    with together(runtime):
        return _evaluated(
            runtime, target, data, split, weights, batch_size, image_size, workers, on_bad_picture, masks, quiet
        )


def _evaluated(
    runtime: Runtime,
    target: str,
    data: str | None,
    split: str,
    weights: str,
    batch_size: int | None,
    image_size: int | None,
    workers: int | None,
    on_bad_picture: str,
    masks: str | None,
    quiet: bool,
) -> Evaluation | None:
    if (Path(target) / "config.yaml").is_file():
        net, source, transform, size = _of_run(Path(target), data, split, weights, image_size)
    else:
        net, source, transform, size = _of_model(target, data, split, image_size)
    with opening_folder(target):  # which may state another size than its model takes
        parameters, cost = parameter_count(net), gmacs(net, size)
    skip = on_bad_picture == "skip"
    dataset = PictureDataset(source, transform, on_bad_picture="mark" if skip else "error")
    per_process = -(-len(source) // runtime.world)
    batch = min(batch_size or 128, per_process)
    loader = evaluation_loader(
        dataset, batch, rank=runtime.rank, world=runtime.world, workers=_workers(workers), pin_memory=False
    )
    step = _prepared(net, len(source.class_names), runtime)
    start = time.perf_counter()
    longest = len(evaluation_indices(len(source), 0, runtime.world))
    with closing(loader), PictureProgress("evaluating", quiet=quiet or not runtime.is_main) as progress:
        scores = _scored(
            step,
            _counted(loader, len(source), runtime.world, progress),
            forwards=-(-longest // batch),
            batch_size=batch,
            image_size=size,
            device=runtime.device,
        )
    seconds = time.perf_counter() - start
    if not runtime.is_main:
        return None
    skipped = len(source) - scores.pictures
    truth = _token_truth(net, source, transform, size, split, masks)
    return Evaluation(
        target, source.location, *scores, skipped, len(source.class_names), parameters, cost, size, seconds, *truth[:3]
    )


def _token_truth(
    net: nn.Module, source: Any, transform: EvalTransform, size: int, split: str, masks: str | None
) -> TokenTruth:
    """None in every part where there is no truth, or where the model has no tokens to ask."""
    drawn = source.location.startswith("scenes:")
    if masks is None and not drawn:
        return TokenTruth(None, None, None)
    class_maps = class_maps_of(source, masks or "scenes", size, split)
    try:
        return measure(net, transform.mean, transform.std, *pictures_with_truth(source, transform, class_maps))
    except UnsupportedModel:
        if masks is not None:
            raise
        return TokenTruth(None, None, None)


def _scored(step: nn.Module, batches: Iterable[Sample], *, batch_size: int, image_size: int, **options: Any) -> Scores:
    try:
        return score(step, batches, batch_size=batch_size, image_size=image_size, **options)
    except torch.OutOfMemoryError:
        raise TrainingFailed(
            f"out of memory with {batch_size} pictures of {image_size} px at a time: a smaller --batch-size helps, "
            "or --precision bf16"
        ) from None


def _counted(batches: Iterable[Sample], total: int, processes: int, progress: PictureProgress) -> Iterator[Sample]:
    """The batches of this process, which is as far as the others are."""
    done = 0
    for batch in batches:
        progress(min(processes * done, total), total)
        yield batch
        done += len(batch.label)


def _of_run(
    run: Path, data: str | None, split: str, weights: str, image_size: int | None
) -> tuple[nn.Module, Any, Any, int]:
    config: RunConfig = load_config(run)
    if image_size is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, image_size=image_size))
    if weights not in ("best", "last"):
        raise unknown("weights", weights, ("best", "last"))
    folder = RunFolder(run).weights / weights
    class_names = read_class_names(folder)
    source = (
        open_pictures(config.data, split, class_names)
        if data is None
        else _opened(data, split, class_names, config.data.image_size)
    )
    untrained = dataclasses.replace(config, model=dataclasses.replace(config.model, pretrained=False))
    net = build_net(untrained, len(class_names))
    load_weights(net, folder)
    return net, source, build_eval_transform(config.augment, config.data), config.data.image_size


def _of_model(name: str, data: str | None, split: str, image_size: int | None) -> tuple[nn.Module, Any, Any, int]:
    architecture = name.removeprefix("local-dir:").split(".", 1)[0]
    if not name.startswith("local-dir:") and not timm.is_model(architecture):
        if "/" in name or Path(name).exists():
            load_config(Path(name))  # which says that this is none, and what runs there are beside it
        raise unknown("run folder or model", name, timm.list_models(), hint="`alltokens models PATTERN` lists models.")
    if data is None:
        raise UserError(f"{name} is a model and no run, so it has no pictures of its own; say which with --data")
    with opening_folder(name):
        return _of_described(name, data, split, image_size)


def _of_described(name: str, data: str, split: str, image_size: int | None) -> tuple[nn.Module, Any, Any, int]:
    try:
        arguments: dict[str, Any] = {"img_size": image_size} if image_size else {}
        net: Any = timm.create_model(name, pretrained=True, **arguments)
    except (RuntimeError, OSError) as error:
        raise UserError(f"{name}: its weights cannot be loaded: {first_line(error)}") from None
    described: dict[str, Any] = net.pretrained_cfg
    size = image_size or described["input_size"][-1]
    source = _opened(data, split, tuple(described.get("label_names") or ()) or None, size)
    if source.class_names and len(source.class_names) != net.num_classes:
        raise UserError(
            f"{name} tells {net.num_classes} classes apart, {source.location} has {len(source.class_names)}"
        )
    transform = EvalTransform(
        size,
        crop_fraction=described["crop_pct"],
        interpolation=described["interpolation"],
        mean=tuple(described["mean"]),
        std=tuple(described["std"]),
    )
    return net, source, transform, size


def _opened(data: str, split: str, class_names: tuple[str, ...] | None, image_size: int) -> Any:
    """The split of that name if the place has splits, else all of it."""
    if data == "scenes":
        return open_pictures(DataConfig(root=data, image_size=image_size), split, class_names)
    has_splits = data.startswith("hfds:") or find_splits(data)
    return open_source(data, split if has_splits else None, class_names=class_names, allow_empty_classes=True)


def _workers(workers: int | None) -> int | None:
    from alltokens.data.loader import default_workers

    return min(default_workers(), MOST_WORKERS) if workers is None else workers


def _prepared(net: nn.Module, classes: int, runtime: Runtime) -> nn.Module:
    step = Supervision(net, num_classes=classes).to(runtime.device)
    return runtime.accelerator.prepare_model(step, evaluation_mode=True)
