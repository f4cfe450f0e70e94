import json

import pytest
import torch

from alltokens.bench import annotate
from alltokens.bench.results import Row
from alltokens.cli import main
from alltokens.labels.annotate import annotate as make_labels

SMALL = ["--models", "test_resnet", "--image-size", "32", "--batch", "4", "--device", "cpu", "--workers", "0"]


def test_making_labels_beside_the_forward_pass_and_the_reading(tmp_path, capsys, monkeypatch):
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
    out = capsys.readouterr().out
    rows = [Row(**row) for row in json.loads((tmp_path / "out.json").read_text())]
    assert [(row.arm, row.image_size, row.batch, row.precision) for row in rows] == [
        ("forward alone", 32, 4, "fp32"),
        ("reading alone", 32, 4, "fp32"),
        ("annotate", 32, 4, "fp32"),
    ]
    assert rows[0].ratio == 1
    assert [row.at_most for row in rows] == [None] * 3  # the limit is a GPU's
    for row in rows:
        assert row.pictures_per_second == pytest.approx(4_000 / row.step_ms)
    assert annotate.limits(rows)[0] in out


@pytest.mark.parametrize(("reading", "forward"), [(0.5, 0.01), (0.01, 0.5)])
def test_a_round_takes_the_same_time_whichever_limits(reading, forward, tmp_path, monkeypatch):
    """Seconds of a batch, made up: 4 s are 8 batches of half a second each."""
    monkeypatch.setattr(annotate, "DIFFERENT", 3)
    monkeypatch.setattr(annotate, "DRAWN", 16)
    files = annotate.write_pictures(tmp_path / "different", None)
    folders, asked = [], []

    def forward_alone(*args):
        asked.append(args[3])
        return forward

    def annotated(model, pictures, *args):
        folders.append(len(list(pictures.iterdir())))
        return 0.5

    monkeypatch.setattr(annotate, "_forward_alone", forward_alone)
    monkeypatch.setattr(annotate, "_reading_alone", lambda *args: reading)
    monkeypatch.setattr(annotate, "_annotated", annotated)
    cpu = torch.device("cpu")
    rows = annotate._of_model("test_vit", files, tmp_path, 4, 160, 4.0, 2, "fp32", 1, cpu, lambda text: None)
    assert folders == [16, 32, 32]  # a warm-up of four batches
    assert asked == [2, round(2 / forward), round(2 / forward)]
    [line] = annotate.limits(rows)
    slower = "reading" if reading > forward else "forward"
    assert line.startswith(f"test_vit: {slower} limits (8 pictures/s, ")
    assert line.endswith(" 400); annotate does 1.00 of it")


def test_wrong_wishes(capsys):
    for words, message in (
        (["--models", "resnet5O"], "Did you mean 'resnet50'?"),
        (["--batch", "0"], "must be positive"),
        (["--seconds", "-1"], "must be positive"),
    ):
        assert main(["bench", "annotate", *words]) == 2
        assert message in capsys.readouterr().err
