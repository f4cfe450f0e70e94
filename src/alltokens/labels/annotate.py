"""Making the label maps of many pictures with an annotator, into a store.

Shapes: B batch, S side of the picture in pixels (one for each scale), k kept labels, h and w cells of a map.

Loading, labelling and writing overlap: workers decode ahead, a thread brings batches to the device, only the kept
labels come back, and another thread waits for them and writes. On a GPU all batches have as many rows (`moving.py`).
A folder of whole shards is all the state there is (see `writer.py`): whoever is started again goes on after them, to
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from alltokens.data.loader import default_workers
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import MAX_PIXELS
from alltokens.errors import UserError, unknown
from alltokens.labels.annotator import PlaceScores, Preprocessing, create_annotator, weights_hash
from alltokens.labels.class_map import AnnotatorClasses, ClassMap, resolve_class_map
from alltokens.labels.given import open_given
from alltokens.labels.labeller import PRECISIONS, Labeller, Precision
from alltokens.labels.layout import Form
from alltokens.labels.manifest import MANIFEST_NAME, Description, read_manifest
from alltokens.labels.moving import on_device
from alltokens.labels.picture_batches import Batch, Picture, View, deal, read_source, read_stream
from alltokens.labels.processes import local_processes, own_device, processes, wait
from alltokens.labels.sink import Sink, read_failures, write_failures
from alltokens.labels.store import LabelStore
from alltokens.labels.writer import SHARD_SIZE, LabelWriter, differences, finish_store

BATCH, BATCH_ON_CPU = 64, 8  # a core's cache holds what 8 pictures need, and is done with them in half of the time
MOST_WORKERS = 32  # of one process; more only take longer to start

Progress = Callable[[int, int | None], None]


def annotate(
    model: nn.Module | str,
    pictures: str | Path | PictureSource | Iterable[tuple[Picture, str]],
    out: str | Path,
    *,
    split: str | None = None,
    class_map: str | Mapping[str, Any] | None = None,
    kept: int = 5,
    image_size: int | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    official_center_crop: bool = False,
    form: Form = "plain",
    precision: Precision = "fp32",
    batch_size: int | None = None,
    workers: int | None = None,
    shard_size: int = SHARD_SIZE,
    max_pixels: int = MAX_PIXELS,
    preprocessing: Preprocessing | None = None,
    annotator: str | None = None,
    annotator_classes: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> LabelStore:
    """A label map for every picture: the `kept` best classes at each place where `model` looks, and the tail.

    model: any timm or alltokens classifier, on the device where it shall run, or a name (see `create_annotator`).
    pictures: what `open_source` takes, or pairs of a picture (PIL, encoded bytes or a Path) and its key.
    class_map: "auto" finds each class folder among the annotator's classes by name, WordNet id or English word; a
        mapping says it (class -> the annotator's number or name, or several); "own" keeps the annotator's classes.
        The default is auto where the pictures have classes.
    image_size, scales, flip: what the annotator sees, by default its own size; raw scores are averaged over scales and
        the mirrored picture. The map has the first scale's grid.
    official_center_crop: show the middle of each picture only, as the published program does. For comparison: the maps
        then do not cover what training takes them to cover.
    batch_size: by default 64, on a CPU 8.
    preprocessing, annotator, annotator_classes: size and colours, name, and names of the classes, where the model
        itself does not say, or says it wrong.
    progress: called with how many pictures of this process are done, and of how many (None: not known).

    Stopped at any moment, it goes on when it is called again in the same way. Pictures that cannot be read, and those
    whose scores are not finite, are listed in failed.txt of the store (`read_failures`). Where torch.distributed is
    initialised, all processes take part; everyone gets the store.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if min(1 if value is None else value for value in (batch_size, kept, image_size)) < 1:
        raise UserError(f"batch_size, kept and image_size must be 1 or more, got {batch_size}, {kept}, {image_size}")
    if shard_size < 1 or (workers is not None and workers < 0):
        raise UserError(f"shard_size must be 1 or more and workers 0 or more, got {shard_size} and {workers}")
    out = Path(out).expanduser()
    source = open_given(pictures, split, class_map, out)
    if isinstance(model, str):
        annotator = annotator or model
        model = create_annotator(model, image_size=image_size).to(own_device())
    if batch_size is None:
        batch_size = BATCH_ON_CPU if _device_of(model).type == "cpu" else BATCH
    described = preprocessing or Preprocessing.of(model)
    classes = AnnotatorClasses.of(model, annotator_classes)
    mapped = resolve_class_map(class_map, classes, source.class_names if isinstance(source, PictureSource) else ())
    sizes = _sizes(model, image_size or described.image_size, scales)
    view = View(sizes, described.interpolation, official_center_crop)
    labeller = Labeller(
        PlaceScores(model),
        mapped,
        mean=described.mean,
        std=described.std,
        kept=min(kept, len(mapped)),
        flip=flip,
        precision=precision,
    ).to(_device_of(model))
    rows = min(batch_size, max(1, len(source))) if isinstance(source, Sized) else batch_size
    with _evaluating(model), _casting_once(_device_of(model)):
        with ThreadPoolExecutor(1) as beside:
            hashed = beside.submit(weights_hash, model)
            grid = _probe(labeller, sizes, rows)
        description = Description(
            grid,
            labeller.kept,
            len(mapped),
            form=form,
            class_names=mapped.names,
            annotator=annotator or _name_of(model),
            annotator_hash=hashed.result(),
            transform=_transform(view, described, flip, scales, precision, mapped),
        )
        if (out / MANIFEST_NAME).exists():
            return _finished(out, description, source.keys if isinstance(source, PictureSource) else ())
        workers = min(default_workers(local_processes()), MOST_WORKERS) if workers is None else workers
        per_shard = max(1, shard_size // batch_size)
        run = _Run(labeller, view, out, description, batch_size, rows, per_shard, workers, max_pixels)
        return run(source, progress)


class _Run:
    """One process's part of an annotation, and the end that all processes make together."""

    def __init__(
        self,
        labeller: Labeller,
        view: View,
        out: Path,
        description: Description,
        batch_size: int,
        rows: int,
        batches_per_shard: int,
        workers: int,
        max_pixels: int,
    ) -> None:
        self.labeller, self.view, self.out, self.description = labeller, view, out, description
        self.batch_size, self.rows, self.batches_per_shard = batch_size, rows, batches_per_shard
        self.workers, self.max_pixels = workers, max_pixels
        self.rank, self.world = processes()
        self.device = _device_of(labeller)
        self.seen = 0  # pictures of all processes
        self.done = 0  # of this one, now
        self.done_before = 0

    def __call__(self, source: PictureSource | Iterable[tuple[Picture, str]], progress: Progress | None) -> LabelStore:
        total = self._share(len(source)) if isinstance(source, PictureSource) else None

        def passed_over(count: int) -> None:
            self.done_before += count

        shard_size = self.batch_size * self.batches_per_shard
        if self.rank > 0:
            wait()  # for the main process to have begun the folder
        writer = LabelWriter(self.out, self.description, rank=self.rank, shard_size=shard_size)
        if self.rank == 0:
            wait()
        with (
            writer,
            Sink(writer, self.batches_per_shard, self.rows) as sink,
            closing(on_device(self._batches(source, writer, passed_over), self.device, self.rows)) as batches,
        ):
            for batch in batches:
                readable = [at for at, problem in enumerate(batch.problems) if not problem]
                sink.put(batch, readable, self._labelled(batch) if readable else None)
                self.done += len(batch.problems)
                if progress:
                    progress(self.done_before + self.done, total)
        wait()
        return self._finish(sink.failed)

    def _batches(self, source: Any, writer: LabelWriter, passed_over: Callable[[int], None]) -> Generator[Batch]:
        whole = isinstance(source, PictureSource)
        pairs = self._counted(zip(range(len(source)), source.keys, strict=True) if whole else source)
        jobs = deal(pairs, self.batch_size, self.rank, self.world, writer.were_done, passed_over)
        read = partial(read_source, source) if whole else read_stream
        return read(jobs, self.view, self.max_pixels, self.workers, self.batch_size)

    def _labelled(self, batch: Batch) -> Any:
        try:
            return self.labeller(batch.pictures)
        except torch.OutOfMemoryError:
            raise _too_many(len(batch.pictures[0]), self.device) from None

    def _finish(self, failed: dict[str, str]) -> LabelStore:
        everyone = [failed]
        if self.world > 1:
            everyone = [{}] * self.world
            dist.all_gather_object(everyone, failed)
        failed = {key: reason for part in everyone for key, reason in part.items()}
        if self.rank == 0:
            if len(failed) == self.seen:
                first = next(iter(failed.items()), None)
                why = "there were none" if first is None else f"{first[0]}: {first[1]}"
                raise UserError(f"not one of {self.seen} pictures could be annotated; the first: {why}")
            write_failures(self.out, failed)
            finish_store(self.out, self.seen - len(failed))
        wait()
        return LabelStore.open(self.out)

    def _counted(self, pairs: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
        for pair in pairs:
            self.seen += 1
            yield pair

    def _share(self, count: int) -> int:
        """Pictures in the batches that are dealt to this process."""
        starts = range(self.rank * self.batch_size, count, self.world * self.batch_size)
        return sum(min(self.batch_size, count - start) for start in starts)


def _sizes(model: nn.Module, image_size: int, scales: Sequence[float]) -> tuple[int, ...]:
    """The picture's side in every scale, in whole patches (or in steps of 32 pixels) where it is scaled."""
    if not scales or min(scales) <= 0:
        raise UserError(f"scales must be one positive number or several, got {tuple(scales)}")
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    step = 32 if patch is None else patch if isinstance(patch, int) else patch[0]
    return tuple(image_size if scale == 1 else max(step, round(scale * image_size / step) * step) for scale in scales)


def _probe(labeller: Labeller, sizes: Sequence[int], rows: int) -> tuple[int, int]:
    """The grid of the maps; what cannot work is found out before anything is begun.

    On a GPU with `rows` pictures, as all batches will have: its libraries prepare the kernels of every layer for that
    number, and whether the memory suffices is known.
    """
    device = _device_of(labeller)
    rows = rows if device.type == "cuda" else 1
    grids: list[tuple[int, int]] = []
    for size in sizes:
        try:
            nothing = torch.zeros(rows, 3, size, size, dtype=torch.uint8, device=device)
            grids.append(tuple(labeller.scores([nothing]).shape[2:]))  # type: ignore[arg-type]
        except UserError:
            raise
        except torch.OutOfMemoryError:
            raise _too_many(rows, device) from None
        except (AssertionError, RuntimeError, ValueError) as error:
            name, reason = type(labeller.places.model).__name__, (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"this {name} cannot annotate pictures of {size} px: {reason.rstrip('.')}. Choose another image_size "
                "or scales; timm's ViTs take several sizes when they are built with dynamic_img_size"
            ) from None
    return grids[0]


def _too_many(rows: int, device: torch.device) -> UserError:
    return UserError(
        f"{rows} pictures at a time do not fit into the memory of {device}; take a smaller batch_size (--batch-size). "
        "What is done stays done"
    )


def _transform(
    view: View, described: Preprocessing, flip: bool, scales: Sequence[float], precision: str, classes: ClassMap
) -> dict[str, Any]:
    """For the manifest: how the annotator saw the pictures, numbers and text."""
    return {
        "picture": "center crop (official)" if view.center_crop else "squashed to a square",
        "image_size": " ".join(map(str, view.sizes)),
        "scales": " ".join(f"{scale:g}" for scale in scales),
        "flip": "averaged" if flip else "off",
        "interpolation": view.interpolation,
        "mean": " ".join(f"{value:g}" for value in described.mean),
        "std": " ".join(f"{value:g}" for value in described.std),
        "precision": precision,
        "classes": str(classes),
    }


def _finished(out: Path, description: Description, keys: Sequence[str]) -> LabelStore:
    """A store that was finished before, if it is of these settings and has all these pictures."""
    if changed := differences(read_manifest(out / MANIFEST_NAME), description):
        raise UserError(f"{out} is a finished label store with {changed}. Choose another folder, or remove it first")
    if processes()[0] == 0:
        finish_store(out)  # which sweeps what a kill at the last moment left
    store, failed = LabelStore.open(out), read_failures(out)
    if missing := [key for key in keys if key not in failed and key not in store]:
        raise UserError(
            f"{out} is a finished label store without {len(missing):,} of the {len(keys):,} pictures, such as "
            f"{missing[0]!r}: pictures were added since, or these are others. Choose another folder, or remove it first"
        )
    return store


def _name_of(model: nn.Module) -> str:
    described: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    return described.get("architecture") or type(model).__name__


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode for a while; every module then gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _casting_once(device: torch.device) -> Iterator[None]:
    """Without gradients, and so that weights are cast to a lower precision once, not for every batch.

    Autocast keeps what it has cast until its outermost context ends (this one casts nothing), and never in inference
    mode: there every batch would begin every layer with a cast.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
