"""Published label trees, in and out: the files that the token-labeling and ReLabel programs write and read."""

import pickle
from pathlib import Path

import pytest
import torch

from alltokens.core.label_maps import NO_TAIL
from alltokens.errors import UserError
from alltokens.labels.formats import export_tree, import_tree, published_name, read_file
from alltokens.labels.manifest import Description
from alltokens.labels.store import verify_store
from alltokens.labels.writer import LabelWriter
from tests.labels.test_layout import random_maps

KEYS = [f"n{at % 3:08}/n{at % 3:08}_{at}.JPEG" for at in range(7)]


def write_tree(folder, keys=KEYS, size=18, num_classes=1000):
    """What generate_label.py leaves behind: half-precision (2, 5, size, size), scores and ids."""
    maps = random_maps(len(keys), 5, num_classes, (size, size))
    for key, ids, scores in zip(keys, maps.ids, maps.scores, strict=True):
        file = folder / key.split("/")[0] / (key.split("/")[1].split(".")[0] + ".pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.stack([scores.half(), ids.half()]), file)
    return maps


@pytest.mark.parametrize("size", [18, 15], ids=["token labeling, 18x18", "ReLabel, 15x15"])
def test_a_published_tree_comes_in_and_goes_out_as_it_was(tmp_path, size):
    maps = write_tree(tmp_path / "tree", size=size)
    store = import_tree(tmp_path / "tree", tmp_path / "s", pictures=KEYS)
    assert (store.manifest.grid, store.manifest.tail, len(store)) == ((size, size), False, 7)
    read = store.read(KEYS)
    assert torch.equal(read.ids, maps.ids)
    assert torch.equal(read.scores.float(), maps.scores)
    assert verify_store(store.path) == []
    assert export_tree(store, tmp_path / "out") == 7
    there = sorted(path.relative_to(tmp_path / "tree") for path in (tmp_path / "tree").rglob("*.pt"))
    assert there == sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.pt"))
    for file in there:
        given, came = (torch.load(tmp_path / folder / file, weights_only=True) for folder in ("tree", "out"))
        assert torch.equal(given, came)
        assert came.dtype == torch.float16
        assert came.is_contiguous()


def test_without_the_pictures_keys_are_the_files_names(tmp_path):
    write_tree(tmp_path / "tree")
    store = import_tree(tmp_path / "tree", tmp_path / "s")
    assert sorted(store.keys()) == sorted(KEYS)
    packed = import_tree(tmp_path / "tree", tmp_path / "packed", extension=".png", form="packed")
    assert sorted(packed.keys()) == sorted(key.replace("JPEG", "png") for key in KEYS)
    away = packed.read([key.replace("JPEG", "png") for key in KEYS]).scores.float() - store.read(KEYS).scores.float()
    assert 0 < away.abs().max() <= packed.manifest.score_error


def test_files_are_found_by_folder_and_name_as_the_program_finds_them(tmp_path):
    assert published_name("train/n01/n01_1.a.JPEG") == "n01/n01_1.pt"
    assert published_name("picture.png") == "picture.pt"
    write_tree(tmp_path / "tree")
    deeper = [f"ILSVRC/train/{key}" for key in KEYS]
    assert len(import_tree(tmp_path / "tree", tmp_path / "s", pictures=deeper)) == 7
    with pytest.raises(UserError, match=r"'.*n00000000_0.a.JPEG' apart: both are n00000000/n00000000_0.pt"):
        import_tree(tmp_path / "tree", tmp_path / "t", pictures=[*KEYS, "n00000000/n00000000_0.a.JPEG"])


def test_pictures_without_a_file_are_counted_and_named(tmp_path):
    write_tree(tmp_path / "tree")
    wanted = [*KEYS, "n00000009/n00000009_1.JPEG"]
    with pytest.raises(UserError, match=r"no label file for 1 of 8 pictures, such as 'n00000009/n00000009_1.JPEG'"):
        import_tree(tmp_path / "tree", tmp_path / "s", pictures=wanted)
    assert not (tmp_path / "s").exists()
    assert len(import_tree(tmp_path / "tree", tmp_path / "s", pictures=wanted, allow_missing=True)) == 7
    with pytest.raises(UserError, match="no label file for 1 of 1"):
        import_tree(tmp_path / "tree", tmp_path / "t", pictures=["other.png"], allow_missing=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.pt"):
        import_tree(tmp_path / "empty", tmp_path / "t")
    with pytest.raises(UserError, match="is no folder"):
        import_tree(tmp_path / "nowhere", tmp_path / "t")


def test_an_interrupted_import_goes_on(tmp_path):
    write_tree(tmp_path / "tree")
    undisturbed = import_tree(tmp_path / "tree", tmp_path / "whole", shard_size=2)
    broken = tmp_path / "tree" / "n00000002" / "n00000002_5.pt"
    content = broken.read_bytes()
    about = undisturbed.manifest
    names = ("grid", "kept", "num_classes", "tail", "form", "annotator")
    same = Description(**{name: getattr(about, name) for name in names})
    first = list(undisturbed.keys())[:2]
    with LabelWriter(tmp_path / "s", same, shard_size=2) as writer:
        writer.append(first, undisturbed.read(first)._replace(tail=NO_TAIL))
    broken.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"n00000002_5.pt is no label file"):
        import_tree(tmp_path / "tree", tmp_path / "s", shard_size=2)
    broken.write_bytes(content)
    calls = []
    again = import_tree(tmp_path / "tree", tmp_path / "s", shard_size=2, progress=lambda *done: calls.append(done))
    assert calls == [(7, 7)]
    for file in undisturbed.path.iterdir():
        assert (again.path / file.name).read_bytes() == file.read_bytes()


class Hostile:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


@pytest.mark.parametrize("protocol", ["torch.save", "bare pickle"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, protocol):
    file, victim = tmp_path / "tree" / "a" / "b.pt", tmp_path / "was run"
    file.parent.mkdir(parents=True)
    if protocol == "torch.save":
        torch.save([torch.zeros(2, 5, 2, 2), Hostile(victim)], file)
    else:
        file.write_bytes(pickle.dumps(Hostile(victim), protocol=2))
    with pytest.raises(UserError, match=r"b.pt is no label file"):
        import_tree(tmp_path / "tree", tmp_path / "s")
    assert not victim.exists()


def test_what_no_label_file_holds_is_said(tmp_path):
    good = torch.zeros(2, 5, 4, 4)

    def ids(value, dtype=torch.float32):
        return torch.stack([good[0], torch.full_like(good[1], value)]).to(dtype)

    file = tmp_path / "a.pt"
    for wrong, message in (
        ({"a": good}, "got dict"),
        (good[0], r"got torch.float32 \(5, 4, 4\)"),
        (good.repeat(2, 1, 1, 1), r"\(4, 5, 4, 4\)"),
        (good.long(), "torch.int64"),
        (ids(0.5), "no class ids"),
        (ids(-1.0), "no class ids"),
        (ids(torch.nan), "no class ids, or a score is not finite"),
        (ids(2050.0, torch.float16), "class id 2050 in float16, which is exact up to 2048 only"),
        (ids(1000.0), "class id 1000, but there are 1000 classes"),
        (torch.zeros(2, 5, 3, 3), r"holds \(2, 5, 3, 3\), the files before it \(2, 5, 4, 4\)"),
    ):
        torch.save(wrong, file)
        with pytest.raises(UserError, match=message):
            read_file(file, (2, 5, 4, 4), 1000)
    torch.save(ids(2048.0, torch.float16), file)
    assert read_file(file).shape == (2, 5, 4, 4)
    with pytest.raises(UserError, match="cannot be read"):
        read_file(tmp_path / "b.pt")


def store_of(path, keys, num_classes=1000):
    with LabelWriter(path, Description((2, 2), 3, num_classes)) as writer:
        writer.append(keys, random_maps(len(keys), 3, num_classes, (2, 2)))
        return writer.finish()


@pytest.mark.parametrize("key", ["../out.png", "/etc/passwd.png", "a/../../b.png", "a//b.png", "a\\..\\b.png", "c:/b"])
def test_no_key_leads_out_of_the_folder(tmp_path, key):
    store = store_of(tmp_path / "s", ["fine/a.png", key])
    with pytest.raises(UserError, match=r"does not name a place below a folder; nothing was written"):
        export_tree(store, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s"]


def test_links_two_pictures_of_one_name_and_ids_beyond_half_precision_are_refused(tmp_path):
    store = store_of(tmp_path / "s", ["a/b.png"])
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link that leads elsewhere"):
        export_tree(store, tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(UserError, match=r"'a/b.png' and 'x/a/b.jpg' would both be written to a/b.pt"):
        export_tree(store_of(tmp_path / "two", ["a/b.png", "x/a/b.jpg"]), tmp_path / "new")
    with pytest.raises(UserError, match=r"exact up to 2048; this store has classes up to 21842"):
        export_tree(store_of(tmp_path / "many", ["a/b.png"], 21_843), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_exported_is_read_by_the_way_published(tmp_path):
    """Without the tail: the same first classes and scores as the store's."""
    store = store_of(tmp_path / "s", ["train/a/b.c.png"])
    assert export_tree(store, tmp_path / "out") == 1
    scores, ids = torch.load(tmp_path / "out" / "a" / "b.pt", weights_only=True)
    one = store["train/a/b.c.png"]
    assert torch.equal(scores, one.scores)
    assert torch.equal(ids.long(), one.ids.long())
