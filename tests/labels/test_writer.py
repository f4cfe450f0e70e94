"""Stores being written: interrupted, by several processes, on a full disk, into the wrong folder."""

import multiprocessing

import pytest

from alltokens.errors import UserError
from alltokens.labels import files
from alltokens.labels.manifest import Description
from alltokens.labels.store import LabelStore
from alltokens.labels.writer import LabelWriter, finish_store
from tests.labels.test_layout import random_maps
from tests.labels.test_store import CLASSES, GRID, make, names, some_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make(tmp_path_factory.mktemp("whole") / "store")


def test_a_writer_that_was_interrupted_goes_on_to_the_same_bytes(whole, tmp_path):
    _, owned, maps = whole
    about = Description(GRID, 5, CLASSES, annotator="tiny")
    with pytest.raises(KeyboardInterrupt), LabelWriter(tmp_path / "s", about, shard_size=5) as writer:
        writer.append(owned[:13], some_of(maps, slice(13)))
        raise KeyboardInterrupt
    (tmp_path / "s" / ".maps-0000-00002.bin.tmp").write_bytes(b"half of a shard")
    with pytest.raises(UserError, match=r"unfinished label store with 2 shard\(s\)"):
        LabelStore.open(tmp_path / "s")
    with LabelWriter(tmp_path / "s", about, shard_size=5) as writer:
        assert len(writer) == 10
        assert writer.remaining(owned) == owned[10:]
        assert writer.were_done(owned[9:11]) == [True, False]
        with pytest.raises(UserError, match=f"has the map of '{owned[2]}' already"):
            writer.append([owned[2]], some_of(maps, slice(1)))
        writer.append(owned[10:], some_of(maps, slice(10, 23)))
    store = finish_store(tmp_path / "s", 23)
    for file in whole[0].path.iterdir():
        assert (store.path / file.name).read_bytes() == file.read_bytes(), file.name
    assert len(list(store.path.iterdir())) == len(list(whole[0].path.iterdir()))
    assert len(finish_store(store.path)) == 23  # finished before
    with pytest.raises(UserError, match="is a finished label store"):
        LabelWriter(store.path, about)


def test_a_store_that_lacks_pictures_is_not_finished(tmp_path):
    about = Description(GRID, 5, CLASSES)
    maps = random_maps(3, 5, CLASSES, GRID)
    with LabelWriter(tmp_path / "s", about) as writer:
        writer.append(["a", "b", "c"], maps)
    with pytest.raises(UserError, match="the label maps of 3 pictures, expected 4; annotate the rest"):
        finish_store(tmp_path / "s", 4)
    with pytest.raises(UserError, match="no label maps to finish"):
        finish_store(tmp_path)


def test_keys_come_once_and_have_a_name(tmp_path):
    maps = random_maps(2, 5, CLASSES, GRID)
    with LabelWriter(tmp_path / "s", Description(GRID, 5, CLASSES)) as writer:
        for wrong, message in ((["a", "a"], "came twice"), (["a", ""], "not empty"), (["a"], "1 keys for 2")):
            with pytest.raises(UserError, match=message):
                writer.append(wrong, maps)
        writer.append(["a", "b"], maps)
        with pytest.raises(UserError, match="map of 'b' already"):
            writer.append(["c", "b"], maps)
        assert len(writer) == 2
    assert sorted(finish_store(tmp_path / "s").keys()) == ["a", "b"]


def _write_elsewhere(path):
    try:
        LabelWriter(path, Description(GRID, 5, CLASSES))
    except UserError as error:
        return str(error)
    return "was let in"


def test_two_processes_never_write_the_same_shards(tmp_path):
    with (
        LabelWriter(tmp_path / "s", Description(GRID, 5, CLASSES)),
        multiprocessing.get_context("fork").Pool(1) as pool,
    ):
        assert "another process writes the shards of rank 0" in pool.apply(_write_elsewhere, (tmp_path / "s",))


def test_other_settings_and_folders_with_other_things_are_refused(tmp_path):
    LabelWriter(tmp_path / "s", Description(GRID, 5, CLASSES)).close()
    with pytest.raises(UserError, match=r"was begun with kept 5, now 4; form 'plain', now 'packed'\. Use the same"):
        LabelWriter(tmp_path / "s", Description(GRID, 4, CLASSES, form="packed"))
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"holds other things, such as s; label maps want a folder of their own"):
        LabelWriter(tmp_path, Description(GRID, 5, CLASSES))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s", "thesis.tex"]
    with pytest.raises(UserError, match="cannot write label maps"):
        LabelWriter(tmp_path / "thesis.tex", Description(GRID, 5, CLASSES))
    with pytest.raises(UserError, match="shard_size 1 or more"):
        LabelWriter(tmp_path / "t", Description(GRID, 5, CLASSES), shard_size=0)


def test_a_full_disk_is_one_sentence_and_leaves_what_is_whole(tmp_path, monkeypatch):
    maps = random_maps(9, 5, CLASSES, GRID)
    about = Description(GRID, 5, CLASSES)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(UserError, match=r"cannot write .*maps-0000-00001.bin: No space left"),
        LabelWriter(tmp_path / "s", about, shard_size=4) as writer,
    ):
        writer.append(names(4), some_of(maps, slice(4)))
        monkeypatch.setattr(files.os, "fsync", full)
        writer.append(names(9)[4:], some_of(maps, slice(4, 9)))
    monkeypatch.undo()
    assert sorted(entry.name for entry in (tmp_path / "s").glob("[!.]*")) == ["maps-0000-00000.bin", "unfinished.json"]
    with LabelWriter(tmp_path / "s", about, shard_size=4) as writer:
        assert writer.remaining(names(9)) == names(9)[4:]


def test_a_folder_that_is_no_store_is_told_from_one(whole, tmp_path):
    with pytest.raises(UserError, match=r"is not a label store: no such folder. Did you mean .*store\?"):
        LabelStore.open(whole[0].path.with_name("stroe"))
    with pytest.raises(UserError, match=r"it has no manifest.json.*alltokens annotate makes one"):
        LabelStore.open(tmp_path)
