"""What is evaluated: a run's own splits, other pictures, and what is refused."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from alltokens.engine.runs import train
from alltokens.errors import TrainingFailed, UserError
from alltokens.evaluate import evaluate, evaluation
from tests.tiny import tiny_config

SPLITS = {"train": 8, "val": 3, "test": 2}  # pictures of each of two classes


class Trained(NamedTuple):
    run: Path
    pictures: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    """A run on a folder of pictures that has a test split too."""
    root, rng = tmp_path_factory.mktemp("evaluated"), np.random.default_rng(0)
    for split, count in SPLITS.items():
        for name in ("ape", "bee"):
            folder = root / "pictures" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    config = tiny_config(
        data={"root": str(root / "pictures"), "train_pictures": None, "val_pictures": None},
        train={"epochs": 1, "batch_size": 8},
        schedule={"warmup_epochs": 0},
    )
    return Trained(train(config, run_dir=root / "run", quiet=True).run_dir, root / "pictures")


def pictures(trained: Trained, **options) -> int:
    result = evaluate(str(trained.run), workers=0, device="cpu", quiet=True, **options)
    assert result is not None
    return result.pictures


@pytest.mark.parametrize(("split", "count"), SPLITS.items())
def test_a_run_is_evaluated_on_any_split_of_its_pictures(trained, split, count):
    assert pictures(trained, split=split) == 2 * count
    assert pictures(trained, data=str(trained.pictures), split=split) == 2 * count
    assert pictures(trained, data=str(trained.pictures / split)) == 2 * count  # no splits in there: all of it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, "unknown split 'trian'. Did you mean 'train'"),
        ({"data": "nowhere"}, "no such file or folder: nowhere"),
        ({"weights": "lats"}, "unknown weights 'lats'"),
    ],
)
def test_what_is_not_there_is_named(trained, options, message):
    with pytest.raises(UserError, match=message):
        pictures(trained, **options)


def test_a_missing_run_names_those_beside_it(trained):
    with pytest.raises(UserError, match=r"runn is not a run folder.*Runs beside it: .*/run\."):
        evaluate(str(trained.run.parent / "runn"), device="cpu")
    with pytest.raises(UserError, match=r"unknown run folder or model 'resnet5O'. Did you mean 'resnet50'"):
        evaluate("resnet5O", device="cpu")
    with pytest.raises(UserError, match="resnet18 is a model and no run, so it has no pictures of its own"):
        evaluate("resnet18", device="cpu")


def test_out_of_memory_says_what_helps(trained, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluation, "score", full)
    with pytest.raises(TrainingFailed, match=r"with 4 pictures of 32 px at a time: a smaller --batch-size helps"):
        pictures(trained, batch_size=4)


def test_a_long_evaluation_says_how_far_it_is(trained, monkeypatch, capsys):
    from alltokens.engine import picture_progress

    monkeypatch.setattr(picture_progress, "SECONDS_BETWEEN_LINES", 0.0)
    evaluate(str(trained.run), split="train", workers=0, device="cpu", batch_size=8)
    shown, said = capsys.readouterr()
    assert shown == "", "stdout is for the result"
    lines = [line.split(" pictures")[0] for line in said.splitlines() if line.startswith("evaluating")]
    assert lines == ["evaluating  0 of 16", "evaluating  8 of 16"]
