"""What a bench gives out: one row for each arm, as a table, as CSV to append to, as JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from alltokens.bench.timing import Timing, device_name
from alltokens.engine.progress import table
from alltokens.errors import UserError


@dataclass(frozen=True)
class Row:
    """One arm of one comparison. Ratios are to the comparison's first arm; low and high are the quartiles."""

    bench: str
    device: str
    torch: str
    model: str
    image_size: int
    batch: int
    precision: str
    mode: str  # eager or compiled
    arm: str
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    pictures_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    peak_mib: float | None  # None where it cannot be told (CPU)
    peak_ratio: float | None
    at_most: float | None  # what we want the ratio to stay below; None: nothing was promised
    peak_at_most: float | None


@dataclass(frozen=True)
class TrainRow(Row):
    """A training step beside what the device could do: its own speed at a large matrix product."""

    gmacs: float  # of one picture's forward; forward and backward are counted as three of it
    tflops: float  # that the step does in a second
    matmul_tflops: float  # that the product does, same precision, same run
    matmul_share: float


@dataclass(frozen=True)
class LabelRow(Row):
    """Reading label maps: how many a second, and what each takes on the disk."""

    reads_at_least: float | None  # pictures/s
    bytes_per_picture: float
    bytes_at_most: float | None


def of_timing(timing: Timing, batch: int, device: torch.device) -> dict[str, Any]:
    """What every row says of its arm's timing, and of where it was measured."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "step_ms": timing.milliseconds.median,
        "step_ms_low": timing.milliseconds.low,
        "step_ms_high": timing.milliseconds.high,
        "pictures_per_second": 1e3 * batch / timing.milliseconds.median,
        "ratio": timing.ratio.median,
        "ratio_low": timing.ratio.low,
        "ratio_high": timing.ratio.high,
    }


def columns(kind: type[Row]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


COLUMNS = columns(Row)


def show(rows: Sequence[Row]) -> None:
    """The table for people; the device stands above it."""
    for device, version in dict.fromkeys((row.device, row.torch) for row in rows):
        print(f"on {device}, torch {version}; median (quartiles) of a step; ratio to the first arm, round by round")
    for speed in dict.fromkeys(row.matmul_tflops for row in rows if isinstance(row, TrainRow)):
        print(f"the device's speed at a large matrix product: {speed:,.3g} TFLOP/s")
    print()
    if labels := [row for row in rows if isinstance(row, LabelRow)]:
        names = "maps,arm,batch,batch ms,,pictures/s,at least,ratio,,bytes each,at most"
        table(names.split(","), [_label_cells(row) for row in labels], numbers=(2, 3, 5, 6, 7, 9, 10))
        return
    names = "model,mode,arm,px,batch,,step ms,,pictures/s,ratio,,at most,peak MiB,ratio,at most,of matmul"
    table(names.split(","), [_cells(row) for row in rows], numbers=(3, 4, 6, 8, 9, 11, 12, 13, 14, 15))


def check_file(file: str | None, kind: type[Row] = Row) -> None:
    """Say before a long measurement, not after it, that its result could not be written."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {file}: give a file in a folder that exists")
    if path.suffix == ".csv" and path.is_file() and path.stat().st_size:
        with path.open(encoding="utf-8", newline="") as opened:
            header = next(csv.reader(opened), [])
        if tuple(header) != columns(kind):
            raise UserError(f"{file} has other columns than a bench writes; give another file")


def append_csv(rows: Sequence[Row], file: str) -> None:
    """Append to the file; a new one gets a header."""
    path = Path(file)
    new = not path.is_file() or not path.stat().st_size
    with path.open("a", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns(type(rows[0])), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({name: _rounded(value) for name, value in asdict(row).items()} for row in rows)


def write_json(rows: Sequence[Row], file: str) -> None:
    Path(file).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _label_cells(row: LabelRow) -> tuple[str, ...]:
    return (
        row.model,
        row.arm,
        str(row.batch),
        f"{row.step_ms:.2f}",
        f"({row.step_ms_low:.2f} to {row.step_ms_high:.2f})",
        f"{row.pictures_per_second:,.0f}",
        "" if row.reads_at_least is None else f"{row.reads_at_least:,.0f}",
        f"{row.ratio:.3f}",
        f"({row.ratio_low:.3f} to {row.ratio_high:.3f})",
        f"{row.bytes_per_picture:,.0f}",
        "" if row.bytes_at_most is None else f"{row.bytes_at_most:,.0f}",
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.mode,
        row.arm,
        str(row.image_size),
        str(row.batch),
        row.precision,
        f"{row.step_ms:.1f}",
        f"({row.step_ms_low:.1f} to {row.step_ms_high:.1f})",
        f"{row.pictures_per_second:,.0f}" if row.pictures_per_second >= 100 else f"{row.pictures_per_second:.1f}",
        f"{row.ratio:.3f}",
        f"({row.ratio_low:.3f} to {row.ratio_high:.3f})",
        "" if row.at_most is None else f"{row.at_most:.2f}",
        "-" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        "" if row.peak_ratio is None else f"{row.peak_ratio:.3f}",
        "" if row.peak_at_most is None else f"{row.peak_at_most:.2f}",
        f"{row.matmul_share:.1%}" if isinstance(row, TrainRow) else "",
    )
