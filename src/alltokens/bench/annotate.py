"""`alltokens bench annotate`: reading, annotating and writing pictures, beside the forward pass and the reading alone.

Shapes: B batch, S side of the picture in pixels.

Weights are random, so nothing is downloaded. The first arm runs the annotator as it is, head and pooling included, on
one batch that stays on the device; the second reads JPEG files as `annotate` does and drops them. The third is
`annotate` itself, from the first batch's labels to the finished store: what comes before, such as starting workers and
hashing weights, is done once however many pictures there are. It cannot be quicker than the slower of the other two,
and annotates as many pictures as that one does in the time that was asked for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from alltokens.bench.results import Row, of_timing
from alltokens.bench.timing import FEWEST, Timing, beside
from alltokens.data.datasets import load_picture
from alltokens.data.loader import default_workers
from alltokens.data.pictures import MAX_PIXELS
from alltokens.data.sources import open_scenes, open_source
from alltokens.errors import UserError, unknown
from alltokens.labels.annotate import annotate
from alltokens.labels.annotator import Preprocessing
from alltokens.labels.labeller import PRECISIONS, Precision
from alltokens.labels.picture_batches import Job, View, read_source

AT_MOST = 1 / 0.9  # our time over the forward's, on a GPU
ON_GPU = ("dm_nfnet_f6", "efficientnet_b7", "tf_efficientnet_lite2")  # the paper's first
ON_CPU = ("tf_efficientnet_lite0",)
FORWARD, READING, ANNOTATE = "forward alone", "reading alone", "annotate"
SECONDS, SECONDS_ON_CPU = 4.0, 2.0  # that one annotation takes, about; the two others take half of it
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
    """Three rows for each model. `root` are pictures to annotate; without it scenes are drawn."""
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
        files = write_pictures(Path(folder, "different"), root)
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
    folder.mkdir()
    source = open_scenes(DIFFERENT, DRAWN) if root is None else open_source(root, labelled=False)
    different = min(DIFFERENT, len(source))
    files = [folder / f"{at}.jpg" for at in range(different)]
    for at, file in enumerate(files):
        load_picture(source, at * (len(source) // different)).save(file, quality=90)
    return files


def multiply(files: Sequence[Path], folder: Path, number: int) -> Path:
    """A folder of as many pictures as are wanted, the same few under many names."""
    folder.mkdir()
    for at in range(number):
        os.link(files[at % len(files)], folder / f"{at:06}.jpg")
    return folder


def limits(rows: Sequence[Row]) -> list[str]:
    """For each model, which of the two is slower: annotation cannot be quicker."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        speed = {row.arm: row.pictures_per_second for row in rows if row.model == model}
        slower, other = sorted((FORWARD, READING), key=speed.__getitem__)
        part = speed[ANNOTATE] / speed[slower]
        lines.append(
            f"{model}: {slower.split()[0]} limits ({speed[slower]:,.0f} pictures/s, {other} {speed[other]:,.0f}); "
            f"annotate does {part:.2f} of it"
        )
    return lines


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
    workers = default_workers() if workers is None else workers
    view = View((size,), Preprocessing.of(model).interpolation)

    def annotated(pictures: Path, store: str) -> float:
        return _annotated(model, pictures, place / store, batch, size, precision, workers)

    once = _forward_alone(model, batch, size, 2, precision, device)
    slower = max(once, _reading_alone(files, view, batch, workers, seconds / 2))
    batches = max(FEWEST_BATCHES, min(round(seconds / slower), MOST_PICTURES // batch))
    annotated(multiply(files, place / "few", batch * FEWEST_BATCHES), "warm-up")
    pictures = multiply(files, place / "pictures", batch * batches)
    taken: dict[str, list[float]] = {FORWARD: [], READING: [], ANNOTATE: []}
    for turn in range(1, rounds + 1):
        progress(f"{name}: round {turn} of {rounds}, {batch * batches:,} pictures")
        forwards = max(FEWEST_BATCHES, round(seconds / 2 / once))
        taken[FORWARD].append(_forward_alone(model, batch, size, forwards, precision, device))
        taken[READING].append(_reading_alone(files, view, batch, workers, seconds / 2))
        taken[ANNOTATE].append(annotated(pictures, f"store-{turn}"))
    return _rows(name, size, batch, precision, device, beside(taken))


@torch.no_grad()  # autocast then keeps the weights that it has cast, as annotation does
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


def _reading_alone(files: Sequence[Path], view: View, batch: int, workers: int, seconds: float) -> float:
    """Seconds of one batch, from the first ones on, which are read ahead; for about `seconds` altogether."""
    source = open_source(str(files[0].parent), labelled=False)

    def jobs() -> Iterator[Job]:
        for number in count():
            pictures = [at % len(source) for at in range(number * batch, (number + 1) * batch)]
            yield Job(number, [source.keys[at] for at in pictures], pictures)

    with closing(read_source(source, jobs(), view, MAX_PIXELS, workers, batch)) as batches:
        for _ in range(FEWEST_BATCHES):
            next(batches)
        begun = time.perf_counter()
        for read, _ in enumerate(batches, start=1):
            taken = time.perf_counter() - begun
            if taken >= seconds and read >= FEWEST_BATCHES:
                return taken / read
    raise AssertionError("there is no end of jobs")


def _annotated(
    model: nn.Module, pictures: Path, out: Path, batch: int, size: int, precision: Precision, workers: int
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
            at_most=AT_MOST if arm == ANNOTATE and device.type == "cuda" else None,
            peak_at_most=None,
        )
        for arm, timing in timings.items()
    ]
