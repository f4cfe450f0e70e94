"""The page of a label store: the numbers in it are the store's, and names stay text."""

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from alltokens.cli import main
from alltokens.data.sources import open_source
from alltokens.errors import UserError
from alltokens.report.label_page import write_label_page
from tests.report.store import HOSTILE, MAPS, NAMES, make_store


class Outline(HTMLParser):
    """The tags of a page, and the text of its data."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.data, self.attributes = [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.attributes += [value or "" for _, value in attrs]

    def handle_data(self, text):
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag == "script" and attributes.get("id") == "data":
            self.data += text


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    store, pictures = make_store(folder)
    written = write_label_page(store, open_source(pictures, class_names=NAMES), folder / "labels.html")
    text = written.file.read_text(encoding="utf-8")
    assert written.bytes == len(text.encode())
    return written, text, json.loads(Outline(text).data)


def test_every_picture_is_there_with_its_numbers(page):
    written, _, data = page
    assert (written.pictures, written.measured) == (4, 4)
    assert data["comparable"] is True
    assert data["names"] == list(NAMES)
    by_key = {entry["key"]: entry for entry in data["pictures"]}
    assert set(by_key) == set(MAPS)
    wrong = by_key["cat/really-a-dog.png"]
    assert (wrong["label"], wrong["guess"]) == (0, 1)
    assert wrong["doubt"] == pytest.approx(0.7, abs=2e-3)
    assert by_key["dog/beside-a-cat.png"]["runner_up_size"] == 0.25
    assert (wrong["width"], wrong["height"]) == (60, 40)


def test_maps_are_as_in_the_store(page):
    _, _, data = page
    coded = next(entry["map"] for entry in data["pictures"] if entry["key"] == "dog/beside-a-cat.png")
    assert (coded["kept"], coded["rows"], coded["columns"], coded["wide"]) == (2, 2, 2, False)
    ids = np.frombuffer(base64.b64decode(coded["ids"]), "<u2").reshape(2, 4)
    scores = np.frombuffer(base64.b64decode(coded["scores"]), "<f2").astype(float).reshape(2, 4)
    tail = np.frombuffer(base64.b64decode(coded["tail"]), "<f2").astype(float)
    shares = np.exp(scores) / (np.exp(scores).sum(0) + np.exp(tail))
    for cell, expected in enumerate(MAPS["dog/beside-a-cat.png"]):
        found = dict(zip(ids[:, cell].tolist(), shares[:, cell].tolist(), strict=True))
        assert found == pytest.approx(expected, abs=2e-3)


def test_a_hostile_name_is_text_and_nothing_is_fetched(page):
    _, text, data = page
    outline = Outline(text)
    assert HOSTILE in data["names"]
    assert HOSTILE not in text
    assert not any(tag == "img" for tag, _ in outline.tags)
    assert not any(re.match(r"(https?:)?//", value) for value in outline.attributes)
    policy = next(attributes["content"] for tag, attributes in outline.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_fewer_pictures_and_other_classes(tmp_path):
    store, pictures = make_store(tmp_path)
    others = dataclasses.replace(open_source(pictures), class_names=("cow", "hen"))
    written = write_label_page(store, others, tmp_path / "other.html", pictures=2)
    data = json.loads(Outline(written.file.read_text(encoding="utf-8")).data)
    assert (written.pictures, written.measured) == (2, 4)
    assert data["comparable"] is False
    assert {entry["label"] for entry in data["pictures"]} == {-1}
    assert {entry["doubt"] for entry in data["pictures"]} == {None}
    fewer = write_label_page(store, open_source(pictures), tmp_path / "fewer.html")  # two of the store's three classes
    data = json.loads(Outline(fewer.file.read_text(encoding="utf-8")).data)
    assert data["comparable"] is True
    assert {(entry["key"][:3], entry["label"]) for entry in data["pictures"]} == {("cat", 0), ("dog", 1)}


def test_pictures_of_another_data_set_are_refused(tmp_path):
    store, _ = make_store(tmp_path)
    with pytest.raises(UserError, match="none of the 4 pictures"):
        write_label_page(store, open_source("scenes:val"), tmp_path / "x.html")


def test_the_command_writes_it(tmp_path, capsys):
    store, pictures = make_store(tmp_path)
    file = tmp_path / "pages" / "labels.html"
    words = ["labels", "inspect", str(store.path), "--data", str(pictures), "--page", str(file), "--pictures", "3"]
    assert main(words) == 0
    shown, told = capsys.readouterr()
    assert "75.00% of the averaged maps" in shown
    assert f"wrote {file}: 3 of 4 pictures" in told
    assert file.stat().st_size < 100_000
    assert main(["labels", "inspect", str(store.path), "--page", str(file)]) == 2
    assert "say where they are with --data" in capsys.readouterr().err
