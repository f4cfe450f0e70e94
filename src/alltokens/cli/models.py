"""alltokens models: list models with what they cost and which followers they support."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Console
from rich.progress import track

from alltokens.cli._options import Positional, Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.progress import table
from alltokens.errors import unknown

if TYPE_CHECKING:
    from alltokens.models.cost import ModelCost

PROGRAM = "alltokens models"

# The models of our recipes and of the papers' tables.
CURATED = (
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "deit_base_patch16_384",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "lvvit_t",
    "lvvit_s",
    "lvvit_m",
    "lvvit_l",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "pvt_tiny",
    "pvt_small",
    "pvt_v2_b1",
    "pvt_v2_b2",
    "mixer_s16_224",
    "mixer_b16_224",
    "mixer_l16_224",
    "resnet50",
    "resnest50d",
)


@dataclass(frozen=True)
class Command:
    pattern: Annotated[Positional[str | None], shown_as("PATTERN")] = None
    """Part of a name, or a pattern such as 'deit*_384'; without it a short list is shown."""
    json: Switch = False
    """Print JSON instead of a table."""


class Row(NamedTuple):
    name: str
    cost: ModelCost
    followers: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "List models with their parameters and GMACs at the size they were made for.")
        return 0
    command = read(Command(), words, PROGRAM)
    rows = [_row(name) for name in _watched(matching(command.pattern))]
    if command.json:
        print(
            json.dumps([{"name": row.name, **row.cost._asdict(), "followers": row.followers} for row in rows], indent=2)
        )
        return 0
    table(("model", "parameters (M)", "GMACs", "at", "followers"), [_cells(row) for row in rows], numbers=(1, 2, 3))
    if command.pattern is None:
        print(f"\n{len(all_models()) - len(rows)} others train too: alltokens models PATTERN lists them")
    return 0


def all_models() -> list[str]:
    import timm

    return timm.list_models()


def matching(pattern: str | None) -> list[str]:
    """The models that a word or a pattern means, in timm's order."""
    import timm

    if pattern is None:
        return [name for name in CURATED if timm.is_model(name)]
    names = timm.list_models(pattern if "*" in pattern or "?" in pattern else f"*{pattern}*")
    if not names:
        raise unknown("model", pattern, all_models(), hint="Patterns may hold * and ?.")
    return names


def _row(name: str) -> Row:
    from alltokens.follow.families import follower_support
    from alltokens.models.cost import model_cost, weightless

    model = weightless(name)
    return Row(name, model_cost(model), follower_support(model))


def _cells(row: Row) -> tuple[str, ...]:
    cost = row.cost
    return (
        row.name,
        f"{cost.parameters / 1e6:.2f}",
        "-" if cost.gmacs is None else f"{cost.gmacs:.2f}",
        f"{cost.image_size[0]} px",
        ", ".join(row.followers),
    )


def _watched(names: list[str]) -> Iterable[str]:
    """A bar on the terminal while a long list is counted."""
    console = Console(stderr=True)
    return track(names, "counting", console=console, transient=True, disable=len(names) < 20 or not console.is_terminal)
