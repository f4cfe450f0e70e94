"""From a recipe's data settings to the batches of a run, for this process.

Shapes: B batch, C channels, H and W the network's input.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alltokens.data.cache import CachedPictures, cache_evaluation, cache_pictures, device_batches
from alltokens.data.datasets import OnBadPicture, PictureDataset, Sample
from alltokens.data.device_augment import DeviceAugment
from alltokens.data.loader import Loader, default_workers, evaluation_loader, training_loader
from alltokens.data.picture_source import PictureSource, some_of, usable, with_class_names
from alltokens.data.pictures import UnreadablePicture
from alltokens.data.sampler import EpochSampler, evaluation_indices
from alltokens.data.sources import open_scenes, open_source
from alltokens.engine.assembly import build_eval_transform, build_train_transform
from alltokens.engine.config import DataConfig, RunConfig
from alltokens.engine.picture_progress import PictureProgress
from alltokens.engine.run_folder import write_atomically
from alltokens.engine.runtime import Runtime
from alltokens.errors import UserError
from alltokens.labels.store import LabelStore

SCENES = {"train": 6000, "val": 1000}  # how many pictures `data.root: scenes` makes
MOST_WORKERS = 8


@dataclasses.dataclass
class Feed:
    """The pictures of a run, as this process sees them."""

    class_names: tuple[str, ...]
    train_pictures: int
    val_pictures: int
    updates_per_epoch: int
    batches: Callable[[int, int], Iterator[Sample]]
    """(epoch, start_batch) -> this process's training batches from there to the epoch's end."""
    evaluation_batches: Callable[[], Iterable[Sample]]
    evaluation_batch_size: int
    evaluation_forwards: int  # of the process that has the most
    skipped: dict[str, None]  # a line for each unreadable picture met by this process, in order
    pictures: str  # how many, and a hash of their names and labels: the same in all processes
    loaders: tuple[Loader, ...]  # with worker processes; none where everything lies on the device

    def close(self) -> None:
        """End the workers; batches asked for after this start new ones."""
        for loader in self.loaders:
            loader.close()

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def write_skipped(self, file: Path) -> None:
        if self.skipped:
            write_atomically(file, "".join(f"{line}\n" for line in self.skipped).encode("utf-8", "backslashreplace"))


def open_feed(config: RunConfig, runtime: Runtime, shelf: dict[object, Any] | None = None) -> Feed:
    """Open a run's training and validation pictures and check that they fit the recipe.

    A process that trains several times gives the same `shelf` each time: pictures decoded for the device cache stay
    there.
    """
    data, train = config.data, config.train
    shelf = {} if shelf is None else shelf
    places = (data.root, data.train, data.val, data.train_pictures, data.val_pictures, data.image_size)
    sources = _kept(shelf, ("sources", places, data.num_classes), lambda: _open_sources(data, runtime))
    parts = runtime.world * train.accumulate
    if train.batch_size % parts:
        raise UserError(
            f"train.batch_size {train.batch_size} counts over all processes and accumulation steps, so it must be a "
            f"multiple of {runtime.world} x train.accumulate {train.accumulate}"
        )
    if train.batch_size > len(sources["train"]):
        raise UserError(
            f"train.batch_size {train.batch_size} is larger than the data: {len(sources['train'])} training pictures; "
            "state a smaller one"
        )
    labels = _open_labels(config, sources["train"])
    skipped: dict[str, None] = {}
    batch = config.evaluation.batch_size or train.batch_size
    batch = min(-(-batch // runtime.world), -(-len(sources["val"]) // runtime.world))
    loaders: tuple[Loader, ...] = ()
    if data.cache == "device":
        with _saying_how_to_go_on(data):
            sampler, batches, evaluate = _cached(config, runtime, sources, labels, batch, skipped, shelf)
    else:
        sampler, (training, evaluation) = _loaded(config, runtime, sources, labels, batch)
        loaders = (training, evaluation)
        batches, evaluate = (lambda: training), (lambda: evaluation)
    longest = len(evaluation_indices(len(sources["val"]), 0, runtime.world))
    return Feed(
        class_names=sources["train"].class_names,
        train_pictures=sampler.length,
        val_pictures=len(sources["val"]),
        updates_per_epoch=sampler.batches_per_epoch // train.accumulate,
        batches=lambda epoch, start: _watched(_epoch(sampler, batches, epoch, start), skipped, data),
        evaluation_batches=lambda: _watched(evaluate(), skipped, data),
        evaluation_batch_size=batch,
        evaluation_forwards=-(-longest // batch),
        skipped=skipped,
        pictures=f"{sampler.length} + {len(sources['val'])} pictures"
        + (f" ({_fingerprint(sources['train'])}, {_fingerprint(sources['val'])})" if runtime.world > 1 else ""),
        loaders=loaders,
    )


def _fingerprint(source: PictureSource) -> str:
    digest = hashlib.sha256(source.labels.tobytes())
    for key in source.keys:
        digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:8]


TRAVELS = ("pictures", "evaluation", "maps")


def decoded(config: RunConfig, runtime: Runtime, shelf: dict[object, Any]) -> dict[object, Any]:
    """What other processes may start from instead of decoding for themselves; `runtime` is one on the CPU."""
    open_feed(config, runtime, shelf)
    names = {key: key[0] if isinstance(key[0], str) else key[0][0] for key in shelf if isinstance(key, tuple)}
    return {key: shelf[key] for key, name in names.items() if name in TRAVELS}


def open_pictures(data: DataConfig, split: str, class_names: tuple[str, ...] | None = None) -> PictureSource:
    """One split of a recipe's pictures; `class_names` of the training split make the labels of the other agree."""
    named = {"train": data.train, "val": data.val}.get(split)
    wanted = {"train": data.train_pictures, "val": data.val_pictures}.get(split)
    where = named or data.root
    if where is None:
        raise UserError(
            "where are the pictures? Set data.root (a folder with train/ and val/), or data.train and data.val"
        )
    if where == "scenes" and split in SCENES:
        source, wanted = open_scenes(wanted or SCENES[split], data.image_size, split=split), None
    else:
        with PictureProgress("looking for pictures") as progress:
            source = open_source(
                where,
                split if named is None else None,
                class_names=class_names,
                allow_empty_classes=True,
                progress=lambda found: progress(found, None),
            )
    if split == "train" and class_names is None:
        if data.num_classes is not None and data.num_classes != len(source.class_names):
            raise UserError(
                f"data.num_classes is {data.num_classes}, but {source.location} has {len(source.class_names)} classes"
            )
        usable(source, data.allow_empty_classes or where == "scenes")  # a handful of scenes need not show all ten
    return source if wanted is None else some_of(source, wanted)


def _open_sources(data: DataConfig, runtime: Runtime) -> dict[str, PictureSource]:
    if not runtime.is_main:
        runtime.wait()  # the main process renders and caches the scenes
    drawn = (data.train or data.root) == "scenes"
    train = usable(open_pictures(data, "train"), data.allow_empty_classes or drawn)  # train_pictures may lose a class
    val = open_pictures(data, "val", train.class_names)
    if val.class_names != train.class_names:
        val = with_class_names(val, train.class_names)
    if runtime.is_main:
        runtime.wait()
    return {"train": train, "val": val}


def _open_labels(config: RunConfig, source: PictureSource) -> LabelStore | None:
    """The label maps of the training pictures, checked to be theirs; None where the recipe reads none."""
    if config.supervision.source == "class":
        return None
    if config.data.labels is None:
        raise UserError("data.annotator makes label maps in engine.experiment; runs by themselves want data.labels")
    store = LabelStore.open(config.data.labels)
    subset = config.data.train_pictures is not None
    store.check(list(source.keys), class_names=source.class_names, subset=subset)
    if config.supervision.tail == "true" and not store.manifest.tail:
        raise UserError(f"{store.path} holds no tail: supervision.tail true asks for one; annotate anew, or take zero")
    return store


def _workers(data: DataConfig) -> int:
    if data.workers is not None:
        return data.workers
    return min(default_workers(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), MOST_WORKERS)


def _sampler(config: RunConfig, runtime: Runtime, pictures: int) -> EpochSampler:
    return EpochSampler(
        pictures,
        config.train.batch_size // (runtime.world * config.train.accumulate),
        seed=config.train.seed,
        rank=runtime.rank,
        world=runtime.world,
        repeats=config.augment.repeats,
    )


Batches = Callable[[], Iterable[Sample]]


def _loaded(
    config: RunConfig,
    runtime: Runtime,
    sources: dict[str, PictureSource],
    labels: LabelStore | None,
    evaluation_batch: int,
) -> tuple[EpochSampler, tuple[Loader, Loader]]:
    """Batches by loader processes: for training and for evaluation."""
    data, workers, pin = config.data, _workers(config.data), runtime.device.type == "cuda"
    skip = data.on_bad_picture == "skip"
    training = PictureDataset(
        sources["train"],
        build_train_transform(config.augment, data),
        labels=labels,
        max_pixels=data.max_pixels,
        on_bad_picture="skip" if skip else "error",
    )
    evaluation = PictureDataset(
        sources["val"],
        build_eval_transform(config.augment, data),
        max_pixels=data.max_pixels,
        on_bad_picture="mark" if skip else "error",
    )
    sampler = _sampler(config, runtime, len(training))
    train_loader = training_loader(training, sampler, workers=workers, pin_memory=pin)
    val_loader = evaluation_loader(
        evaluation, evaluation_batch, rank=runtime.rank, world=runtime.world, workers=workers, pin_memory=pin
    )
    return sampler, (train_loader, val_loader)


def _cached(
    config: RunConfig,
    runtime: Runtime,
    sources: dict[str, PictureSource],
    labels: LabelStore | None,
    evaluation_batch: int,
    skipped: dict[str, None],
    shelf: dict[object, Any],
) -> tuple[EpochSampler, Batches, Batches]:
    """Everything decoded once, on the device; evaluation pictures after their transform, so exactly as loaded."""
    data, augment, device = config.data, config.augment, runtime.device
    skip = data.on_bad_picture == "skip"
    size = data.cache_size or round(data.image_size * 8 / 7)
    if (data.train or data.root) == "scenes":
        size = data.cache_size or data.image_size  # they are drawn at that size
    workers = _workers(data) if (data.train or data.root) != "scenes" else 0
    same = (data.root, data.train, data.val, data.train_pictures, data.val_pictures, data.image_size, size, skip)
    bad: OnBadPicture = "skip" if skip else "error"

    def decode() -> CachedPictures:
        with PictureProgress("decoding", quiet=not runtime.is_main) as progress:
            return cache_pictures(
                *(sources["train"], size, device),
                workers=workers,
                max_pixels=data.max_pixels,
                on_bad_picture=bad,
                progress=progress,
            )

    cache = _kept_on(device, shelf, ("pictures", same), decode)
    skipped |= dict.fromkeys(cache.trouble)
    maps = None
    if labels is not None:
        maps = _kept_on(device, shelf, ("maps", same, data.labels), lambda: labels.read(list(cache.keys)))
    sampler = _sampler(config, runtime, len(cache))
    backend = "inductor" if config.train.compile not in ("off", "aot_eager") else None
    transform = _kept(
        shelf,
        ("augmentation", augment, data.image_size, backend),
        lambda: DeviceAugment(build_train_transform(augment, data), backend=backend),
    )
    seen = (same, augment.crop_fraction, augment.evaluation, evaluation_batch)

    def decode_evaluation() -> list[Sample]:
        with PictureProgress("decoding", quiet=not runtime.is_main) as progress:
            return cache_evaluation(
                *(sources["val"], build_eval_transform(augment, data), evaluation_batch, device),
                rank=runtime.rank,
                world=runtime.world,
                workers=workers,
                max_pixels=data.max_pixels,
                on_bad_picture="mark" if skip else "error",
                progress=progress,
            )

    kept = _kept_on(device, shelf, ("evaluation", seen), decode_evaluation)
    mean = 255 * torch.tensor(augment.mean, device=device)[:, None, None]
    std = 255 * torch.tensor(augment.std, device=device)[:, None, None]

    def normalised(image: Tensor) -> Tensor:
        return (image.float() - mean) / std

    return (
        sampler,
        lambda: device_batches(cache, transform, sampler, maps),
        lambda: (sample._replace(image=normalised(sample.image)) for sample in kept),
    )


def _kept(shelf: dict[object, Any], key: object, make: Callable[[], Any]) -> Any:
    if key not in shelf:
        shelf[key] = make()
    return shelf[key]


def _kept_on(device: torch.device, shelf: dict[object, Any], key: object, make: Callable[[], Any]) -> Any:
    """The same for what has `.to`, or a list of it; another process may have put it there, on the CPU."""
    value = _kept(shelf, key, make)
    if shelf.get((key, "device")) != device:
        value = [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
        shelf[key], shelf[(key, "device")] = value, device
    return value


def _epoch(sampler: EpochSampler, batches: Batches, epoch: int, start: int) -> Iterable[Sample]:
    sampler.set_epoch(epoch, start)
    return batches()


def _watched(batches: Iterable[Sample], skipped: dict[str, None], data: DataConfig) -> Iterator[Sample]:
    """Note the pictures that were skipped."""
    with _saying_how_to_go_on(data):
        for batch in batches:
            for lines in batch.trouble:
                skipped |= dict.fromkeys(lines.splitlines())
            yield batch


@contextmanager
def _saying_how_to_go_on(data: DataConfig) -> Iterator[None]:
    try:
        yield
    except UnreadablePicture as error:
        if data.on_bad_picture == "skip":
            raise
        raise UnreadablePicture(f"{error}. To go on without such pictures: data.on_bad_picture skip") from None
