"""The main job: a model that clearly learns, and numbers in its recipes that a command wrote."""

import csv
import dataclasses
import json
import statistics

import pytest
from benchmarks import quickstart
from benchmarks.quickstart import RECIPES, SEEDS, expected, read_rows, settings, spent

from alltokens.engine import experiment
from alltokens.engine.experiment import COMPARISON
from alltokens.engine.recipes import load_recipe, overlay
from alltokens.engine.runs import train

NOT_MEASURED = "not measured yet with five seeds: python benchmarks/quickstart.py does it"


def test_the_first_model_of_the_quickstart_learns_more_than_forty_percent_of_ten_classes(tmp_path):
    """In a third of its epochs and without mixing, which is what there is time for here."""
    short = {
        "data": {"train_pictures": 5000},
        "supervision": {"mixer": {"name": "none"}},
        "schedule": {"warmup_epochs": 0.5},
        "train": {"epochs": 2, "batch_size": 32},
    }
    result = train(overlay(load_recipe("quickstart_annotator"), short, "here"), run_dir=tmp_path / "run", quiet=True)
    assert result.scores is not None
    assert result.scores.pictures == 1000
    assert result.scores.top1 >= 40


def test_recipes_expect_what_was_measured_with_them_as_they_are():
    rows = read_rows()
    if len(rows) < SEEDS:
        assert all(load_recipe(name).about.expected == NOT_MEASURED for name in RECIPES)
        return
    assert all(load_recipe(name).about.expected == expected(rows, name) for name in RECIPES)
    assert load_recipe("quickstart").about.time == spent(rows)
    assert statistics.median(float(row["top1"]) for row in rows) >= 60


def test_the_twin_differs_in_where_labels_come_from_alone():
    tokens, classes = (load_recipe(name) for name in ("quickstart", "quickstart_class"))
    assert tokens.compare == "quickstart_class"
    assert dataclasses.replace(tokens.supervision, source="class") == classes.supervision
    same = ("model", "augment", "optimizer", "schedule", "train", "evaluation")
    assert all(getattr(tokens, name) == getattr(classes, name) for name in same)
    assert dataclasses.replace(tokens.data, annotator=None) == classes.data


def test_cards_are_written_from_the_rows(tmp_path, monkeypatch):
    rows = []
    for seed, top1 in enumerate((70.0, 71.0, 75.0, 72.0, 72.0)):
        row = {"seed": seed, "settings": settings(), "top1": top1, "class_top1": top1 - 5, "annotator_top1": top1 + 5}
        rows.append({key: str(value) for key, value in (row | {"cpu_seconds": 60.0 * seed}).items()})
    monkeypatch.setattr(quickstart, "FILE", tmp_path / "rows.csv")
    for row in reversed(rows):
        quickstart.add_row(row)
    assert read_rows() == rows
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 5
    for name in RECIPES:
        text = quickstart.packaged_recipes()[name].read_text(encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(quickstart, "packaged_recipes", lambda: {name: tmp_path / f"{name}.yaml" for name in RECIPES})
    quickstart.write_cards(rows)
    card = load_recipe(tmp_path / "quickstart.yaml").about
    assert card.expected.startswith("72.0 % top-1 after the last epoch (n = 5 seeds, standard deviation 1.9, median 72")
    assert card.time.startswith("about 2 minutes of one core")
    assert load_recipe(tmp_path / "quickstart_class.yaml").about.expected.startswith("67.0 %")
    plain = [
        dataclasses.replace(load_recipe(path), about=card) for path in ("quickstart", tmp_path / "quickstart.yaml")
    ]
    assert plain[0] == plain[1]


@pytest.mark.slow
def test_the_whole_quickstart_reaches_sixty_percent(tmp_path):
    result = experiment.train(load_recipe("quickstart"), recipe="quickstart", run_dir=tmp_path / "run", quiet=True)
    assert result.scores is not None
    assert result.scores.top1 >= 60
    facts = json.loads((tmp_path / "run" / COMPARISON).read_text())
    assert facts["right_labels"] >= 40  # of ten classes
