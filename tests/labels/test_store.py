"""Stores of label maps: by key what was put in, and a clear word on everything that is not as it was written."""

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels import files, keys, manifest
from alltokens.labels.layout import FORMS
from alltokens.labels.manifest import Description
from alltokens.labels.store import LabelStore, verify_store
from alltokens.labels.writer import LabelWriter, finish_store
from tests.labels.test_layout import random_maps

CLASSES = 21_843
GRID = (3, 4)


def names(count, folder="n01440764"):
    return [f"{folder}/{folder}_{at * 7919 % 10007}.JPEG" for at in range(count)]


def some_of(maps, part):
    return LabelMap(*(value[part] for value in maps))


def make(path, count=23, form="plain", shard_size=5, ranks=1, **described):
    """A store of `count` maps, dealt to `ranks` processes in turn; its keys and maps."""
    maps, owned = random_maps(count, 5, described.get("num_classes", CLASSES), GRID), names(count)
    about = Description(GRID, 5, **{"num_classes": CLASSES, "form": form, "annotator": "tiny", **described})
    for rank in range(ranks):
        with LabelWriter(path, about, rank=rank, shard_size=shard_size) as writer:
            for start in range(rank * 4, count, ranks * 4):
                part = slice(start, start + 4)
                writer.append(owned[part], some_of(maps, part))
    return finish_store(path, count), owned, maps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make(tmp_path_factory.mktemp("whole") / "store")


@pytest.fixture
def copy(whole, tmp_path):
    """A store to break."""
    return shutil.copytree(whole[0].path, tmp_path / "copy")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_map_is_found_by_its_key_in_any_order(tmp_path, form, ranks):
    store, owned, maps = make(tmp_path / "s", form=form, ranks=ranks)
    assert (len(store), store.manifest.count, sorted(store.keys())) == (23, 23, sorted(owned))
    order = torch.randperm(23, generator=torch.Generator().manual_seed(0)).tolist()
    read = store.read([owned[at] for at in order])
    assert torch.equal(read.ids, maps.ids[order])
    for came, given in ((read.scores, maps.scores), (read.tail, maps.tail)):
        assert (came.float() - given[order]).abs().max() <= store.manifest.score_error
    assert (store.manifest.score_error == 0) == (form == "plain")
    one = store[owned[7]]
    assert (one.ids.dtype, one.scores.dtype, one.tail.dtype) == (torch.int32, torch.float16, torch.float16)
    for part, batched in zip(one, store.read([owned[7]] * 3), strict=True):
        assert torch.equal(part, batched[2])
    assert owned[3] in store
    assert "other" not in store
    assert 3 not in store
    assert len(store.read([]).ids) == 0
    assert verify_store(store.path) == []
    assert sorted(entry.name for entry in store.path.iterdir()) == sorted(
        ["manifest.json", "index.bin", *(shard.name for shard in store.manifest.shards)]
    )


def test_a_store_is_opened_anew_in_processes_that_are_not_forked(whole):
    store, owned, maps = whole
    sent = pickle.dumps(store)
    assert len(sent) < 1000  # the path alone
    again = pickle.loads(sent)
    assert torch.equal(again[owned[4]].ids, maps.ids[4])


def test_a_missing_key_is_named_with_the_nearest_one(whole):
    store, owned, _ = whole
    with pytest.raises(UserError, match=rf"no label map for '{owned[2][:-4]}png'.*Nearest: '{owned[2]}'"):
        store[owned[2][:-4] + "png"]
    with pytest.raises(UserError, match=r"no label map for 'a/b.png' \(2 pictures have none\)"):
        store.read(["a/b.png", owned[0], "a/c.png"])
    with pytest.raises(UserError, match="no label map for ''"):
        store[""]


def test_a_store_that_does_not_fit_the_training_is_refused_before_it(whole, tmp_path):
    store, owned, _ = whole
    store.check(owned, CLASSES)
    store.check(owned[:5], CLASSES, subset=True)
    with pytest.raises(UserError, match=r"maps of 23 pictures, the data set 5 pictures.*subset=True"):
        store.check(owned[:5], CLASSES)
    with pytest.raises(UserError, match=r"no label map for 'new.png'"):
        store.check([*owned, "new.png"], CLASSES)
    with pytest.raises(UserError, match="labels of 21843 classes, the model has 1000"):
        store.check(owned, 1000)
    with pytest.raises(UserError, match="labels of 21843 classes, the model has 2"):
        store.check(owned, class_names=("a", "b"))
    called = tuple(f"c{at}" for at in range(50))
    named, owned, _ = make(tmp_path / "named", num_classes=50, class_names=called)
    named.check(owned, 50, called)
    named.check(owned, 50, tuple(f"other{at}" for at in range(50)))
    with pytest.raises(UserError, match=r"another order: class 0 is 'c0' there and 'c49' in the data set"):
        named.check(owned, 50, called[::-1])


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_byte_is_found(tmp_path, every):
    """One bit of every fifth byte of every file, a different bit each time; in the slow suite of every byte."""
    copy = make(tmp_path / "s", count=4, shard_size=3)[0].path
    assert verify_store(copy) == []
    for file in sorted(copy.iterdir()):
        content = bytearray(file.read_bytes())
        for at in range(0, len(content), every):
            content[at] ^= 1 << at % 8
            file.write_bytes(content)
            assert verify_store(copy), f"{file.name}, byte {at}"
            content[at] ^= 1 << at % 8
        file.write_bytes(content)
    assert verify_store(copy) == []


@pytest.mark.parametrize("name", ["maps-0000-00002.bin", "index.bin", "manifest.json"])
def test_what_is_cut_off_too_long_or_missing_is_said_when_it_is_opened(copy, name):
    file = copy / name
    content = file.read_bytes()
    for wrong in (content[:-1], content[: len(content) // 2], content[:20], b"", content + b"\0"):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match=rf"{name}.* (is|has) (damaged|format)"):
            LabelStore.open(copy)
        assert verify_store(copy)
    file.unlink()
    with pytest.raises(UserError, match=r"is missing|unfinished|is not a label store"):
        LabelStore.open(copy)


def test_another_version_is_called_by_its_number(copy):
    shard = copy / "maps-0000-00001.bin"
    content = bytearray(shard.read_bytes())
    content[8] = 9
    shard.write_bytes(content)
    with pytest.raises(UserError, match="format version 9; this alltokens reads version 1"):
        LabelStore.open(copy)
    shard.write_bytes(bytes(8) + content[8:])
    with pytest.raises(UserError, match="no file of a label store"):
        LabelStore.open(copy)
    text = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(text | {"version": 2}))
    with pytest.raises(UserError, match=r"format version 2; this alltokens reads version 1: install a version"):
        LabelStore.open(copy)


def rewrite(store, **changed):
    """A manifest that says something else and is whole all the same."""
    file = store / "manifest.json"
    content = json.loads(file.read_text()) | changed
    content.pop("sha256")
    file.write_bytes(manifest._spelled(content | {"sha256": manifest._checksum(content)}))


def shards_of(store):
    return json.loads((store / "manifest.json").read_text())["shards"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_classes": 0}, "between 1 and all classes"),
        ({"kept": 4}, "its rows have .* bytes, those of this store"),
        ({"grid": [3, 4, 5]}, "two sides"),
        ({"grid": [3, 4.5]}, "whole numbers"),
        ({"grid": [10**9, 10**9]}, "its rows have"),
        ({"count": 22}, "do not add up to 22"),
        ({"tail": 1}, "tail"),
        ({"form": "zip"}, "unknown form"),
        ({"class_names": ["a"]}, "1 class names for 21843"),
        ({"more": 1}, "expected the entries"),
        ({"shards": []}, "do not add up"),
        ({"shards": 3}, "damaged"),
        ({"index": {"name": "../index.bin", "count": 23, "bytes": 1, "sha256": ""}}, "must be called index.bin"),
        ({"shards": [{"name": "/etc/passwd", "count": 23, "bytes": 1, "sha256": ""}]}, "must be called"),
    ],
)
def test_a_manifest_that_lies_is_refused(copy, changed, message):
    rewrite(copy, **changed)
    with pytest.raises(UserError, match=message):
        LabelStore.open(copy)


def test_shards_of_another_store_are_not_taken_for_its_own(copy):
    first = copy / "maps-0000-00000.bin"
    second = copy / "maps-0000-00001.bin"
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    rewrite(copy, shards=[{**shard, "bytes": (copy / shard["name"]).stat().st_size} for shard in shards_of(copy)])
    with pytest.raises(UserError, match=r"is not the shard that manifest\.json lists"):
        LabelStore.open(copy)
    assert any("SHA-256" in problem for problem in verify_store(copy))
    first.write_bytes(kept)
    (copy / "maps-0007-00000.bin").write_bytes(kept)
    assert any("does not belong to this store" in problem for problem in verify_store(copy))


def test_an_index_or_ids_that_contradict_the_shards_are_found(tmp_path):
    store, owned, _ = make(tmp_path / "s", num_classes=30)
    hashes, places = files.map_index(store.path / "index.bin", 23)
    files.write_index(store.path / "index.bin", np.array(hashes), np.roll(places, 1))
    rewrite(store.path, index=vars(files.record(store.path / "index.bin", 23)))
    assert any("does not list the pictures of" in problem for problem in verify_store(store.path))
    assert sum(key in LabelStore.open(store.path) for key in owned) < 23  # a map is never given to another key
    make(tmp_path / "t", num_classes=30)
    rewrite(tmp_path / "t", num_classes=20)
    assert any("class ids beyond 19" in problem for problem in verify_store(tmp_path / "t"))


def test_keys_of_the_same_hash_are_told_apart(tmp_path, monkeypatch):
    def three_hashes(encoded):
        return np.array([len(key) % 3 for key in encoded], dtype=np.uint64)

    monkeypatch.setattr(keys, "hash_keys", three_hashes)
    store, owned, maps = make(tmp_path / "s")
    assert torch.equal(store.read(owned).ids, maps.ids)
    assert "n01440764/n01440764_1.JPEG" not in store
    with pytest.raises(UserError, match="has two label maps"):
        for rank in range(2):
            with LabelWriter(tmp_path / "t", Description(GRID, 5, CLASSES), rank=rank) as writer:
                writer._done = keys.KeyIndex([], np.empty(0, np.uint64), np.empty(0, np.uint32))
                writer.append(owned[:9], some_of(maps, slice(9)))
        finish_store(tmp_path / "t")


def test_file_names_of_any_encoding_are_keys(tmp_path):
    odd = ["Ünïcode/猫.png", "broken-\udcff\udcfe.png", "with space and 'quotes'.png", "x" * 4000]
    maps = random_maps(4, 5, CLASSES, GRID)
    with LabelWriter(tmp_path / "s", Description(GRID, 5, CLASSES)) as writer:
        writer.append(odd, maps)
    store = finish_store(tmp_path / "s")
    assert list(store.keys()) == odd
    assert torch.equal(store.read(odd[::-1]).ids, maps.ids.flip(0))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_as_many_entries_as_imagenet_open_at_once(tmp_path, form):
    """1.28 M pictures in shards of 1,024, their rows small; opening is to take 1 s (printed) and 200 MB at most."""
    count, size = 1_281_167, 65_536
    maps = random_maps(1, 1, 1000, (1, 1))
    with LabelWriter(tmp_path / "s", Description((1, 1), 1, 1000, form=form), shard_size=1024) as writer:
        for start in range(0, count, size):
            some = range(start, min(count, start + size))
            many = LabelMap(*(value.expand(len(some), *value.shape[1:]) for value in maps))
            writer.append([f"n{at % 1000:08}/n{at % 1000:08}_{at}.JPEG" for at in some], many)
    finish_store(tmp_path / "s", count)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, grown = pool.apply(_open_and_read, (tmp_path / "s",))
    print(f"{form}: {seconds:.2f} s, {grown / 1e6:.0f} MB")
    assert 0 < grown < 200e6


def _open_and_read(path):
    """Seconds and bytes of resident memory, mapped pages among them, that opening and reads here and there take."""
    import time

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, begin = resident(), time.perf_counter()
    store = LabelStore.open(path)
    seconds = time.perf_counter() - begin
    store.read([f"n{at % 1000:08}/n{at % 1000:08}_{at}.JPEG" for at in range(0, 1_281_167, 5000)])
    return seconds, resident() - before
