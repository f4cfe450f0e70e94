"""`alltokens bench data`: whether the pictures keep up with the training.

On one core of the CPU, each beside timm: the training transform, and the loader (read, decode, transform, collate). On
a GPU: a training step fed by the device cache beside the same step on one fixed batch.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm.data
import torch
from PIL import Image

from alltokens.bench.results import Row, of_timing
from alltokens.bench.timing import Step, Timing, compare
from alltokens.data.datasets import PictureDataset, Sample, load_picture
from alltokens.data.loader import training_loader
from alltokens.data.sampler import EpochSampler
from alltokens.data.sources import open_scenes, open_source
from alltokens.data.transforms import TrainTransform
from alltokens.engine.config import RunConfig
from alltokens.engine.feeding import open_feed
from alltokens.engine.recipes import load_recipe, overlay
from alltokens.engine.run_folder import RunFolder
from alltokens.engine.runs import prepare
from alltokens.engine.runtime import start_runtime
from alltokens.engine.trainer import Trainer

SIZE = 224
PICTURES = 64  # of the CPU's comparisons
DRAWN = 400  # side of the pictures that are drawn where none are given: about ImageNet's
BATCH = 16
# Not 9, as in DeiT: timm then asks Pillow now and then for pictures of 0 bits, which newer ones refuse.
RAND_AUGMENT = "rand-m7-mstd0.5-inc1"
AT_MOST = 1.0  # our time over timm's
RECIPE = "imagenette"  # a small ViT, where the feed counts most
SLOWEST = 1 / 0.9  # a fed step over a fixed one


def bench_data(
    root: str | None = None,
    *,
    rounds: int | None = None,
    compiled: bool = True,
    settings: Mapping[str, object] | None = None,
    device: torch.device | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """The CPU's rows always, the device cache's on a GPU. `root` are the pictures; without it scenes are drawn."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = _on_one_core(root, rounds, progress)
    if device.type == "cuda":
        rows += _cached(root, rounds, compiled, settings or {}, progress)
    return rows


# --- one core ---


def _on_one_core(root: str | None, rounds: int | None, progress: Callable[[str], None]) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            pictures = _pictures(root)
            for index, picture in enumerate(pictures):
                place = Path(folder, str(index % 2))
                place.mkdir(exist_ok=True)
                picture.save(place / f"{index}.jpg", quality=90)
            sides = f"{pictures[0].width}x{pictures[0].height}"
            rows: list[Row] = []
            for mode, arms in {"transform": _transforms(pictures), "loader": _loaders(folder)}.items():
                timings = compare(
                    arms,
                    torch.device("cpu"),
                    rounds=rounds or 15,
                    steps=len(pictures) // BATCH,
                    warmup=1,
                    progress=lambda text, mode=mode: progress(f"{mode}: {text}"),
                )
                name = f"{Path(root).name if root else 'scenes'} {sides}"
                rows += _rows(name, SIZE, BATCH, "fp32", mode, torch.device("cpu"), timings, AT_MOST)
            return rows
    finally:
        torch.set_num_threads(threads)


def _pictures(root: str | None) -> list[Image.Image]:
    source = open_scenes(PICTURES, DRAWN) if root is None else open_source(root, "train")
    step = max(1, len(source) // PICTURES)
    return [load_picture(source, index) for index in range(0, len(source), step)][:PICTURES]


def _timm_transform() -> Any:
    """timm's for the same augmentation: RandAugment, random interpolation, random erasing."""
    return timm.data.create_transform(
        SIZE,
        is_training=True,
        auto_augment=RAND_AUGMENT,
        interpolation="random",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
    )


def _transforms(pictures: Sequence[Image.Image]) -> dict[str, Callable[[], Step]]:
    theirs, ours = _timm_transform(), TrainTransform(SIZE, rand_augment=RAND_AUGMENT)

    def arm(transform: Callable[[Image.Image], object]) -> Callable[[], Step]:
        def build() -> Step:
            torch.manual_seed(0)
            endless = itertools.cycle(pictures)

            def step() -> None:
                for picture in itertools.islice(endless, BATCH):
                    transform(picture)

            return step

        return build

    return {"timm": arm(theirs), "alltokens": arm(ours)}


def _loaders(folder: str) -> dict[str, Callable[[], Step]]:
    def theirs() -> Step:
        dataset = timm.data.create_dataset("", folder, is_training=True)
        dataset.transform = _timm_transform()
        loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, drop_last=True)
        return _next_of(_repeated(lambda: loader))

    def ours() -> Step:
        dataset = PictureDataset(folder, TrainTransform(SIZE, rand_augment=RAND_AUGMENT))
        sampler = EpochSampler(len(dataset), BATCH, seed=0)
        loader = training_loader(dataset, sampler, workers=0, pin_memory=False)
        return _next_of(_repeated(lambda: loader))

    return {"timm": theirs, "alltokens": ours}


def _repeated(epoch: Callable[[], object]) -> Iterator[object]:
    while True:
        yield from epoch()  # pyright: ignore[reportGeneralTypeIssues]


def _next_of(batches: Iterator[object]) -> Step:
    return lambda: next(batches)


# --- the device cache ---


def cached_config(root: str | None, compiled: bool, settings: Mapping[str, object]) -> RunConfig:
    """The recipe with its pictures in the device cache; scenes of the same size and number where none are given."""
    data: dict[str, object] = {"root": root} if root else {"root": "scenes", "train_pictures": 9469}
    given = {"data": {**data, "cache": "device"}, "train": {"compile": "on" if compiled else "off"}}
    return overlay(overlay(load_recipe(RECIPE), given, "bench data"), settings, "bench data")


def _cached(
    root: str | None,
    rounds: int | None,
    compiled: bool,
    settings: Mapping[str, object],
    progress: Callable[[str], None],
) -> list[Row]:
    progress("decoding all pictures")
    config = cached_config(root, compiled, settings)
    runtime = start_runtime(config.train)
    feed = open_feed(config, runtime)
    step, optimizer, generator = prepare(config, runtime, feed, weights_from=None)
    trainer = Trainer(config, runtime, RunFolder(Path("unused")), feed, step, optimizer, generator)
    trainer.step.train()
    fixed = next(feed.batches(0, 0))
    batches = _epochs(feed.batches)
    arms: dict[str, Callable[[], Step]] = {
        "fixed batch": lambda: lambda: trainer.update([fixed]),
        "device cache": lambda: lambda: trainer.update([next(batches)]),
    }
    timings = compare(
        arms, runtime.device, rounds=rounds or 15, steps=feed.updates_per_epoch, warmup=12, progress=progress
    )
    mode = "eager" if config.train.compile == "off" else "compiled"
    name = f"{config.model.name}, patch {config.model.options.get('patch_size', 16)}"
    size, batch, precision = config.data.image_size, config.train.batch_size, config.train.precision
    return _rows(name, size, batch, precision, mode, runtime.device, timings, SLOWEST)


def _epochs(batches: Callable[[int, int], Iterator[Sample]]) -> Iterator[Sample]:
    for epoch in itertools.count():
        yield from batches(epoch, 0)


def _rows(
    model: str,
    size: int,
    batch: int,
    precision: str,
    mode: str,
    device: torch.device,
    timings: dict[str, Timing],
    at_most: float,
) -> list[Row]:
    first = next(iter(timings))
    return [
        Row(
            bench="data",
            **of_timing(timing, batch, device),
            model=model,
            image_size=size,
            batch=batch,
            precision=precision,
            mode=mode,
            arm=arm,
            peak_mib=timing.peak_mib,
            peak_ratio=None,
            at_most=None if arm == first else at_most,
            peak_at_most=None,
        )
        for arm, timing in timings.items()
    ]
