from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.data import loader as loader_module
from alltokens.data.datasets import IGNORED, PictureDataset, Sample
from alltokens.data.loader import cache_pictures, default_workers, device_batches, evaluation_loader, training_loader
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture
from alltokens.data.sampler import EpochSampler
from alltokens.data.sources import open_source
from alltokens.errors import UserError

COUNT = 11


def noisy(picture: Image.Image, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(np.array(picture.resize((6, 4)))).permute(2, 0, 1).float()
    return pixels + torch.rand(3, 1, 1, generator=generator), torch.rand(2, 3, generator=generator)


@pytest.fixture(params=["folder", "tar"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> PictureSource:
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "all.tar", "w") as file:
        for index in range(COUNT):
            path = tmp_path / "folder" / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(exist_ok=True, parents=True)
            Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)).save(path)
            file.add(path, path.relative_to(tmp_path / "folder"))
    return open_source(tmp_path / ("folder" if request.param == "folder" else "all.tar"))


def same(first: Sample, second: Sample) -> bool:
    return (
        torch.equal(first.image, second.image)
        and torch.equal(first.matrix, second.matrix)
        and torch.equal(torch.as_tensor(first.label), torch.as_tensor(second.label))
        and list(first.key) == list(second.key)
    )


def test_workers_and_epochs_and_resuming_change_no_byte(source: PictureSource) -> None:
    dataset = PictureDataset(source, noisy)
    alone, several = EpochSampler(COUNT, 2, seed=3), EpochSampler(COUNT, 2, seed=3)
    here = training_loader(dataset, alone, workers=0)
    there = training_loader(dataset, several, workers=2)
    for epoch, start in ((0, 0), (1, 0), (1, 3), (0, 4)):  # the same workers all the time
        alone.set_epoch(epoch)
        several.set_epoch(epoch, start)
        expected, came = list(here)[start:], list(there)
        assert len(there) == len(came) == len(expected) == 5 - start
        assert all(map(same, came, expected))


def test_an_epoch_can_be_left_early(source: PictureSource) -> None:
    sampler = EpochSampler(COUNT, 2, seed=3)
    loader = training_loader(PictureDataset(source, noisy), sampler, workers=2)
    first = [batch.key for batch in loader]
    next(iter(loader))
    assert [batch.key for batch in loader] == first


def test_loading_leaves_the_global_random_state_alone(source: PictureSource) -> None:
    before = torch.get_rng_state()
    list(training_loader(PictureDataset(source, noisy), EpochSampler(COUNT, 2, seed=3), workers=0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (3, 0), (16, 0)])
def test_evaluation_sees_every_picture_once(source: PictureSource, world: int, workers: int) -> None:
    dataset = PictureDataset(source, noisy)
    loaders = [evaluation_loader(dataset, 2, rank=rank, world=world, workers=workers) for rank in range(world)]
    keys = [key for loader in loaders for batch in loader for key in batch.key]
    assert sorted(keys) == sorted(source.keys)
    if world == 1:
        assert keys == list(source.keys)


def test_bad_pictures_are_told_across_workers(source: PictureSource) -> None:
    def read(index: int) -> bytes | Image.Image:
        return b"" if index == 4 else source.read(index)

    broken = PictureSource(source.location, source.class_names, source.labels, source.keys, read)
    dataset = PictureDataset(broken, noisy, on_bad_picture="mark")
    batches = list(evaluation_loader(dataset, 4, workers=2))
    trouble = [line for batch in batches for text in batch.trouble for line in text.splitlines()]
    assert len(trouble) == 1
    assert f"{source.keys[4]}: not a readable picture (the file is empty)" in trouble[0]
    assert torch.cat([torch.as_tensor(batch.label) for batch in batches]).tolist().count(IGNORED) == 1
    for workers in (0, 2):  # the same message, without a worker's traceback
        with pytest.raises(UnreadablePicture) as raised:
            list(evaluation_loader(PictureDataset(broken, noisy), 4, workers=workers))
        assert str(raised.value) == trouble[0]


@pytest.mark.slow
def test_spawned_workers_load_the_same_bytes(source: PictureSource) -> None:
    sampler = EpochSampler(COUNT, 2, seed=3)
    dataset = PictureDataset(source, noisy)
    here = list(training_loader(dataset, sampler, workers=0))
    assert all(map(same, training_loader(dataset, sampler, workers=1, start_method="spawn"), here))


def test_a_sampler_of_another_length_is_refused(source: PictureSource) -> None:
    with pytest.raises(UserError, match="the sampler orders 5 pictures, the dataset has 11"):
        training_loader(PictureDataset(source, noisy), EpochSampler(5, 2, seed=0))
    with pytest.raises(UserError, match="workers must be 0"):
        training_loader(PictureDataset(source, noisy), EpochSampler(COUNT, 2, seed=0), workers=-1)


def test_cores_are_shared_out_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module.os, "sched_getaffinity", lambda process: range(16), raising=False)
    assert [default_workers(count) for count in (1, 3, 8, 32)] == [16, 5, 2, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_holds_the_squashed_pictures(source: PictureSource, workers: int) -> None:
    calls: list[tuple[int, int]] = []
    cache = cache_pictures(source, 3, workers=workers, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(COUNT, COUNT)]
    assert (cache.pictures.shape, cache.pictures.dtype) == ((COUNT, 3, 3, 3), torch.uint8)
    batch = cache.batch(np.array([7, 0]))
    encoded = source.read(7)
    assert isinstance(encoded, bytes)
    squashed = Image.open(io.BytesIO(encoded)).resize((3, 3), Image.Resampling.BICUBIC)
    assert batch.pictures[0].permute(1, 2, 0).tolist() == np.asarray(squashed).tolist()
    assert batch.sizes.tolist() == [[4, 6], [4, 6]]
    assert batch.labels.tolist() == source.labels[[7, 0]].tolist()
    assert batch.keys == (source.keys[7], source.keys[0])


def test_pictures_of_the_cached_size_keep_their_pixels() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 5, 5, 3), dtype=np.uint8)
    source = PictureSource(
        "memory", ("a", "b"), np.array([0, 1]), ["0", "1"], lambda index: Image.fromarray(pictures[index])
    )
    cache = cache_pictures(source, 5, workers=0)
    assert np.array_equal(cache.pictures.permute(0, 2, 3, 1).numpy(), pictures)


def test_bad_pictures_in_a_cache_are_errors_or_left_out_or_marked() -> None:
    def read(index: int) -> bytes | Image.Image:
        return b"" if index == 1 else Image.new("RGB", (2, 2), (index, 0, 0))

    source = PictureSource("memory", ("a", "b"), np.array([0, 1, 1]), ["x", "y", "z"], read)
    with pytest.raises(UnreadablePicture, match="memory/y"):
        cache_pictures(source, 2, workers=0)
    skipped = cache_pictures(source, 2, workers=0, on_bad_picture="skip")
    assert (skipped.pictures[:, 0, 0, 0].tolist(), skipped.labels.tolist()) == ([0, 2], [0, 1])
    assert (list(skipped.keys), len(skipped.trouble)) == (["x", "z"], 1)
    marked = cache_pictures(source, 2, workers=0, on_bad_picture="mark")
    assert (marked.labels.tolist(), list(marked.keys), len(marked.trouble)) == ([0, IGNORED, 1], ["x", "y", "z"], 1)


def test_a_cache_that_would_not_fit_is_refused_with_its_bytes() -> None:
    source = PictureSource("huge", ("a", "b"), np.zeros(1000, dtype=np.int64), ["x"] * 1000, lambda index: b"")
    with pytest.raises(UserError, match=r"1000 pictures of 1000000x1000000 need 3,000,000,000,000,000 bytes"):
        cache_pictures(source, 1_000_000)


class Augment:
    def __call__(
        self, pictures: Tensor, sizes: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        assert sizes is not None
        noise = torch.rand(len(pictures), 1, 1, 1, generator=generator)
        return pictures.float() + noise, sizes[:, :, None].float().expand(-1, 2, 3)


def test_batches_on_the_device_are_those_of_the_sampler_and_resume(source: PictureSource) -> None:
    cache = cache_pictures(source, 4, workers=0)
    sampler = EpochSampler(COUNT, 2, seed=1)
    sampler.set_epoch(2)
    expected = list(sampler)
    whole = list(device_batches(cache, Augment(), sampler))
    assert [list(batch.key) for batch in whole] == [[source.keys[draw.index] for draw in draws] for draws in expected]
    assert torch.equal(whole[0].image.floor().byte(), cache.batch(np.array([d.index for d in expected[0]])).pictures)
    sampler.set_epoch(2, 3)
    assert all(map(same, device_batches(cache, Augment(), sampler), whole[3:]))
    assert len({float(batch.image.frac()[0, 0, 0, 0]) for batch in whole}) == 5


def test_batches_on_the_device_take_label_maps(source: PictureSource) -> None:
    sampler = EpochSampler(COUNT, 3, seed=1)
    cache = cache_pictures(source, 4, workers=0)
    ids = torch.tensor([len(key) for key in cache.keys]).view(-1, 1, 1, 1)
    batch = next(device_batches(cache, Augment(), sampler, LabelMap(ids, ids.half(), ids[:, 0] + 0.5)))
    expected = torch.tensor([len(key) for key in batch.key]).view(-1, 1, 1, 1)
    assert torch.equal(batch.maps.ids, expected)
    assert torch.equal(batch.maps.scores, expected.half())
    assert torch.equal(batch.maps.tail, expected[:, 0] + 0.5)
    assert not next(device_batches(cache, Augment(), sampler, LabelMap(ids, ids.half()))).maps.has_tail


def test_the_real_augmentation_takes_cached_batches(source: PictureSource) -> None:
    from alltokens.data.device_augment import DeviceAugment
    from alltokens.data.transforms import TrainTransform

    cache = cache_pictures(source, 8, workers=0)
    batches = list(device_batches(cache, DeviceAugment(TrainTransform(8)), EpochSampler(COUNT, 5, seed=1)))
    assert [tuple(batch.image.shape) for batch in batches] == [(5, 3, 8, 8)] * 2
    assert [tuple(batch.matrix.shape) for batch in batches] == [(5, 2, 3)] * 2
