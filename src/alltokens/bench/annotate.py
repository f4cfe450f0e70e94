"""`alltokens bench annotate`: reading, annotating and writing pictures, beside the annotator's forward pass alone.

Shapes: B batch, S side of the picture in pixels.

Weights are random, so nothing is downloaded. The first arm runs the annotator as it is, head and pooling included, on
one batch that stays on the device. The second is `annotate` itself over JPEG files, from the first batch's labels to
the finished store: what comes before, such as starting workers and hashing weights, is done once however many pictures
there are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from alltokens.bench.results import Row, of_timing
from alltokens.bench.timing import FEWEST, Timing, beside
from alltokens.data.datasets import load_picture
from alltokens.data.sources import open_scenes, open_source
from alltokens.errors import UserError, unknown
from alltokens.labels.annotate import annotate
from alltokens.labels.annotator import Preprocessing
from alltokens.labels.labeller import PRECISIONS, Precision

AT_MOST = 1 / 0.9  # our time over the forward's, on a GPU
ON_GPU = ("dm_nfnet_f6", "efficientnet_b7", "tf_efficientnet_lite2")  # the paper's first
ON_CPU = ("tf_efficientnet_lite0",)
SECONDS, SECONDS_ON_CPU = 6.0, 2.0  # that the forward passes of one annotation take
FEWEST_BATCHES, MOST_PICTURES = 4, 65_536  # of one annotation
DRAWN = 400  # side of the pictures that are drawn where none are given: about ImageNet's
DIFFERENT = 256  # of the pictures; every further one is one of them again


def bench_annotate(
    models: Sequence[str] = (),
    root: str | None = None,
    *,
    batch: int | None = None,
    image_size: int | None = None,
    seconds: float | None = None,
    rounds: int | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
    device: torch.device | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Two rows for each model. `root` are pictures to annotate; without it scenes are drawn."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    batch = (64 if cuda else 8) if batch is None else batch
    seconds = (SECONDS if cuda else SECONDS_ON_CPU) if seconds is None else seconds
    precision = precision or ("bf16" if cuda else "fp32")
    rounds = FEWEST if rounds is None else rounds
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if min(batch, rounds) < 1 or seconds <= 0:
        raise UserError(f"batch, rounds and seconds must be positive, got {batch}, {rounds}, {seconds}")
    models = models or (ON_GPU if cuda else ON_CPU)
    for name in models:
        if not timm.is_model(name):
            raise unknown("model", name, timm.list_models(), hint="`alltokens models PATTERN` lists them.")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        progress("writing pictures")
        files = write_pictures(Path(folder), root)
        for name in models:
            place = Path(folder, name)
            place.mkdir()
            rows += _of_model(
                name, files, place, batch, image_size, seconds, rounds, precision, workers, device, progress
            )
            shutil.rmtree(place)
    return rows


def write_pictures(folder: Path, root: str | None) -> list[Path]:
    """A few JPEG files."""
    source = open_scenes(DIFFERENT, DRAWN) if root is None else open_source(root, labelled=False)
    different = min(DIFFERENT, len(source))
    files = [folder / f"{at}.jpg" for at in range(different)]
    for at, file in enumerate(files):
        load_picture(source, at * (len(source) // different)).save(file, quality=90)
    return files


def multiply(files: Sequence[Path], folder: Path, count: int) -> None:
    """As many pictures as are wanted, the same few under many names."""
    folder.mkdir()
    for at in range(count):
        os.link(files[at % len(files)], folder / f"{at:06}.jpg")


def _of_model(
    name: str,
    files: Sequence[Path],
    place: Path,
    batch: int,
    image_size: int | None,
    seconds: float,
    rounds: int,
    precision: Precision,
    workers: int | None,
    device: torch.device,
    progress: Callable[[str], None],
) -> list[Row]:
    progress(f"{name}: building")
    torch.manual_seed(0)
    described = timm.models.get_pretrained_cfg(name)
    fixed: dict[str, Any] = (
        {"img_size": image_size} if image_size and described is not None and described.fixed_input_size else {}
    )
    model = timm.create_model(name, **fixed).eval().to(device)
    size = image_size or Preprocessing.of(model).image_size
    progress(f"{name}: warming up")
    once = _forward_alone(model, batch, size, 2, precision, device)
    batches = max(FEWEST_BATCHES, min(round(seconds / once), MOST_PICTURES // batch))
    multiply(files, place / "pictures", batch * batches)
    taken: dict[str, list[float]] = {"forward alone": [], "annotate": []}
    for turn in range(rounds + 1):  # the first one is a warm-up, too
        progress(f"{name}: round {turn} of {rounds}" if turn else f"{name}: warming up")
        alone = _forward_alone(model, batch, size, batches, precision, device)
        whole = _annotated(model, place / "pictures", place / f"store-{turn}", batch, size, precision, workers)
        if turn:
            taken["forward alone"].append(alone)
            taken["annotate"].append(whole)
    return _rows(name, size, batch, precision, device, beside(taken))


@torch.inference_mode()
def _forward_alone(
    model: nn.Module, batch: int, size: int, count: int, precision: Precision, device: torch.device
) -> float:
    """Seconds of one batch."""
    images = torch.randn(batch, 3, size, size, device=device)
    if precision != "fp32" and device.type == "cuda":
        images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, PRECISIONS[precision], enabled=precision != "fp32"):
        model(images)
        _finish(device)
        begun = time.perf_counter()
        for _ in range(count):
            model(images)
        _finish(device)
    return (time.perf_counter() - begun) / count


def _annotated(
    model: nn.Module, pictures: Path, out: Path, batch: int, size: int, precision: Precision, workers: int | None
) -> float:
    """Seconds of one batch, from the first one's labels on."""
    first: list[tuple[float, int]] = []

    def note(done: int, total: int | None) -> None:
        if not first:
            assert total is not None
            _finish(next(model.parameters()).device)
            first.append((time.perf_counter(), total - done))

    options: dict[str, Any] = {"form": "packed", "class_map": "own", "workers": workers}
    annotate(model, pictures, out, image_size=size, batch_size=batch, precision=precision, progress=note, **options)
    begun, left = first[0]
    return (time.perf_counter() - begun) / left * batch


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rows(
    name: str, size: int, batch: int, precision: str, device: torch.device, timings: dict[str, Timing]
) -> list[Row]:
    return [
        Row(
            bench="annotate",
            **of_timing(timing, batch, device),
            model=name,
            image_size=size,
            batch=batch,
            precision=precision,
            mode="eager",
            arm=arm,
            peak_mib=None,
            peak_ratio=None,
            at_most=AT_MOST if arm == "annotate" and device.type == "cuda" else None,
            peak_at_most=None,
        )
        for arm, timing in timings.items()
    ]
