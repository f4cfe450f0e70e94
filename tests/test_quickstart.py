"""The main job: a model that clearly learns, and numbers in its recipe that a command wrote."""

import csv
import dataclasses
import statistics

import pytest
from benchmarks.quickstart import FILE, expected

from alltokens.engine.recipes import load_recipe
from alltokens.engine.runs import train


def test_half_of_its_epochs_teach_it_more_than_forty_percent_of_ten_classes(tmp_path):
    config = load_recipe("quickstart")
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=config.train.epochs // 2))
    result = train(short, run_dir=tmp_path / "run", quiet=True)
    assert result.scores is not None
    assert result.scores.pictures == 1000
    assert result.scores.top1 >= 40


def test_the_recipe_expects_what_was_measured():
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 5
    assert load_recipe("quickstart").about.expected.startswith(expected(rows))
    assert statistics.median(float(row["last_top1"]) for row in rows) >= 60


@pytest.mark.slow
def test_the_whole_recipe_reaches_sixty_percent(tmp_path):
    result = train(load_recipe("quickstart"), run_dir=tmp_path / "run", quiet=True)
    assert result.scores is not None
    assert result.scores.top1 >= 60
