"""alltokens evaluate: top-1, top-5 and loss of a run or a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from alltokens.cli._options import Positional, Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.progress import closing_table, duration
from alltokens.errors import UserError

if TYPE_CHECKING:
    from alltokens.evaluate import Evaluation

PROGRAM = "alltokens evaluate"


@dataclass(frozen=True)
class Command:
    target: Annotated[Positional[str | None], shown_as("RUN|MODEL")] = None
    """The folder of a run, or the name of a timm model (its pretrained weights are downloaded)."""
    data: Annotated[str | None, shown_as("DIR")] = None
    """The pictures; the default is the run's own."""
    split: str = "val"
    """Which part of them."""
    weights: Literal["best", "last"] = "best"
    """Which weights of the run."""
    batch_size: int | None = None
    """Pictures at a time."""
    image_size: int | None = None
    """Side of the input in pixels, if not the one that the model was trained for."""
    workers: int | None = None
    """Loader processes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    on_bad_picture: Literal["error", "skip"] = "error"
    """What to do with a picture that cannot be read; skipped ones are counted."""
    masks: Annotated[str | None, shown_as("PATH")] = None
    """Trimaps of the pictures, a folder or a tar: predictions of tokens are then scored too, as they are on scenes."""
    json: Switch = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "Top-1, top-5 and loss of a run or a model, exact for any number of processes.")
        return 0
    command = read(Command(), words, PROGRAM)
    options = {
        item.name: getattr(command, item.name) for item in fields(command) if item.name not in ("target", "json")
    }
    if command.target is None:
        raise UserError(f"evaluate what? {PROGRAM} RUN|MODEL [--data DIR]")
    from alltokens.evaluate import evaluate
    from alltokens.models.cost import in_words

    result = evaluate(command.target, **options)
    if result is None:  # not the main process
        return 0
    if command.json:
        print(json.dumps(result._asdict(), indent=2))
        return 0
    speed = result.pictures / max(result.seconds, 1e-9)
    skipped = f", {result.skipped} skipped" if result.skipped else ""
    closing_table(
        [
            (
                "model",
                f"{in_words(result.parameters, result.gmacs)} at {result.image_size} px",
            ),
            ("pictures", f"{result.pictures} of {result.classes} classes in {result.data}{skipped}"),
            ("top-1", f"{result.top1:.2f} %"),
            ("top-5", f"{result.top5:.2f} %"),
            ("loss", f"{result.loss:.4f}"),
            *_of_tokens(result),
            ("took", f"{duration(result.seconds)}, {speed:,.0f} pictures/s"),
        ]
    )
    return 0


def _of_tokens(result: Evaluation) -> list[tuple[str, str]]:
    """What the tokens came to, where their truth is known."""
    if result.pointing is None or result.token_accuracy is None:
        return []
    parts = f"{result.token_accuracy:.2f} % right, surest one on the object {result.pointing:.2f} %"
    return [("tokens", f"{parts}, IoU {result.token_iou:.2f} %")]
