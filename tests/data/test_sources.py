from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alltokens.data.picture_source import PackedStrings, PictureSource, sorted_classes, with_class_names
from alltokens.data.sources import find_splits, open_scenes, open_source
from alltokens.errors import UserError


def picture(shade: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def folder(root: Path, *names: str) -> Path:
    """A folder with these files, the i-th a picture of shade i; a name that ends in "/" is a folder."""
    for shade, name in enumerate(names):
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(shade))
    return root


def tar(path: Path, members: Mapping[str, bytes] | Sequence[str]) -> Path:
    contents = members if isinstance(members, Mapping) else {name: picture(i) for i, name in enumerate(members)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def shade(source: PictureSource, index: int) -> int:
    encoded = source.read(index)
    assert isinstance(encoded, bytes)
    return int(np.asarray(Image.open(io.BytesIO(encoded)))[0, 0, 0])


def content(source: PictureSource) -> dict[str, tuple[str, int]]:
    """Key -> class name and shade."""
    return {
        key: (source.class_names[label], shade(source, index))
        for index, (key, label) in enumerate(zip(source.keys, source.labels, strict=True))
    }


def test_class_folders_give_names_labels_keys_and_bytes(tmp_path: Path) -> None:
    source = open_source(
        folder(tmp_path, "dog/a.png", "cat/b.PNG", "cat/deep/er.tif", "cat/notes.txt", ".x/hidden.png")
    )
    assert source.class_names == ("cat", "deep", "dog")
    assert content(source) == {"cat/b.PNG": ("cat", 1), "cat/deep/er.tif": ("deep", 2), "dog/a.png": ("dog", 0)}


@pytest.mark.parametrize("extension", [".webp", ".JPEG", ".jpg", ".png", ".bmp", ".gif", ".tiff"])
def test_every_usual_extension_is_found(tmp_path: Path, extension: str) -> None:
    assert len(open_source(folder(tmp_path, f"a/1{extension}", f"b/2{extension}"))) == 2


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    folder(tmp_path / "elsewhere", "1.png")
    folder(tmp_path / "root", "b/2.png")
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "b" / "back").symlink_to(tmp_path / "root")
    assert list(open_source(tmp_path / "root").keys) == ["a/1.png", "b/2.png"]


def test_folders_that_share_a_name_are_called_by_their_paths(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, "cat/black/1.png", "dog/black/2.png", "dog/white/3.png"))
    assert source.class_names == ("cat/black", "dog/black", "dog/white")


def test_classes_are_sorted_as_timm_sorts_them(tmp_path: Path) -> None:
    from timm.data.readers.reader_image_folder import find_images_and_targets

    root = folder(tmp_path, *(f"{name}/x.png" for name in ("10", "9", "Zebra", "ant", "class2", "class11")))
    assert list(open_source(root).class_names) == list(find_images_and_targets(str(root))[1])


def test_the_order_of_classes_does_not_hang_on_the_order_they_are_met_in() -> None:
    names = ["a1", "A1", "a01", "b"]
    assert sorted_classes(names) == sorted_classes(reversed(names)) == ["A1", "a01", "a1", "b"]


def test_validation_counts_in_the_classes_of_training(tmp_path: Path) -> None:
    folder(tmp_path, "train/ant/1.png", "train/bee/2.png", "train/cat/3.png", "val/bee/4.png", "val/cat/5.png")
    train = open_source(tmp_path, "train")
    val = open_source(tmp_path, "val", class_names=train.class_names)
    assert val.class_names == ("ant", "bee", "cat")
    assert content(val) == {"bee/4.png": ("bee", 3), "cat/5.png": ("cat", 4)}
    assert val.labels.tolist() == [1, 2]


def test_validation_finds_its_paths_among_the_paths_of_training(tmp_path: Path) -> None:
    root = folder(tmp_path, "train/cat/black/1.png", "train/dog/black/2.png", "val/dog/black/3.png")
    train = open_source(root / "train")
    assert open_source(root / "val", class_names=train.class_names).labels.tolist() == [1]


def test_a_validation_class_unknown_in_training_is_an_error(tmp_path: Path) -> None:
    folder(tmp_path, "beee/1.png", "cat/2.png")
    with pytest.raises(UserError, match=r"'beee' is not among the 2 classes .*Nearest: 'bee'"):
        open_source(tmp_path, class_names=("bee", "cat"))


def test_renaming_moves_labels_by_name() -> None:
    source = PictureSource("here", ("a", "b", "unused"), np.array([0, 1, 1]), ["x", "y", "z"], lambda index: b"")
    renamed = with_class_names(source, ("b", "c", "a"))
    assert renamed.labels.tolist() == [2, 0, 0]
    assert source.labels.tolist() == [0, 1, 1]


def test_labels_beyond_the_classes_are_an_error() -> None:
    with pytest.raises(UserError, match=r"here: y has the label 2, but there are 2 classes"):
        PictureSource("here", ("a", "b"), np.array([0, 2]), ["x", "y"], lambda index: b"")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), r"no pictures in .*\.jpg, .*\.webp"),
        (("cat/notes.txt",), "no pictures in"),
        (("a.png", "b.png"), r"2 picture\(s\) such as a\.png lie in no class folder"),
        (("cat/a.png", "dog/b.png", "loose.png"), r"1 picture\(s\) such as loose\.png"),
        (("cat/a.png", "dog/b.png", "emu/"), r"1 class\(es\) have no picture: emu"),
        (("cat/a.png", "dog/b.png", "emu/notes.txt"), r"no picture: emu"),
        (("cat/a.png",), "only one class, 'cat'"),
        (("train/a/x.png", "val/b/y.png"), "holds the splits train, val; say which"),
    ],
)
def test_a_folder_that_cannot_be_used_is_explained(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(folder(tmp_path, *files))


def test_empty_classes_can_be_allowed_and_keep_their_place(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, "ant/", "bee/1.png", "cat/2.png"), allow_empty_classes=True)
    assert source.class_names == ("ant", "bee", "cat")
    assert source.labels.tolist() == [1, 2]


def test_pictures_without_classes_can_be_read_unlabelled(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, "a.png", "deep/b.png"), labelled=False)
    assert source.class_names == ()
    assert (list(source.keys), source.labels.tolist()) == (["a.png", "deep/b.png"], [-1, -1])


def test_a_missing_path_names_its_nearest_neighbour(tmp_path: Path) -> None:
    folder(tmp_path, "pictures/a/1.png")
    with pytest.raises(UserError, match=r"no such file or folder: .*pictuers\. Did you mean .*pictures"):
        open_source(tmp_path / "pictuers")


def test_an_archive_that_cannot_be_read_in_any_order_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"")
    with pytest.raises(UserError, match="repack it as an uncompressed"):
        open_source(tmp_path / "x.tar.gz")


@pytest.mark.parametrize("name", ["val", "validation", "valid", "test"])
def test_splits_are_known_by_several_names(tmp_path: Path, name: str) -> None:
    folder(tmp_path, "train/a/1.png", "train/b/1.png", f"{name}/a/2.png", f"{name}/b/2.png")
    assert find_splits(tmp_path)["val"] == [tmp_path / name]
    assert list(open_source(tmp_path, "val").keys) == ["a/2.png", "b/2.png"]


def test_a_missing_split_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no split 'val' \(looked for val, .*it holds train"):
        open_source(folder(tmp_path, "train/a/1.png", "train/b/1.png"), "val")
    with pytest.raises(UserError, match=r"no split 'train' .*data.train and data.val"):
        open_source(tmp_path / "train", "train")
    (tmp_path / "all.tar").touch()
    with pytest.raises(UserError, match=r"no split 'train' .*a tar holds one split; say .*data.train and data.val"):
        open_source(tmp_path / "all.tar", "train")
    with pytest.raises(UserError, match=r"unknown split 'trian'. Did you mean 'train'"):
        open_source(tmp_path, "trian")


@pytest.mark.parametrize("prefix", ["", "./", "top/"])
def test_a_tar_of_class_folders(tmp_path: Path, prefix: str) -> None:
    path = tar(tmp_path / "all.tar", [f"{prefix}dog/a.png", f"{prefix}cat/b.png", "._junk.png", "readme.txt"])
    shown = prefix.removeprefix("./")
    assert content(open_source(path)) == {f"{shown}dog/a.png": ("dog", 0), f"{shown}cat/b.png": ("cat", 1)}


def test_a_folder_of_one_tar_per_class(tmp_path: Path) -> None:
    tar(tmp_path / "dog.tar", ["a.png", "b.png"])
    tar(tmp_path / "cat.tar", ["c.png"])
    expected = {"cat/c.png": ("cat", 0), "dog/a.png": ("dog", 0), "dog/b.png": ("dog", 1)}
    assert content(open_source(tmp_path)) == expected


def test_a_tar_of_class_tars_as_imagenet_is_published(tmp_path: Path) -> None:
    inner = [tar(tmp_path / "inner" / name, ["1.png", "2.png"]) for name in ("n01.tar", "n02.tar")]
    outer = tar(tmp_path / "outer.tar", {path.name: path.read_bytes() for path in inner})
    expected = {"n01/1.png": ("n01", 0), "n01/2.png": ("n01", 1), "n02/1.png": ("n02", 0), "n02/2.png": ("n02", 1)}
    assert content(open_source(outer)) == expected


def test_tars_named_after_splits(tmp_path: Path) -> None:
    tar(tmp_path / "train.tar", ["a/1.png", "b/2.png"])
    tar(tmp_path / "val.tar", ["b/3.png"])
    assert open_source(tmp_path, "val", class_names=open_source(tmp_path, "train").class_names).labels.tolist() == [1]


def test_a_tar_called_like_the_split_comes_before_those_with_the_word(tmp_path: Path) -> None:
    tar(tmp_path / "train.tar", ["a/1.png", "b/2.png"])
    tar(tmp_path / "train-masks.tar", ["a/1.png", "b/2.png"])
    assert find_splits(tmp_path) == {"train": [tmp_path / "train.tar"]}
    assert list(open_source(tmp_path, "train").keys) == ["a/1.png", "b/2.png"]


@pytest.mark.parametrize("damage", ["truncated", "compressed", "rubbish"])
def test_a_broken_tar_is_named(tmp_path: Path, damage: str) -> None:
    path = tar(tmp_path / "x.tar", {"a/1.png": picture(), "b/2.png": picture() + bytes(4000)})
    whole = path.read_bytes()
    if damage == "compressed":
        with tarfile.open(path, "w:gz") as file:
            file.addfile(tarfile.TarInfo("a"))
    else:
        path.write_bytes(whole[:2500] if damage == "truncated" else b"x" * 2000)
    with pytest.raises(UserError, match=r"x\.tar is not a whole, uncompressed tar"):
        open_source(path)


def test_shards_take_labels_from_cls_members(tmp_path: Path) -> None:
    first = {"0.png": picture(0), "0.cls": b"1\n", "1.cls": b"0", "1.png": picture(1), "1.seg.png": picture(9)}
    tar(tmp_path / "data-0.tar", first)
    tar(tmp_path / "data-1.tar", {"0.png": picture(2), "0.json": b'{"label": 1}'})
    source = open_source(tmp_path)
    assert content(source) == {"data-0/0.png": ("1", 0), "data-0/1.png": ("0", 1), "data-1/0.png": ("1", 2)}


def test_shards_take_class_names_from_the_file_beside_them(tmp_path: Path) -> None:
    tar(tmp_path / "a-train-0.tar", {"0.png": picture(0), "0.cls": b"1", "1.png": picture(1), "1.cls": b"0"})
    tar(tmp_path / "a-validation-0.tar", {"0.png": picture(2), "0.cls": b"1"})
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    assert content(open_source(tmp_path, "train")) == {"a-train-0/0.png": ("dog", 0), "a-train-0/1.png": ("cat", 1)}
    val = open_source(tmp_path, "val", class_names=("cat", "dog"))
    assert content(val) == {"a-validation-0/0.png": ("dog", 2)}


def test_shards_take_names_for_labels(tmp_path: Path) -> None:
    members = {"0.png": picture(0), "0.json": json.dumps({"label": "dog"}).encode(), "1.png": b"", "1.cls": b"cat"}
    source = open_source(tar(tmp_path / "x.tar", members))
    assert (source.class_names, source.labels.tolist()) == (("cat", "dog"), [1, 0])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"0.cls": b"0", "0.png": b"", "1.png": b""}, r"1\.png has no label; expected 1\.cls"),
        ({"0.json": b'{"caption": "x"}', "0.png": b""}, r"0\.png has no label; .* or 0\.json"),
        ({"0.json": b'{"label": ', "0.png": b""}, r"0\.png has no label"),
        ({"0.cls": b"7", "0.png": b""}, "0.png has the label 7, but there are 2 classes"),
        ({"0.cls": b"emu", "0.png": b""}, r"the class 'emu' of 0\.png is not in classnames\.txt"),
    ],
)
def test_a_wrong_label_in_a_shard_is_named(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError, match=message):
        open_source(tar(tmp_path / "x.tar", members))


@pytest.mark.parametrize("kind", ["folder", "tar", "hugging face"])
def test_threads_read_what_one_would(tmp_path: Path, kind: str) -> None:
    expected = [bytes([index]) * (100 + 1000 * index) for index in range(60)]
    files = {f"{'ab'[index % 2]}/{index:02d}.png": content for index, content in enumerate(expected)}
    if kind == "tar":
        source = open_source(tar(tmp_path / "all.tar", files))
    elif kind == "folder":
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        source = open_source(tmp_path)
    else:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
        rows = {
            "img": [{"bytes": content, "path": None} for content in expected],
            "label": [index % 2 for index in range(60)],
        }
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
        source = open_source(tmp_path / "saved")
    order = np.random.default_rng(0).integers(0, 60, 1500)
    numbers = [int(Path(key).stem) for key in source.keys]
    with ThreadPoolExecutor(8) as pool:
        for index, content in zip(order, pool.map(source.read, order), strict=True):
            assert content == expected[numbers[index]]


def test_scenes_are_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = open_scenes(3, size=32, split="val")
    shown = source.read(2)
    assert isinstance(shown, Image.Image)
    assert (shown.size, shown.mode, source.keys[2], len(source.class_names)) == ((32, 32), "RGB", "val/000002", 10)
    with pytest.raises(UserError, match="contradicts"):
        open_source("scenes:val", "train")
    with pytest.raises(UserError, match=r"unknown split of the scenes 'vall'. Did you mean 'val'"):
        open_source("scenes:vall")


def test_sources_travel_to_spawned_workers(tmp_path: Path) -> None:
    for path in (folder(tmp_path / "f", "a/1.png", "b/2.png"), tar(tmp_path / "x.tar", ["a/1.png", "b/2.png"])):
        source = open_source(path)
        assert content(pickle.loads(pickle.dumps(source))) == content(source)


def test_packed_strings_are_the_strings() -> None:
    strings = ["", "a/b.jpg", "zürich/猫.png", "bad\udcff"]
    packed = PackedStrings(strings)
    assert list(packed) == strings
    assert (len(packed), packed[-1], packed.index("a/b.jpg")) == (4, strings[-1], 1)
    with pytest.raises(IndexError):
        packed[4]
    assert list(PackedStrings([])) == []
