"""alltokens recipes: list the packaged recipes, show one, copy one to start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from alltokens.cli._options import Positional, Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.config import RecipeCard
from alltokens.engine.loading import to_yaml
from alltokens.engine.progress import table
from alltokens.engine.recipes import load_recipe, packaged_recipes, recipe_name
from alltokens.errors import UserError

PROGRAM = "alltokens recipes"
TO_BEGIN_WITH = ("quickstart", "folder", "finetune", "imagenette")  # listed first: they need no cluster


@dataclass(frozen=True)
class Command:
    name: Annotated[Positional[str | None], shown_as("NAME")] = None
    """A recipe to show whole, every setting resolved; without it all are listed."""
    out: Annotated[str | None, shown_as("FILE")] = None
    """Write it to this .yaml file instead, as a start for one's own."""
    json: Switch = False
    """Print what every recipe promises as JSON: its command, hardware, time, expected result and their source."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "List the packaged recipes, show one, or copy one to start from.")
        return 0
    command = read(Command(), words, PROGRAM)
    if command.name is not None and command.json:
        raise UserError("--json lists all recipes; leave the name out")
    if command.name is None:
        if command.out is not None:
            raise UserError("--out writes one recipe: say which, alltokens recipes NAME --out FILE")
        _list(command.json)
    elif command.out is None:
        print(to_yaml(load_recipe(command.name)), end="")
    else:
        _copy(command.name, Path(command.out))
    return 0


def _list(as_json: bool) -> None:
    cards = {name: load_recipe(name).about for name in [*TO_BEGIN_WITH, *packaged_recipes()]}
    if as_json:
        print(json.dumps({name: asdict(card) for name, card in cards.items()}, indent=2))
        return
    table(("recipe", "what it trains"), [(name, card.summary) for name, card in cards.items()])
    print(
        "\nalltokens recipes NAME shows one, with its time and its expected result; "
        "alltokens recipes NAME --out mine.yaml copies one to start from"
    )


def _copy(name: str, file: Path) -> None:
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {file}: a recipe's file ends in .yaml")
    # The card's promises hold for the recipe as it is, not for what becomes of the copy.
    copy = replace(load_recipe(name), about=RecipeCard(summary=f"started from {recipe_name(name)}"))
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(to_yaml(copy))
    except FileExistsError:
        raise UserError(f"{file} exists already; choose another name or remove it") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
    print(f"wrote {file}; train it with: alltokens train {file}")
