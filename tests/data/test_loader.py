from __future__ import annotations

from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from alltokens.data import loader as loader_module
from alltokens.data.datasets import IGNORED, PictureDataset
from alltokens.data.loader import default_workers, evaluation_loader, training_loader
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture
from alltokens.data.sampler import EpochSampler
from alltokens.errors import UserError
from tests.data.samples import COUNT, same


def noisy(picture: Image.Image, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(np.array(picture.resize((6, 4)))).permute(2, 0, 1).float()
    return pixels + torch.rand(3, 1, 1, generator=generator), torch.rand(2, 3, generator=generator)


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


def test_a_closed_loader_has_no_workers_though_its_iterator_is_held(source: PictureSource) -> None:
    before = set(active_children())
    loader = training_loader(PictureDataset(source, noisy), EpochSampler(COUNT, 2, seed=3), workers=2)
    held = iter(loader)
    first = next(held)
    assert len(set(active_children()) - before) == 2
    loader.close()
    assert set(active_children()) <= before
    assert same(next(iter(loader)), first)  # new ones
    loader.close()


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
