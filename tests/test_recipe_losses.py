"""Every packaged recipe, shrunken, trains; its first 20 losses are the committed ones (`make losses` writes them).

They hold to the bit on one machine, and to 1e-4 on another.
"""

import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path

import pytest

from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.loading import build, parse_yaml, to_yaml
from alltokens.engine.recipes import load_recipe, packaged_recipes
from alltokens.engine.run_folder import read_metrics
from alltokens.engine.runs import train
from tests.shrink import shrunken

FOLDER = Path(__file__).parent / "golden" / "losses"
STEPS = 20


def first_losses(name: str) -> list[float]:
    """Recipes that differ in what the shrunken form leaves out, such as picture size and length, are trained once."""
    return _first_losses(to_yaml(dataclasses.replace(shrunken(load_recipe(name)), about=RecipeCard())))


@functools.cache
def _first_losses(settings: str) -> list[float]:
    config = build(RunConfig, parse_yaml(settings, "shrunken"), "shrunken")
    epochs = STEPS * config.train.batch_size // config.data.train_pictures
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, epochs=epochs),
        evaluation=dataclasses.replace(config.evaluation, every_epochs=epochs),
        checkpoint=dataclasses.replace(config.checkpoint, every_epochs=epochs),
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, run_dir=Path(folder) / "run", quiet=True)
        return [line["loss"] for line in read_metrics(Path(folder) / "run") if line["kind"] == "train"]


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_the_first_losses_of_a_recipe_are_the_committed_ones(name):
    committed = json.loads((FOLDER / f"{name}.json").read_text())
    losses = first_losses(name)
    assert len(losses) == len(committed) == STEPS
    assert losses == pytest.approx(committed, abs=1e-4)


def test_there_is_no_loss_file_without_a_recipe():
    assert {file.stem for file in FOLDER.glob("*.json")} == set(packaged_recipes())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for recipe in sys.argv[1:] or sorted(packaged_recipes()):
        losses = first_losses(recipe)
        (FOLDER / f"{recipe}.json").write_text(json.dumps([round(loss, 7) for loss in losses]) + "\n")
        print(f"{recipe}: {losses[0]:.4f} ... {losses[-1]:.4f}")
