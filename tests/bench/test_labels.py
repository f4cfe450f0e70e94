import csv
import json

import pytest
import torch

from alltokens.bench import labels
from alltokens.bench.results import LabelRow
from alltokens.cli import main


def test_a_row_for_the_files_and_every_form(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(labels, "FILES", 16)
    monkeypatch.setattr(labels, "READ", 16)
    words = ["bench", "labels", "--pictures", "32", "--batch", "8", "--rounds", "2"]
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    assert main([*words, *files]) == 0
    rows = [LabelRow(**row) for row in json.loads((tmp_path / "out.json").read_text())]
    assert [(row.model[-6:].strip(), row.arm) for row in rows] == [
        ("1,000", labels.PT),
        ("1,000", "plain"),
        ("1,000", "packed"),
        ("21,843", "plain"),
        ("21,843", "packed"),
    ]
    assert [row.reads_at_least for row in rows] == [None, *[50_000] * 4]
    assert [row.bytes_at_most for row in rows] == [None, 7200, 4000, None, 5000]
    for row in rows:
        assert row.pictures_per_second == pytest.approx(8_000 / row.step_ms)
        assert row.device.endswith(", 1 thread")
    assert rows[0].ratio == 1
    assert rows[0].bytes_per_picture > 2 * 2 * 5 * 18 * 18  # two halves of five float16 in each cell
    assert 7128 < rows[1].bytes_per_picture < 7500  # a store of 32 pictures, its manifest among them
    with (tmp_path / "out.csv").open() as file:
        assert [float(row["bytes_per_picture"]) for row in csv.DictReader(file)] == pytest.approx(
            [row.bytes_per_picture for row in rows], rel=1e-5
        )
    shown = capsys.readouterr().out
    assert "one .pt each" in shown
    assert "50,000" in shown
    assert main(["bench", "labels", "--pictures", "4", "--batch", "8"]) == 2
    assert "batch must be between 1 and the number of pictures" in capsys.readouterr().err


def test_both_ways_read_the_same_labels(tmp_path):
    store = labels.write_store(tmp_path / "s", 1000, 20, "plain")
    assert labels.export_tree(store, tmp_path / "tree") == 20
    keys = list(store.keys())[::-3]
    files, maps = labels.read_files(tmp_path / "tree", keys), store.read(keys)
    assert torch.equal(files.ids, maps.ids.float())
    assert torch.equal(files.scores, maps.scores.float())
    ids = maps.ids.flatten(2).sort(1).values
    assert (ids[:, 1:] > ids[:, :-1]).all()  # five different classes in each cell


def test_batches_hold_every_key_once_an_epoch():
    drawn = labels._drawn([str(at) for at in range(10)], 5)
    first, second = ([*next(drawn), *next(drawn)] for _ in range(2))
    assert sorted(first) == sorted(second) == [str(at) for at in range(10)]
    assert first != second
