"""Every packaged recipe, shrunken, trains; its first 20 losses are the committed ones (`make losses` writes them).

They hold to the bit on one machine, and to 1e-4 on another.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import pytest

from alltokens.engine.recipes import load_recipe, packaged_recipes
from alltokens.engine.run_folder import read_metrics
from alltokens.engine.runs import train
from tests.shrink import shrunken

FOLDER = Path(__file__).parent / "golden" / "losses"
STEPS = 20


def first_losses(name: str, run_dir: Path) -> list[float]:
    config = shrunken(load_recipe(name))
    epochs = STEPS * config.train.batch_size // config.data.train_pictures
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, epochs=epochs),
        evaluation=dataclasses.replace(config.evaluation, every_epochs=epochs),
        checkpoint=dataclasses.replace(config.checkpoint, every_epochs=epochs),
    )
    train(config, run_dir=run_dir, quiet=True)
    return [line["loss"] for line in read_metrics(run_dir) if line["kind"] == "train"]


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_the_first_losses_of_a_recipe_are_the_committed_ones(name, tmp_path):
    committed = json.loads((FOLDER / f"{name}.json").read_text())
    losses = first_losses(name, tmp_path / "run")
    assert len(losses) == len(committed) == STEPS
    assert losses == pytest.approx(committed, abs=1e-4)


def test_there_is_no_loss_file_without_a_recipe():
    assert {file.stem for file in FOLDER.glob("*.json")} == set(packaged_recipes())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for recipe in sys.argv[1:] or sorted(packaged_recipes()):
        with tempfile.TemporaryDirectory() as folder:
            losses = first_losses(recipe, Path(folder) / "run")
        (FOLDER / f"{recipe}.json").write_text(json.dumps([round(loss, 7) for loss in losses]) + "\n")
        print(f"{recipe}: {losses[0]:.4f} ... {losses[-1]:.4f}")
