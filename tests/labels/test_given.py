"""Pictures beside a store: their classes in its own, by number, name or word."""

import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo

from alltokens.cli import main
from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels.class_map import AnnotatorClasses
from alltokens.labels.given import class_words, labels_in, open_folder
from alltokens.labels.manifest import Description
from alltokens.labels.writer import LabelWriter

WORDNET = tuple(ImageNetInfo("imagenet-1k").label_names())
KEYS = ["golf ball/0.png", "tench/1.png"]


def store_of(folder, classes, names=(), keys=KEYS):
    """Every cell of the first picture says class 1, of the second class 0."""
    ids = torch.tensor([1, 0]).view(2, 1, 1, 1).expand(2, 1, 2, 2).int()
    with LabelWriter(folder, Description((2, 2), 1, classes, class_names=names)) as writer:
        writer.append(keys, LabelMap(ids, torch.ones(ids.shape), torch.zeros(2, 2, 2)))
        return writer.finish()


@pytest.fixture
def pictures(tmp_path):
    for key in KEYS:
        (tmp_path / "pictures" / key).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / key)
    return tmp_path / "pictures"


def test_labels_are_found_by_number_name_and_word(tmp_path, pictures):
    source = open_folder(pictures, None)

    def found(name, classes, names=()):
        return list((labels_in(store_of(tmp_path / name, classes, names), source) or {}).values())

    assert found("same", 2, ("golf ball", "tench")) == [0, 1]
    assert found("nameless", 2) == [0, 1]
    assert found("more", 3, ("tench", "cat", "golf ball")) == [2, 0]
    assert found("imagenet", 1000, WORDNET) == [574, 0]
    with pytest.raises(UserError, match="3 classes without names, the pictures have 2"):
        found("counts", 3)
    with pytest.raises(UserError, match="no class called 'golf ball'"):
        found("others", 2, ("tench", "cat"))


def test_classes_are_called_by_words_where_there_are_any(tmp_path, pictures):
    assert AnnotatorClasses.called(("cat", "dog")).words == ("cat", "dog")
    assert class_words(store_of(tmp_path / "imagenet", 1000, WORDNET))[574] == "golf ball"
    nameless = store_of(tmp_path / "nameless", 2)
    assert class_words(nameless) == ["class 0", "class 1"]
    assert class_words(nameless, open_folder(pictures, None)) == ["golf ball", "tench"]


def test_inspect_takes_the_annotators_own_classes_and_pictures_without_any(tmp_path, pictures, capsys):
    """What `annotate` ends with, "look at it", works for every store that it makes."""

    def inspected(store, data):
        words = ["labels", "inspect", str(store.path), "--data", str(data), "--page", str(tmp_path / "page.html")]
        assert main(words) == 0
        return capsys.readouterr()

    shown, _ = inspected(store_of(tmp_path / "own", 1000, WORDNET), pictures)
    assert "0.00% of the averaged maps" in shown
    assert "goldfish" in shown  # class 1, in words
    flat = tmp_path / "flat"
    flat.mkdir()
    for key in KEYS:
        (pictures / key).rename(flat / key.rpartition("/")[2])
    shown, told = inspected(store_of(tmp_path / "flat_labels", 2, keys=["0.png", "1.png"]), flat)
    assert "agreement" not in shown
    assert "2 of 2 pictures" in told


def test_inspect_says_why_nothing_is_compared(tmp_path, pictures, capsys):
    store = store_of(tmp_path / "others", 2, ("cow", "hen"))
    assert main(["labels", "inspect", str(store.path), "--data", str(pictures)]) == 0
    shown, told = capsys.readouterr()
    assert "agreement" not in shown
    assert "not compared with the folders: the annotator knows no class called 'golf ball', 'tench'" in told
