"""alltokens bench: measure what we say about speed, here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console

from alltokens.cli._options import Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.progress import output_console, table
from alltokens.errors import UserError, unknown

if TYPE_CHECKING:
    from alltokens.bench.results import Row

PROGRAM = "alltokens bench"

# Name -> what it measures. Each has a function of the same name in this file.
BENCHES = {
    "tl_align": "a CutMix step, a TL-Align step, and TL-Align as published: time, pictures/s, peak memory",
}


@dataclass(frozen=True)
class TLAlignCommand:
    models: tuple[str, ...] = ()
    """timm models that TL-Align can follow; the default is those of our stated limits (on a CPU: DeiT-Tiny)."""
    batch: int | None = None
    """Pictures in a step; the default goes with the model and the device."""
    rounds: int | None = None
    """How often every arm is timed, in turn: 20 on a GPU (5 steps each), 15 on a CPU (1 step)."""
    eager: Switch = False
    """Measure without torch.compile only."""
    compile: Switch = False
    """Measure with torch.compile only; the default is both on a GPU, eager on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    csv: Annotated[str | None, shown_as("FILE")] = None
    """Append the rows to this file."""
    json: Annotated[str | None, shown_as("FILE")] = None
    """Write the rows to this file."""


def main(words: Sequence[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help"):
        print(f"usage: {PROGRAM} NAME ...\n\nMeasure speed and memory here, all arms of a comparison in one run.\n")
        table(("", ""), [(f"  {name}", meaning) for name, meaning in BENCHES.items()])
        print(f"\n{PROGRAM} NAME --help says more")
        return 0
    if name not in BENCHES:
        raise unknown("bench", name, BENCHES)
    return globals()[name](rest)


def tl_align(words: Sequence[str]) -> int:
    program = f"{PROGRAM} tl_align"
    if asks_for_help(words):
        show_help(TLAlignCommand(), program, "What it costs that the mixed label follows the tokens.")
        return 0
    command = read(TLAlignCommand(), words, program)
    modes = [mode for mode, asked in (("eager", command.eager), ("compiled", command.compile)) if asked]

    def rows(progress: Callable[[str], None]) -> list[Row]:
        from alltokens.bench.tl_align import bench_tl_align

        return bench_tl_align(
            command.models,
            batch=command.batch,
            rounds=command.rounds,
            modes=modes or None,
            device=_device(command.device),
            progress=progress,
        )

    return _measure(rows, command.csv, command.json)
