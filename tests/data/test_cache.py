from __future__ import annotations

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.data import cache as cache_module
from alltokens.data.cache import cache_evaluation, cache_pictures, device_batches
from alltokens.data.datasets import IGNORED, OnBadPicture, PictureDataset
from alltokens.data.loader import evaluation_loader
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture
from alltokens.data.sampler import EpochSampler
from alltokens.data.threads import most_held
from alltokens.data.transforms import EvalTransform
from alltokens.errors import UserError
from tests.data.samples import COUNT, same


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


BAD = (7, 30, 31)


def odd_pictures(count: int, bad: tuple[int, ...] = ()) -> tuple[PictureSource, list[int]]:
    """Noise of many sizes, and which of them were read."""
    seen: list[int] = []

    def read(index: int) -> bytes:
        seen.append(index)
        rng = np.random.default_rng(index)
        pixels = rng.integers(0, 256, (*rng.integers(3, 12, 2), 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return b"" if index in bad else file.getvalue()

    labels = np.arange(count) % 3
    return PictureSource("memory", ("a", "b", "c"), labels, [f"{index}.png" for index in range(count)], read), seen


@pytest.mark.parametrize("on_bad_picture", ["skip", "mark"])
def test_threads_change_no_byte_of_a_cache(monkeypatch: pytest.MonkeyPatch, on_bad_picture: OnBadPicture) -> None:
    source, _ = odd_pictures(50, BAD)
    alone = cache_pictures(source, 6, workers=0, on_bad_picture=on_bad_picture)
    monkeypatch.setattr(cache_module, "_PIECE", 2)  # so that memory is used in turn, many times
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    for workers in (0, 1, 5):
        calls.clear()
        several = cache_pictures(source, 6, workers=workers, on_bad_picture=on_bad_picture, progress=progress)
        assert calls == [(done, 50) for done in range(2, 51, 2)]
        for name in ("pictures", "sizes", "labels"):
            assert torch.equal(getattr(several, name), getattr(alone, name))
        assert (several.keys, several.trouble) == (alone.keys, alone.trouble)
        assert [line.partition(":")[0] for line in several.trouble] == [f"memory/{index}.png" for index in BAD]


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 3)])
def test_cached_evaluation_is_what_the_loader_gives(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(cache_module, "_PIECE", 2)
    source, _ = odd_pictures(50, BAD)
    bytes_ = EvalTransform(6, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))
    dataset = PictureDataset(source, bytes_, on_bad_picture="mark")
    loaded = list(evaluation_loader(dataset, 8, rank=rank, world=world, workers=0))
    for workers in (0, 3):
        cached = cache_evaluation(
            source, EvalTransform(6), 8, rank=rank, world=world, workers=workers, on_bad_picture="mark"
        )
        assert len(cached) == len(loaded)
        for ours, theirs in zip(cached, loaded, strict=True):
            assert same(ours, theirs._replace(image=theirs.image.round().to(torch.uint8)))
            assert ours.image.dtype == torch.uint8
            assert ours.trouble == theirs.trouble
    with pytest.raises(UnreadablePicture, match=r"memory/7\.png"):
        cache_evaluation(source, EvalTransform(6), 8, workers=3)


def test_an_error_and_an_interruption_end_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_PIECE", 4)
    source, seen = odd_pictures(2000, (9,))
    before = threading.active_count()
    with pytest.raises(UnreadablePicture, match=r"memory/9\.png: .*the file is empty"):
        cache_pictures(source, 4, workers=3)
    assert threading.active_count() == before
    assert len(seen) <= 8 + most_held(3, 4)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source, seen = odd_pictures(2000)
    with pytest.raises(KeyboardInterrupt):
        cache_pictures(source, 4, workers=3, progress=interrupted)
    assert threading.active_count() == before
    assert len(seen) <= most_held(3, 4)
    with pytest.raises(UserError, match="workers must be 0"):
        cache_pictures(source, 4, workers=-1)
