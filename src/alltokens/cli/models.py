"""alltokens models: list models with what they cost and which followers they support."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import timm
from rich.console import Console
from rich.progress import track

from alltokens.cli._options import Positional, Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.progress import table
from alltokens.errors import unknown
from alltokens.models.cost import ModelCost, model_cost

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
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "pvt_v2_b1",
    "pvt_v2_b2",
    "resnet50",
)


@dataclass(frozen=True)
class Command:
    pattern: Annotated[Positional[str | None], shown_as("PATTERN")] = None
    """Part of a name, or a pattern such as 'deit*_384'; without it a short list is shown."""
    json: Switch = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "List models with their parameters and GMACs at the size they were made for.")
        return 0
    command = read(Command(), words, PROGRAM)
    costs = [model_cost(name) for name in _watched(matching(command.pattern))]
    if command.json:
        print(json.dumps([_record(cost) for cost in costs], indent=2))
        return 0
    table(
        ("model", "parameters (M)", "GMACs", "at", "follows"),
        [
            (
                cost.name,
                f"{cost.parameters / 1e6:.2f}",
                "-" if cost.gmacs is None else f"{cost.gmacs:.2f}",
                f"{cost.image_size[0]} px",
                ", ".join(followers(cost.name)),
            )
            for cost in costs
        ],
        numbers=(1, 2, 3),
    )
    if command.pattern is None:
        print(f"\nThese and {len(all_models()) - len(costs)} others train: alltokens models PATTERN lists more")
    return 0


def all_models() -> list[str]:
    return timm.list_models()


def matching(pattern: str | None) -> list[str]:
    """The models that a word or a pattern means, in timm's order."""
    if pattern is None:
        return [name for name in CURATED if timm.is_model(name)]
    names = timm.list_models(pattern if "*" in pattern or "?" in pattern else f"*{pattern}*")
    if not names:
        raise unknown("model", pattern, all_models(), hint="Patterns may hold * and ?.")
    return names


def followers(name: str) -> tuple[str, ...]:
    """What a mixed label can follow through this model."""
    return ("area",)


def _watched(names: list[str]) -> Iterable[str]:
    """A bar on the terminal while a long list is counted."""
    console = Console(stderr=True)
    return track(names, "counting", console=console, transient=True, disable=len(names) < 20 or not console.is_terminal)


def _record(cost: ModelCost) -> dict[str, object]:
    return cost._asdict() | {"followers": followers(cost.name)}
