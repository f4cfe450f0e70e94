import json

import pytest

from alltokens.bench import annotate
from alltokens.bench.results import Row
from alltokens.cli import main
from alltokens.labels.annotate import annotate as make_labels

SMALL = ["--models", "test_resnet", "--image-size", "32", "--batch", "4", "--device", "cpu", "--workers", "0"]


def test_making_labels_beside_the_forward_pass(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(annotate, "DIFFERENT", 6)
    monkeypatch.setattr(annotate, "DRAWN", 48)
    made = []

    def watched(model, pictures, out, **options):
        made.append((len(list(pictures.iterdir())), options["batch_size"], options["image_size"]))
        assert sorted({entry.stat().st_ino for entry in pictures.iterdir()}).__len__() == 6
        return make_labels(model, pictures, out, **options)

    monkeypatch.setattr(annotate, "annotate", watched)
    words = ["--rounds", "2", "--seconds", "0.001", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "annotate", *SMALL, *words]) == 0
    assert made == [(16, 4, 32)] * 3  # a warm-up and two rounds of four batches
    rows = [Row(**row) for row in json.loads((tmp_path / "out.json").read_text())]
    assert [(row.arm, row.image_size, row.batch, row.precision) for row in rows] == [
        ("forward alone", 32, 4, "fp32"),
        ("annotate", 32, 4, "fp32"),
    ]
    assert rows[0].ratio == 1
    assert [row.at_most for row in rows] == [None, None]  # the limit is a GPU's
    for row in rows:
        assert row.pictures_per_second == pytest.approx(4_000 / row.step_ms)
    assert "forward alone" in capsys.readouterr().out


def test_wrong_wishes(capsys):
    for words, message in (
        (["--models", "resnet5O"], "Did you mean 'resnet50'?"),
        (["--batch", "0"], "must be positive"),
        (["--seconds", "-1"], "must be positive"),
    ):
        assert main(["bench", "annotate", *words]) == 2
        assert message in capsys.readouterr().err
