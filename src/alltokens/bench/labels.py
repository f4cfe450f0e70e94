"""`alltokens bench labels`: reading label maps by key out of a store, beside one `.pt` file for each picture.

Shapes: B pictures of a batch, k kept labels, h and w cells of a map.

One core, maps of ImageNet's size (18 x 18 cells, the top 5 and the tail), batches of keys drawn at random. Everything
lies in the operating system's cache, and the processor's own time is counted: what is measured is looking up, copying
and unpacking, not the disk and not the neighbours.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from alltokens.bench.results import LabelRow, of_timing
from alltokens.bench.timing import Step, Timing, compare
from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels.formats import export_tree, published_name
from alltokens.labels.layout import FORMS, Form
from alltokens.labels.manifest import Description
from alltokens.labels.store import LabelStore
from alltokens.labels.writer import LabelWriter

GRID, KEPT = (18, 18), 5
PICTURES = 20_480
FILES = 2_048  # .pt files; more of them would not be slower
BATCH = 256
READ = 2_048  # pictures in a round
READS_AT_LEAST = 50_000  # pictures/s
BYTES_AT_MOST = {("plain", 1000): 7200, ("packed", 1000): 4000, ("packed", 21_843): 5000}
PT = "one .pt each"

_AT_A_TIME = 512


def bench_labels(
    *,
    pictures: int = PICTURES,
    batch: int = BATCH,
    rounds: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[LabelRow]:
    """A row for the `.pt` files and for each form of a store; beyond 2,048 classes `.pt` files cannot tell classes."""
    if not 1 <= batch <= pictures:
        raise UserError(f"batch must be between 1 and the number of pictures, got {batch} and {pictures}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows: list[LabelRow] = []
        for num_classes in (1000, 21_843):
            with tempfile.TemporaryDirectory() as folder:
                rows += _of_classes(Path(folder), num_classes, pictures, batch, rounds or 15, progress)
        return rows
    finally:
        torch.set_num_threads(threads)


def _of_classes(
    folder: Path, num_classes: int, pictures: int, batch: int, rounds: int, progress: Callable[[str], None]
) -> list[LabelRow]:
    stores = {}
    for form in FORMS:
        progress(f"writing {pictures:,} maps, {form}")
        stores[form] = write_store(folder / form, num_classes, pictures, form)
    arms = {form: lambda store=store: _step(store.read, list(store.keys()), batch) for form, store in stores.items()}
    sizes = {form: _bytes(store.path) / pictures for form, store in stores.items()}
    if num_classes <= 1000:
        progress(f"writing {min(FILES, pictures):,} .pt files")
        few = write_store(folder / "few", num_classes, min(FILES, pictures), "plain")
        export_tree(few, folder / "tree")
        keys = list(few.keys())
        arms = {PT: lambda: _step(lambda some: read_files(folder / "tree", some), keys, batch), **arms}
        sizes[PT] = _bytes(folder / "tree") / len(few)
    timings = compare(
        arms,
        torch.device("cpu"),
        rounds=rounds,
        steps=max(1, READ // batch),
        warmup=2,
        clock=time.process_time,
        progress=lambda text: progress(f"{num_classes:,} classes: {text}"),
    )
    return [_row(arm, num_classes, batch, timing, sizes[arm]) for arm, timing in timings.items()]


def write_store(path: Path, num_classes: int, pictures: int, form: Form) -> LabelStore:
    """Random maps under ImageNet's names."""
    generator = torch.Generator().manual_seed(0)
    with LabelWriter(path, Description(GRID, KEPT, num_classes, form=form)) as writer:
        for start in range(0, pictures, _AT_A_TIME):
            count = min(_AT_A_TIME, pictures - start)
            keys = [f"n{at % 1000:08}/n{at % 1000:08}_{at}.JPEG" for at in range(start, start + count)]
            writer.append(keys, random_maps(count, num_classes, generator))
        return writer.finish()


def random_maps(count: int, num_classes: int, generator: torch.Generator) -> LabelMap:
    """Falling scores of classes that differ within a cell, and a tail."""
    shape = (count, KEPT, *GRID)
    scores = torch.randn(shape, generator=generator).mul(4).sort(1, descending=True).values + 8
    first = torch.randint(num_classes, (count, 1, *GRID), generator=generator)
    apart = torch.arange(KEPT)[:, None, None] * (num_classes // KEPT)
    return LabelMap((first + apart) % num_classes, scores, torch.randn(count, *GRID, generator=generator) + 6)


def read_files(tree: Path, keys: Sequence[str]) -> LabelMap:
    """A batch of published files, as a data set that reads one for each picture and a collate function make it."""
    maps = [torch.load(tree / published_name(key), weights_only=True).float() for key in keys]
    scores, ids = torch.stack(maps).unbind(1)
    return LabelMap(ids, scores)


def _step(read: Callable[[Sequence[str]], LabelMap], keys: list[str], batch: int) -> Step:
    batches = _drawn(keys, batch)
    return lambda: read(next(batches))


def _drawn(keys: list[str], batch: int) -> Iterator[list[str]]:
    """Epoch after epoch, every one in an order of its own."""
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(len(keys)).tolist()
        for start in range(0, len(order) - batch + 1, batch):
            yield [keys[at] for at in order[start : start + batch]]


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _row(arm: str, num_classes: int, batch: int, timing: Timing, size: float) -> LabelRow:
    return LabelRow(
        bench="labels",
        **of_timing(timing, batch, torch.device("cpu")),
        model=f"{GRID[0]}x{GRID[1]}, top {KEPT} of {num_classes:,}",
        image_size=GRID[0],
        batch=batch,
        precision="fp16",
        mode="eager",
        arm=arm,
        peak_mib=None,
        peak_ratio=None,
        at_most=None,
        peak_at_most=None,
        reads_at_least=None if arm == PT else READS_AT_LEAST,
        bytes_per_picture=size,
        bytes_at_most=BYTES_AT_MOST.get((arm, num_classes)),
    )
