"""alltokens evaluate: top-1, top-5 and loss of a run or a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from alltokens.cli._options import Positional, Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.progress import closing_table
from alltokens.errors import UserError

PROGRAM = "alltokens evaluate"


@dataclass(frozen=True)
class Command:
    target: Annotated[Positional[str | None], shown_as("RUN|MODEL")] = None
    """The folder of a run, or the name of a timm model (its pretrained weights are downloaded)."""
    data: Annotated[str | None, shown_as("DIR")] = None
    """The pictures; the default is the run's own."""
    split: str = "val"
    """Which part of them."""
    batch_size: int | None = None
    """Pictures at a time; the default is the run's."""
    weights: Literal["best", "last"] = "best"
    """Which weights of the run."""
    json: Switch = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "Top-1, top-5 and loss of a run or a model, exact for any number of processes.")
        return 0
    command = read(Command(), words, PROGRAM)
    if command.target is None:
        raise UserError(f"evaluate what? {PROGRAM} RUN|MODEL [--data DIR]")
    from alltokens.evaluate import evaluate

    result = evaluate(
        command.target,
        data=command.data,
        split=command.split,
        batch_size=command.batch_size,
        weights=command.weights,
    )
    if command.json:
        print(json.dumps(result._asdict(), default=str, indent=2))
        return 0
    closing_table([(name, _shown(name, value)) for name, value in result._asdict().items() if value is not None])
    return 0


def _shown(name: str, value: object) -> str:
    if name in ("top1", "top5"):
        return f"{value:.2f} %"
    if name == "parameters":
        return f"{int(str(value)) / 1e6:.2f} M"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
