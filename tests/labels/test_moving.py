"""Pictures on their way to a device and labels on their way back: none overtaken, in memory that is made once."""

import threading
from contextlib import closing, nullcontext
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from alltokens.data.sources import open_source
from alltokens.errors import UserError
from alltokens.labels import annotate as annotation
from alltokens.labels import moving
from alltokens.labels.annotate import annotate
from alltokens.labels.labeller import top_labels
from alltokens.labels.moving import in_background, on_device
from alltokens.labels.picture_batches import Batch, Job
from alltokens.labels.sink import Landing, read_failures
from tests.labels.tiny_annotator import OPTIONS, Brittle, write_pictures


def test_what_a_background_raises_is_raised_and_closing_ends_it():
    closed = []

    def numbers(end):
        try:
            yield from range(end)
            raise ZeroDivisionError
        finally:
            closed.append(threading.current_thread().name)

    made = in_background(numbers(3), 1)
    assert [next(made), next(made), next(made)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(made)
    with closing(in_background(numbers(10**9), 2)) as made:
        assert next(made) == 0
    assert closed == ["picture-mover"] * 2
    assert "picture-mover" not in [thread.name for thread in threading.enumerate()]
    assert list(in_background((at for at in range(0)), 1)) == []


class LateDevice:
    """A CPU stands in for a GPU that copies as late as it may: when somebody waits for it."""

    def __init__(self, monkeypatch):
        self.queued, self.pinned = [], []
        copy, empty, there = torch.Tensor.copy_, torch.empty, self

        class Event:
            def __init__(self, blocking=False):
                self.upto = []

            def record(self, stream):
                self.upto = list(there.queued)

            def synchronize(self):
                for target, source in self.upto:
                    if any(target is waiting for waiting, _ in there.queued):
                        copy(target, source)
                there.queued = [one for one in there.queued if all(one[0] is not target for target, _ in self.upto)]

        def copy_late(target, source, non_blocking=False):
            return self.queued.append((target, source)) if non_blocking else copy(target, source)

        def made(*args, pin_memory=False, **kwargs):
            memory = empty(*args, **kwargs)
            self.pinned += [memory] if pin_memory else []
            return memory

        nothing = {"device": lambda device: nullcontext(), "stream": lambda stream: nullcontext()}
        for name, value in (nothing | {"Event": Event, "Stream": lambda device: None}).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
        monkeypatch.setattr(torch, "empty", made)


def test_batches_travel_to_a_gpu_in_two_boats_and_all_have_as_many_rows(monkeypatch):
    """Bytes are not laid over those that still travel, however late a copy is made; nothing more is pinned."""
    monkeypatch.setattr(moving, "_BOAT", 100)
    parts = [torch.randint(256, (count, 8, 8, 3), dtype=torch.uint8) for count in (2, 4, 3)]
    small = [torch.randint(256, (len(part), 3, 3, 3), dtype=torch.uint8) for part in parts]
    device = LateDevice(monkeypatch)
    batches = (Batch(Job(at, [], []), both, []) for at, both in enumerate(zip(parts, small, strict=True)))
    sent = list(moving._sent(batches, torch.device("cpu"), rows=4))
    sent[-1].arrived.synchronize()
    assert [arriving.batch.job.number for arriving in sent] == [0, 1, 2]
    for arriving, *expected in zip(sent, parts, small, strict=True):
        for there, part in zip(arriving.batch.pictures, expected, strict=True):
            assert there.shape == (4, 3, *part.shape[1:3])
            assert torch.equal(there[: len(part)], part.permute(0, 3, 1, 2))
            assert not there[len(part) :].any()
    assert [memory.shape for memory in device.pinned] == [(2, 100)]


def test_on_a_cpu_batches_are_planes():
    part = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3)
    batches = (Batch(Job(0, [], []), (part,), []) for _ in range(1))
    [batch] = on_device(batches, torch.device("cpu"), rows=3)
    assert torch.equal(batch.pictures[0], part.permute(0, 3, 1, 2))


def test_labels_come_down_to_places_that_are_made_once_and_used_in_turn():
    """Four kinds of numbers as bytes in one piece, of an odd number of pictures, too."""
    scores = torch.randn(5, 21, 4, 5, generator=torch.Generator().manual_seed(0))
    made = [top_labels(scores[:count] + count, 3) for count in (2, 5, 3, 1)]
    landing = Landing(made[0], 5, 2)
    where = set()
    for first, second in pairwise(made):  # two are there at a time
        landed = [landing.bring(first), landing.bring(second)]
        for (place, there), labels in zip(landed, (first, second), strict=True):
            assert [part.dtype for part in there] == [torch.int32, torch.float32, torch.float32, torch.bool]
            assert all(torch.equal(part, expected) for part, expected in zip(there, labels, strict=True))
            where.add((place, there.ids.data_ptr()))
            landing.give_back(place)
    assert len(where) == 2


def test_batches_that_are_filled_up_with_black_rows_give_the_same_maps(tmp_path, monkeypatch):
    """As on a GPU, where all batches have as many rows."""
    pictures = tmp_path / "pictures"
    write_pictures(pictures)
    undisturbed = annotate(Brittle(), pictures, tmp_path / "undisturbed", workers=0, **OPTIONS)

    def filled_up(batches, device, rows):
        for batch in on_device(batches, device, rows):
            missing = rows - len(batch.pictures[0])
            yield batch._replace(pictures=tuple(F.pad(part, [0] * 7 + [missing]) for part in batch.pictures))

    monkeypatch.setattr(annotation, "on_device", filled_up)
    store = annotate(Brittle(), pictures, tmp_path / "s", workers=0, **OPTIONS)
    assert list(store.keys()) == list(undisturbed.keys())
    assert read_failures(store.path) == read_failures(undisturbed.path)
    keys = list(store.keys())
    for part, expected in zip(store.read(keys), undisturbed.read(keys), strict=True):
        torch.testing.assert_close(part, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("calls", [0, 2])
def test_too_little_memory_is_said_and_before_anything_is_begun_if_it_can_be(tmp_path, calls):
    """The first call looks whether all is well, the second labels a batch of four."""
    model, called = Brittle(), []

    def forward(images):
        called.append(len(images))
        if len(called) > calls:
            raise torch.OutOfMemoryError
        return Brittle.forward_features(model, images)

    model.forward_features = forward
    pictures = [(Image.new("RGB", (32, 32)), f"{at}") for at in range(7)]
    with pytest.raises(UserError, match=f"{3 if calls else 1} pictures at a time do not fit .* smaller batch_size"):
        annotate(model, pictures, tmp_path / "s", **OPTIONS)
    assert called == ([1, 4, 3] if calls else [1])
    assert (tmp_path / "s").exists() == bool(calls)


@pytest.mark.gpu
def test_on_a_gpu_maps_are_those_of_a_cpu_and_the_same_each_time(tmp_path, monkeypatch):
    """Boats smaller than a batch, a last batch of three, and a stream, whose batches have as many rows, too."""
    monkeypatch.setattr(moving, "_BOAT", 10_000)
    pictures = tmp_path / "pictures"
    write_pictures(pictures)
    on_cpu = annotate(Brittle(), pictures, tmp_path / "cpu", workers=0, **OPTIONS)
    keys = list(on_cpu.keys())
    stores = [annotate(Brittle().cuda(), pictures, tmp_path / f"{at}", workers=2 * at, **OPTIONS) for at in range(2)]
    stream = [(pictures / key, key) for key in open_source(pictures).keys]
    stores.append(annotate(Brittle().cuda(), stream, tmp_path / "stream", **OPTIONS))
    for store in stores:
        assert list(store.keys()) == keys
        assert read_failures(store.path) == read_failures(on_cpu.path)
        for part, first in zip(store.read(keys), stores[0].read(keys), strict=True):
            assert torch.equal(part, first)
    maps, expected = stores[0].read(keys), on_cpu.read(keys)
    torch.testing.assert_close(maps.scores, expected.scores, atol=0.05, rtol=0.05)  # TF32 among others
    assert (maps.ids == expected.ids).float().mean() > 0.9
