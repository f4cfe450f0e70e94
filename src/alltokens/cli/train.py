"""alltokens train: train a model by a recipe, or go on with a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from alltokens.cli import _options
from alltokens.cli._options import Hidden, Positional, Switch, shown_as
from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.loading import build
from alltokens.engine.recipes import load_recipe, overlay, packaged_recipes, recipe_name
from alltokens.errors import UserError

PROGRAM = "alltokens train"


@dataclass(frozen=True)
class Command(RunConfig):
    """The verb's own options, beside every setting of a run."""

    about: Annotated[RecipeCard, Hidden] = field(default_factory=RecipeCard)
    recipe: Annotated[Positional[str | None], shown_as("RECIPE")] = None
    """A packaged recipe (`alltokens recipes`) or a .yaml file."""
    run_dir: Annotated[str | None, shown_as("DIR")] = None
    """The folder of the run; the default is a new one under runs/."""
    weights_from: Annotated[str | None, shown_as("PATH")] = None
    """Start from these weights: a run's folder or a file. Class count and picture size may differ."""
    resume: Annotated[str | None, shown_as("RUN")] = None
    """Go on with the run in this folder, exactly where it stopped."""
    dry_run: Switch = False
    """Show settings, shapes, first loss and the time it would take; write nothing."""


SETTINGS = tuple(item.name for item in fields(RunConfig))


def main(words: Sequence[str]) -> int:
    wants_help = _options.asks_for_help(words)
    given = _options.given(Command(), [word for word in words if word not in ("-h", "--help")], f"{PROGRAM} RECIPE")
    settings = {name: given.pop(name) for name in SETTINGS if name in given}
    command = build(Command, given, _options.WHERE)
    if wants_help:
        _help(command)
    elif command.resume is not None:
        _resume(command, settings, words)
    else:
        _train(command, settings, words)
    return 0


def _train(command: Command, settings: dict[str, Any], words: Sequence[str]) -> None:
    if command.recipe is None:
        raise UserError(
            f"which recipe? {PROGRAM} quickstart is a first run, {PROGRAM} folder --data.root DIR trains on your own "
            "pictures; `alltokens recipes` lists all, and a .yaml file of your own will do"
        )
    config = overlay(load_recipe(command.recipe), settings, _options.WHERE)
    from alltokens.engine import experiment, runs

    if command.dry_run:
        print(runs.dry_run(config, weights_from=command.weights_from))
        return
    experiment.train(
        config,
        recipe=recipe_name(command.recipe),
        run_dir=None if command.run_dir is None else Path(command.run_dir),
        weights_from=command.weights_from,
        command=["alltokens", "train", *words],
    )


def _resume(command: Command, settings: dict[str, Any], words: Sequence[str]) -> None:
    assert command.resume is not None
    for name in ("recipe", "run_dir", "weights_from", "dry_run"):
        if getattr(command, name):
            shown = "a recipe" if name == "recipe" else "--" + name.replace("_", "-")
            raise UserError(f"--resume goes on with a run as it is; {shown} does not go with it")
    from alltokens.engine import experiment, run_folder

    run_dir = Path(command.resume)
    config = overlay(run_folder.load_config(run_dir), settings, _options.WHERE) if settings else None
    experiment.resume(run_dir, config=config, command=["alltokens", "train", *words])


def _help(command: Command) -> None:
    if command.recipe is None:
        print(SHORT_HELP.format(count=len(packaged_recipes())))
        return
    config = load_recipe(command.recipe)
    values = {name: getattr(config, name) for name in SETTINGS}
    about = config.about
    card = f"{about.summary}. {about.hardware}: {about.time}. Expected: {about.expected}." if about.summary else ""
    _options.show_help(Command(**values, recipe=command.recipe), f"{PROGRAM} {command.recipe}", card)


SHORT_HELP = """\
alltokens train RECIPE [options]       train by a recipe
alltokens train --resume RUN           go on with a run that stopped

  --data.root DIR        the pictures: a folder of class folders, a tar, shards, hfds:PATH, or scenes
  --run-dir DIR          the folder of the run; the default is a new one under runs/
  --weights-from PATH    start from the weights of a run or a file
  --dry-run              show settings, shapes, first loss and the time it would take; write nothing
  --GROUP.NAME VALUE     any setting of the recipe: --train.epochs 50 --model.options '{{depth: 8}}'

RECIPE is a packaged one (alltokens recipes lists {count}: quickstart for a first run, folder and finetune for pictures
of your own) or a .yaml file. alltokens train RECIPE --help lists every setting with the recipe's value."""
