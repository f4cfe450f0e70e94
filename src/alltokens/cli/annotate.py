"""alltokens annotate: a label map for every picture, made by an annotator, into a label store."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from alltokens.cli._options import Switch, asks_for_help, read, show_help, shown_as
from alltokens.cli.labels import summary_as_json, summary_rows
from alltokens.engine.progress import closing_table, duration
from alltokens.errors import UserError

if TYPE_CHECKING:
    from alltokens.engine.annotation import Annotation

PROGRAM = "alltokens annotate"


@dataclass(frozen=True)
class Command:
    model: Annotated[str | None, shown_as("NAME|RUN")] = None
    """The annotator: a timm or alltokens model, `local-dir:FOLDER`, the folder of a run, or efficientnet_lite2."""
    data: Annotated[str | None, shown_as("DIR")] = None
    """The pictures; class folders are used where there are any."""
    out: Annotated[str | None, shown_as("STORE")] = None
    """The folder of the label store; stopped at any moment, the same command goes on."""
    split: str | None = None
    """Which part of the pictures: train, val or test."""
    weights: Annotated[str | None, shown_as("PATH")] = None
    """Weights of your own, a file or a folder, instead of the annotator's published ones."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """How the annotator is built, as timm.create_model takes it: '{num_classes: 10}'."""
    class_map: Annotated[str | None, shown_as("auto|own|FILE")] = None
    """auto finds each class folder among the annotator's classes, own keeps the annotator's classes, a YAML file says
    for each class which of the annotator's it is. The default is auto where the pictures have classes."""
    kept: int = 5
    """Classes kept in each cell."""
    image_size: int | None = None
    """Side of the square in pixels to which the annotator's pictures are brought; the default is its own."""
    scales: tuple[float, ...] = (1.0,)
    """Look at each picture in these sizes, as multiples of --image-size, and average the scores."""
    flip: Switch = False
    """Look at each picture mirrored too, and average the scores."""
    official_center_crop: Switch = False
    """Show the annotator the middle of each picture only, as the published program does; for comparison."""
    form: Literal["plain", "packed"] = "plain"
    """plain keeps the scores in float16; packed takes about half of the space and rounds them."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """In which the annotator computes."""
    batch_size: int | None = None
    """Pictures at a time, in each process; the default is 64, on a CPU 8."""
    workers: int | None = None
    """Loader processes of each process; the default shares the cores out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    shard_size: int = 1024
    """Pictures in a file of the store; what an interruption can cost."""
    json: Switch = False
    """Print the summary as JSON."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "A label map for every picture, made once by an annotator.")
        return 0
    command = read(Command(), words, PROGRAM)
    wanted = {"--model NAME": command.model, "--data DIR": command.data, "--out STORE": command.out}
    if missing := [name for name, value in wanted.items() if value is None]:
        raise UserError(f"{PROGRAM} wants {' '.join(wanted)}; missing: {', '.join(missing)}")
    assert command.model is not None and command.data is not None and command.out is not None
    from alltokens.engine.annotation import run_annotation

    done = run_annotation(
        command.model,
        command.data,
        command.out,
        split=command.split,
        weights=command.weights,
        model_options=command.model_options,
        class_map=command.class_map,
        kept=command.kept,
        image_size=command.image_size,
        scales=command.scales,
        flip=command.flip,
        official_center_crop=command.official_center_crop,
        form=command.form,
        precision=command.precision,
        batch_size=command.batch_size,
        workers=command.workers,
        device=command.device,
        shard_size=command.shard_size,
        command=_spelled(words),
    )
    if done is None:  # not the main process
        return 0
    if command.json:
        pace = done.pace
        about = {
            "command": _spelled(words),
            "begun": done.begun,
            "seconds": round(pace.seconds, 2),
            "seconds_to_first": None if pace.to_first is None else round(pace.to_first, 2),
            "pictures_per_second_after": None if pace.after is None else round(pace.after, 1),
            "processes": done.processes,
        }
        print(json.dumps(about | summary_as_json(done.store, done.summary, done.failed), indent=2))
        return 0
    _show(done, command)
    return 0


def _spelled(words: Sequence[str]) -> str:
    return shlex.join(["alltokens", "annotate", *words])


def _show(done: Annotation, command: Command) -> None:
    rows = [("store", str(done.store.path)), *summary_rows(done.store, done.summary)]
    if done.failed:
        reasons = Counter(done.failed.values()).most_common(3)
        shown = "; ".join(f"{count:,}: {what}" for what, count in reasons)
        rows.append(("failed", f"{len(done.failed):,}, such as {next(iter(done.failed))}; failed.txt lists them"))
        rows.append(("because", shown))
    else:
        rows.append(("failed", "none"))
    rows.append(("took", _took(done)))
    closing_table(rows)
    assert command.data is not None
    where = ["--data", command.data, *(["--split", command.split] if command.split else [])]
    look = ["alltokens", "labels", "inspect", str(done.store.path), *where, "--page", "labels.html"]
    print(f"\nlook at it: {shlex.join(look)}")


def _took(done: Annotation) -> str:
    pace = done.pace
    if done.begun == "finished" or pace.to_first is None:
        return "finished before, nothing was left to do"
    took = f"{duration(pace.seconds)}, of which {pace.to_first:.1f} s to the first labels"
    if pace.after is not None:
        took += f", then {pace.after:,.1f} pictures/s"
        took += f" in each of {done.processes} processes" if done.processes > 1 else ""
    return took
