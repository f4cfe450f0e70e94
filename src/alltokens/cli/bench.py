"""alltokens bench: measure what we say about speed, here."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from rich.console import Console

from alltokens.cli._options import Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.progress import table
from alltokens.errors import UserError, unknown

if TYPE_CHECKING:
    import torch

    from alltokens.bench.results import Row

PROGRAM = "alltokens bench"
QUIET = 10.0  # seconds between two lines of progress that go into a file


@dataclass(frozen=True)
class StepsCommand:
    """Of every bench whose arms are training steps."""

    models: tuple[str, ...] = ()
    """timm models; the default is those that we state something of, fewer and smaller ones on a CPU."""
    batch: int | None = None
    """Pictures in a step; the default goes with the model and the device."""
    rounds: int | None = None
    """How often every arm is timed, in turn: the default is 12 to 20 (on a CPU what a minute gives, at least 5)."""
    eager: Switch = False
    """Measure without torch.compile only."""
    compile: Switch = False
    """Measure with torch.compile only; the default is both on a GPU, eager on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    csv: Annotated[str | None, shown_as("FILE")] = None
    """Append the rows to this file."""
    json: Annotated[str | None, shown_as("FILE")] = None
    """Write the rows to this file."""


def tl_align(words: Sequence[str]) -> int:
    from alltokens.bench.tl_align import bench_tl_align

    _steps("tl_align", "What it costs that the mixed label follows the tokens.", bench_tl_align, words)
    return 0


def token_labels(words: Sequence[str]) -> int:
    from alltokens.bench.token_labels import bench_token_labels, floor

    rows = _steps("token_labels", "What it costs to train every token with its own label.", bench_token_labels, words)
    for name in dict.fromkeys(row.model for row in rows):
        print(f"\n{name}: the products of the dense head alone, at the network's own speed, make x{floor(name):.3f}")
    return 0


def train(words: Sequence[str]) -> int:
    from alltokens.bench.results import TrainRow
    from alltokens.bench.train import bench_train

    _steps("train", "How fast models train here, and how much of the device that uses.", bench_train, words, TrainRow)
    return 0


def _steps(
    name: str, meaning: str, bench: Callable[..., Sequence[Row]], words: Sequence[str], kind: type[Row] | None = None
) -> Sequence[Row]:
    program = f"{PROGRAM} {name}"
    if asks_for_help(words):
        show_help(StepsCommand(), program, meaning)
        return ()
    command = read(StepsCommand(), words, program)
    modes = [mode for mode, asked in (("eager", command.eager), ("compiled", command.compile)) if asked]

    def rows(progress: Callable[[str], None]) -> Sequence[Row]:
        return bench(
            command.models,
            batch=command.batch,
            rounds=command.rounds,
            modes=modes or None,
            device=_device(command.device),
            progress=progress,
        )

    return _measure(rows, command.csv, command.json, kind)


@dataclass(frozen=True)
class DataCommand:
    data: Annotated[str | None, shown_as("DIR")] = None
    """The pictures; without it scenes are drawn."""
    rounds: int | None = None
    """How often the arms are timed, in turn; the default is 15."""
    eager: Switch = False
    """Do not compile the training step that the device cache feeds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu: transform and loader on one core; cuda: the device cache, too."""
    csv: Annotated[str | None, shown_as("FILE")] = None
    """Append the rows to this file."""
    json: Annotated[str | None, shown_as("FILE")] = None
    """Write the rows to this file."""


def data(words: Sequence[str]) -> int:
    program = f"{PROGRAM} data"
    if asks_for_help(words):
        show_help(DataCommand(), program, "Whether the pictures keep up: beside timm, and beside one fixed batch.")
        return 0
    command = read(DataCommand(), words, program)

    def rows(progress: Callable[[str], None]) -> Sequence[Row]:
        from alltokens.bench.data import bench_data

        return bench_data(
            command.data,
            rounds=command.rounds,
            compiled=not command.eager,
            device=_device(command.device),
            progress=progress,
        )

    _measure(rows, command.csv, command.json)
    return 0


@dataclass(frozen=True)
class LabelsCommand:
    pictures: int = 20_480
    """Label maps in each store."""
    batch: int = 256
    """Pictures read at once."""
    rounds: int | None = None
    """How often the arms are timed, in turn; the default is 15."""
    csv: Annotated[str | None, shown_as("FILE")] = None
    """Append the rows to this file."""
    json: Annotated[str | None, shown_as("FILE")] = None
    """Write the rows to this file."""


def labels(words: Sequence[str]) -> int:
    program = f"{PROGRAM} labels"
    if asks_for_help(words):
        show_help(LabelsCommand(), program, "Reading label maps by key on one core, and the bytes that they take.")
        return 0
    command = read(LabelsCommand(), words, program)
    from alltokens.bench.results import LabelRow

    def rows(progress: Callable[[str], None]) -> Sequence[Row]:
        from alltokens.bench.labels import bench_labels

        return bench_labels(pictures=command.pictures, batch=command.batch, rounds=command.rounds, progress=progress)

    _measure(rows, command.csv, command.json, LabelRow)
    return 0


@dataclass(frozen=True)
class AnnotateCommand:
    models: tuple[str, ...] = ()
    """timm models, with random weights; the default is the paper's annotator and two others (on a CPU: a small one)."""
    data: Annotated[str | None, shown_as("DIR")] = None
    """The pictures; without it scenes are drawn."""
    batch: int | None = None
    """Pictures at a time; the default is 64 (on a CPU 8)."""
    image_size: int | None = None
    """Side of what the annotator sees; the default is its own."""
    seconds: float | None = None
    """About how long one annotation takes; the default is 4 (on a CPU 2)."""
    rounds: int | None = None
    """How often all arms are timed, in turn; the default is 5."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """In which the annotator computes: the default is bf16 (on a CPU fp32)."""
    workers: int | None = None
    """Loader processes; the default shares the cores out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    csv: Annotated[str | None, shown_as("FILE")] = None
    """Append the rows to this file."""
    json: Annotated[str | None, shown_as("FILE")] = None
    """Write the rows to this file."""


def annotate(words: Sequence[str]) -> int:
    program = f"{PROGRAM} annotate"
    if asks_for_help(words):
        show_help(AnnotateCommand(), program, "Making labels beside the forward pass and the reading alone.")
        return 0
    command = read(AnnotateCommand(), words, program)
    from alltokens.bench.annotate import bench_annotate, limits

    def rows(progress: Callable[[str], None]) -> Sequence[Row]:
        return bench_annotate(
            command.models,
            command.data,
            batch=command.batch,
            image_size=command.image_size,
            seconds=command.seconds,
            rounds=command.rounds,
            precision=command.precision,
            workers=command.workers,
            device=_device(command.device),
            progress=progress,
        )

    measured = _measure(rows, command.csv, command.json)
    print("", *limits(measured), sep="\n")
    return 0


def _measure(
    bench: Callable[[Callable[[str], None]], Sequence[Row]],
    csv: str | None,
    json: str | None,
    kind: type[Row] | None = None,
) -> Sequence[Row]:
    """Run a bench, show its rows, and write the files that were asked for."""
    from alltokens.bench.results import Row, append_csv, check_file, show, write_json

    for file in (csv, json):
        check_file(file, kind or Row)
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            rows = bench(lambda text: status.update(text))
    else:
        rows = bench(_now_and_then())
    show(rows)
    if csv is not None:
        append_csv(rows, csv)
    if json is not None:
        write_json(rows, json)
    return rows


def _now_and_then() -> Callable[[str], None]:
    """Progress where no line can be rewritten: one every QUIET seconds at the most."""
    last = -math.inf

    def note(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return note


def _device(name: str) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that torch can use; `alltokens doctor` says more")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Bench(NamedTuple):
    meaning: str
    run: Callable[[Sequence[str]], int]


BENCHES = {
    "train": Bench("training steps of named models, beside the device's own speed", train),
    "data": Bench("transform and loader beside timm's; the device cache beside a fixed batch", data),
    "tl_align": Bench("a CutMix step beside a TL-Align step and TL-Align as published", tl_align),
    "labels": Bench("label maps read by key, beside one .pt file for each picture", labels),
    "annotate": Bench("making label maps beside the annotator's forward pass and the reading alone", annotate),
    "token_labels": Bench(
        "a step with the class label alone, with token labels, and with those as published", token_labels
    ),
}


def main(words: Sequence[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help"):
        print(f"usage: {PROGRAM} NAME ...\n\nMeasure speed and memory here, the arms of a comparison in turn.\n")
        table(("", ""), [(f"  {name}", bench.meaning) for name, bench in BENCHES.items()])
        print(f"\n{PROGRAM} NAME --help says more")
        return 0
    if name not in BENCHES:
        raise unknown("bench", name, BENCHES)
    return BENCHES[name].run(rest)
