"""Pictures on their way to the annotator: what is shown, slots that are never overtaken, nothing left running."""

import multiprocessing
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from alltokens.data.pictures import MAX_PIXELS
from alltokens.data.scenes import render_scenes
from alltokens.data.sources import open_source
from alltokens.errors import UserError
from alltokens.labels import picture_batches
from alltokens.labels.annotate import annotate
from alltokens.labels.picture_batches import View, deal, piece_and_slots, read_source, read_stream
from tests.labels.tiny_annotator import OPTIONS, Brittle

VIEW = View((16, 12))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for at, pixels in enumerate(render_scenes(30, 24).pictures):
        Image.fromarray(pixels).save(folder / f"{at:02}.png")
    (folder / "17.png").write_bytes(b"none")
    return folder


def jobs_of(source, batch_size=5, done=lambda keys: [False] * len(keys)):
    return deal(zip(range(len(source)), source.keys, strict=True), batch_size, 0, 1, done, lambda count: None)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("left", [1, 4])
def test_every_batch_holds_its_own_pictures_until_the_next_is_asked_for(pictures, workers, left, monkeypatch):
    """In pieces of two, slow to consume, most of each batch done before: workers then run far ahead in batches."""
    monkeypatch.setattr(picture_batches, "_PIECE", 2)
    source = open_source(pictures, labelled=False)
    jobs = jobs_of(source, done=lambda keys: [at >= left for at in range(len(keys))])
    seen = []
    for batch in read_source(source, jobs, VIEW, MAX_PIXELS, workers, 5):
        time.sleep(0.005)
        assert len(batch.problems) == len(batch.job.keys) == left
        for row, (key, problem) in enumerate(zip(batch.job.keys, batch.problems, strict=True)):
            seen.append(key)
            assert bool(problem) == (key == "17.png")
            shown = VIEW(Image.open(pictures / key)) if not problem else tuple(torch.zeros(s, s, 3) for s in VIEW.sizes)
            assert all(torch.equal(part[row], there) for part, there in zip(batch.pictures, shown, strict=True))
    assert seen == [key for at, key in enumerate(source.keys) if at % 5 < left]


def test_a_stream_takes_turns_too(pictures):
    pairs = ((pictures / f"{at:02}.png", f"{at:02}.png") for at in range(30))
    jobs = deal(pairs, 4, 0, 1, lambda keys: [False] * len(keys), lambda count: None)
    keys = []
    for batch in read_stream(jobs, VIEW, MAX_PIXELS, 3, 4):
        for row, key in enumerate(batch.job.keys):
            keys.append(key)
            assert key == "17.png" or torch.equal(batch.pictures[0][row], VIEW(Image.open(pictures / key))[0])
    assert keys == [f"{at:02}.png" for at in range(30)]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_a_picture_is_shown_as_pillow_squashes_it(interpolation):
    pixels = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    resample = Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
    for size in (24, 100):
        shown = View((size,), interpolation)(Image.fromarray(pixels))[0].numpy().astype(int)
        expected = np.asarray(Image.fromarray(pixels).resize((size, size), resample)).astype(int)
        assert np.abs(shown - expected).max() <= 3
        assert np.abs(shown - expected).mean() < 0.05


def test_a_large_jpeg_is_decoded_as_small_as_still_shows_the_same(tmp_path):
    Image.fromarray(render_scenes(1, 600).pictures[0]).save(tmp_path / "large.jpg", quality=95)
    source = open_source(tmp_path, labelled=False)
    for view, side in ((View((40, 50)), 150), (View((120,)), 600), (View((40,), center_crop=True), 600)):
        filling = picture_batches._Filling(source, picture_batches.Slots(view, 1, 1), MAX_PIXELS)
        assert filling._read(0).size == (side, side)
    small = View((40,))(picture_batches._Filling(source, picture_batches.Slots(View((40,)), 1, 1), MAX_PIXELS)._read(0))
    whole = np.asarray(Image.open(tmp_path / "large.jpg").resize((40, 40), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(small[0].numpy() - whole).mean() < 0.4  # of 255 levels


def test_workers_without_shared_memory_are_refused(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(picture_batches, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(picture_batches.shutil, "disk_usage", lambda path: SimpleNamespace(free=4_000))
    source = open_source(pictures, labelled=False)
    with pytest.raises(UserError, match=r"need [\d,]+ bytes of shared memory, and .* has 4,000 left"):
        next(read_source(source, jobs_of(source), VIEW, MAX_PIXELS, 1, 5))
    next(read_source(source, jobs_of(source), VIEW, MAX_PIXELS, 0, 5))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_annotation_leaves_no_worker_and_no_thread(pictures, tmp_path, stop):
    before = {child.pid for child in multiprocessing.active_children()}
    threads = set(threading.enumerate())

    def progress(done, total):
        raise stop

    with pytest.raises(stop) as caught:
        annotate(Brittle(), pictures, tmp_path / "store", workers=2, class_map="own", progress=progress, **OPTIONS)
    del caught
    assert {child.pid for child in multiprocessing.active_children()} <= before
    assert {thread for thread in threading.enumerate() if thread.name in ("label-writer", "picture-mover")} <= threads


def test_memory_for_batches_is_bounded():
    """Of a batch of 64 pictures of 600 px a slot takes 69 MB: by smaller pieces there are fewer of them."""
    large, usual = View((600,)), View((224,))
    assert piece_and_slots(usual, 64, 8) == (16, 5)
    assert piece_and_slots(large, 64, 8) == (8, 3)
    assert piece_and_slots(large, 64, 16) == (4, 3)
    assert piece_and_slots(View((600, 370)), 64, 16) == (2, 2)
    assert piece_and_slots(large, 512, 32) == (8, 2)  # two of them are needed, whatever they take
    assert piece_and_slots(large, 64, 0) == (16, 1)
