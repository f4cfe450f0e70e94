"""Long and large: memory and open files stay flat, a store and a folder of ImageNet's size and more are no trouble."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from alltokens.data.sources import open_source
from alltokens.engine import runs
from alltokens.engine.trainer import Trainer
from alltokens.labels.files import write_shard
from alltokens.labels.layout import RowLayout
from alltokens.labels.manifest import UNFINISHED_NAME, Description, shard_name, write_description
from alltokens.labels.store import LabelStore, verify_store
from alltokens.labels.writer import finish_store
from tests.faults.conftest import add
from tests.faults.victims import processes
from tests.tiny import tiny_config

FLAT = 12  # MB that memory may grow over the second half


def resident() -> float:
    """MB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Watch:
    """Memory and open files at steps of a long work."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def __call__(self) -> None:
        self.seen.append((resident(), open_files()))

    def is_flat(self) -> None:
        half = len(self.seen) // 2
        (before, files_before), (after, files_after) = (
            (max(mb for mb, _ in part), max(files for _, files in part))
            for part in (self.seen[1 : half + 1], self.seen[half + 1 :])
        )
        assert files_after <= files_before, f"open files: {files_before}, then {files_after}"
        assert after - before < FLAT, f"memory: {before:.0f} MB, then {after:.0f} MB"


def in_a_process(work, *arguments) -> object:
    """In a fork whose memory nothing else touches; what it tells."""
    mine, its = processes.Pipe(duplex=False)
    process = processes.Process(target=_told, args=(its, work, arguments))
    process.start()
    its.close()
    try:
        result = mine.recv()
    finally:
        process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _told(told, work, arguments) -> None:
    torch.set_num_threads(1)
    try:
        told.send(work(*arguments))
    except BaseException as error:
        told.send(AssertionError(f"{type(error).__name__}: {error}"))


def _train_long(run: Path, updates: int) -> int:
    watch = Watch()
    original = Trainer.update

    def watched(self, micro_batches):
        if self.position.update % (updates // 20) == 0:
            watch()
        return original(self, micro_batches)

    Trainer.update = watched  # type: ignore[method-assign]
    epochs = updates // 6
    config = tiny_config(
        model={"options": {"patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}},
        train={"epochs": epochs, "ema_decay": 0.9},
        data={"cache": "device"},
        evaluation={"every_epochs": max(1, epochs // 20)},
        checkpoint={"every_epochs": max(1, epochs // 20)},
    )
    result = runs.train(config, run_dir=run, quiet=True)
    watch.is_flat()
    assert result.best_epoch > 0
    return epochs * 6


@pytest.mark.parametrize("updates", [120, pytest.param(10_000, marks=pytest.mark.faults)])
def test_memory_and_open_files_stay_flat_over_many_updates(updates, tmp_path, tally):
    done = in_a_process(_train_long, tmp_path / "run", updates)
    assert updates - 6 < done <= updates
    tally["updates with flat memory"] += done


def synthetic_store(path: Path, count: int, shard: int, classes: int = 1000) -> LabelStore:
    """Of so many pictures, made from one shard's rows: small maps, but keys and shards as they are."""
    description = Description((2, 2), 2, classes)
    layout: RowLayout = description.layout
    rows = np.zeros((shard, layout.row_bytes), np.uint8)
    rows[:, 0] = np.arange(shard) % 251  # the low byte of the first cell's first class
    path.mkdir(parents=True)
    write_description(path / UNFINISHED_NAME, description)
    for number, start in enumerate(range(0, count, shard)):
        size = min(shard, count - start)
        keys = [f"n{index // 1300:08d}/n_{index:08d}.JPEG".encode() for index in range(start, start + size)]
        write_shard(path / shard_name(0, number), rows[:size], keys, 0.0)
    return finish_store(path, count)


def _read_long(path: Path, reads: int) -> int:
    store = LabelStore.open(path)
    watch, draw = Watch(), np.random.default_rng(0)
    keys = list(store.keys())
    store.read(keys[:50_000])  # touches every page once
    for start in range(0, reads, 500):
        if start % (reads // 20) < 500:
            watch()
        chosen = draw.integers(0, len(keys), 500)
        ids = store.read([keys[index] for index in chosen]).ids[:, 0, 0, 0].numpy()
        assert (ids == chosen % 1024 % 251).all()
    watch.is_flat()
    return reads


@pytest.mark.parametrize("reads", [20_000, pytest.param(200_000, marks=pytest.mark.faults)])
def test_memory_and_open_files_stay_flat_over_many_label_reads(reads, tmp_path, tally):
    synthetic_store(tmp_path / "store", 4096, 1024)
    tally["label reads with flat memory"] += in_a_process(_read_long, tmp_path / "store", reads)


@pytest.mark.parametrize("count", [30_000, pytest.param(1_281_167, marks=pytest.mark.faults)])
def test_a_store_of_imagenets_size(count, tmp_path):
    synthetic_store(tmp_path / "store", count, 1024)
    files, memory = in_a_process(_open_large, tmp_path / "store", count)
    assert files < 10  # not one for each shard
    assert memory < 200
    assert verify_store(tmp_path / "store") == []
    damaged = tmp_path / "store" / shard_name(0, count // 1024 // 2)
    with damaged.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    assert [damaged.name in problem for problem in verify_store(tmp_path / "store")] == [True]
    add({"pictures in a store at the most": count})


def _open_large(path: Path, count: int) -> tuple[int, float]:
    files, memory = open_files(), resident()
    store = LabelStore.open(path)
    opened = open_files() - files, resident() - memory
    chosen = np.random.default_rng(1).integers(0, count, 5000)
    ids = store.read([f"n{index // 1300:08d}/n_{index:08d}.JPEG" for index in chosen.tolist()]).ids[:, 0, 0, 0].numpy()
    assert len(store) == count
    assert (ids == chosen % 1024 % 251).all()
    assert "n99999999/no.JPEG" not in store
    return opened


@pytest.mark.parametrize("classes", [200, pytest.param(10_000, marks=pytest.mark.faults)])
def test_many_classes(classes, tmp_path):
    from PIL import Image

    for index in range(classes):
        folder = tmp_path / "pictures" / f"class-{index:05d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8), (index % 256, index // 256, 99)).save(folder / "0.png")
    config = tiny_config(
        data={"root": None, "train": str(tmp_path / "pictures"), "val": str(tmp_path / "pictures"), "image_size": 16}
        | {"train_pictures": None, "val_pictures": None},
        train={"epochs": 1, "batch_size": 200},
        schedule={"warmup_epochs": 0},
    )
    result = runs.train(config, run_dir=tmp_path / "run", quiet=True)
    assert result.scores is not None
    assert result.scores.pictures == classes
    add({"classes at the most": classes})


@pytest.mark.parametrize("count", [3000, pytest.param(300_000, marks=pytest.mark.faults)])
def test_a_folder_of_many_pictures_is_listed(count, tmp_path):
    told: list[int] = []
    for folder in range(count // 1000):
        (tmp_path / "p" / f"c{folder:03d}").mkdir(parents=True)
        for index in range(1000):
            os.close(os.open(tmp_path / "p" / f"c{folder:03d}" / f"{index:04d}.jpg", os.O_CREAT))
    source = open_source(tmp_path / "p", progress=told.append)
    assert len(source) == count
    assert source.keys[count - 1] == f"c{count // 1000 - 1:03d}/0999.jpg"
    assert told == sorted(told)
    assert told[-1] == count
    assert len(told) >= count // 1000
    add({"pictures in a folder at the most": count})
