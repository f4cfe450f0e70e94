"""One row for each run, in a CSV that travels: what has a good row is not trained again, on no machine."""

from __future__ import annotations

import csv
import fcntl
import typing
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from alltokens.errors import UserError


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    study: str
    arm: str
    seed: int
    status: str  # done or failed
    top1: float | None = None  # percent, after the last epoch
    top5: float | None = None
    loss: float | None = None
    best_top1: float | None = None  # of all evaluations
    epochs: int | None = None
    seconds: float | None = None  # in training steps, their compilation included
    wall_seconds: float | None = None  # from the start of the run to its row
    pictures_per_second: float | None = None  # of this run alone: the median over the logged intervals
    side_by_side: int | None = None  # runs that shared the device
    parameters: int | None = None
    gmacs: float | None = None
    train_pictures: int | None = None
    val_pictures: int | None = None
    token_accuracy: float | None = None  # percent, as the two below: token truth, see evaluate/token_truth.py
    pointing: float | None = None
    token_iou: float | None = None
    settings: str = ""  # hash of the arm's settings
    labels: str = ""  # annotator of the label store
    commit: str = ""
    device: str = ""
    torch: str = ""
    started: str = ""
    error: str = ""


COLUMNS = tuple(field.name for field in fields(Result))
_KINDS = typing.get_type_hints(Result)


def results_file(study_file: Path, out: str | Path | None = None) -> Path:
    """Where rows are: beside the study's file, or in `out`. Studies share a file, and runs that are the same."""
    return (study_file.parent if out is None else Path(out)) / "results.csv"


def read_results(file: Path) -> list[Result]:
    """All rows, in order; none if the file is not there."""
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as opened:
        reader = csv.DictReader(opened)
        if tuple(reader.fieldnames or COLUMNS) != COLUMNS:
            raise UserError(f"{file} has other columns than a study's results; move it away, or give another --out")
        return [_result(row, f"{file}, line {reader.line_num}") for row in reader]


def append_result(file: Path, result: Result) -> None:
    """Add a row; several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {name: _written(value) for name, value in asdict(result).items()}
    with _locked(file) as opened:
        writer = csv.DictWriter(opened, COLUMNS, lineterminator="\n")
        if opened.tell() == 0:
            writer.writeheader()
        writer.writerow(values)


def chosen(rows: Iterable[Result], settings: str) -> dict[int, Result]:
    """Seed -> the row that counts for these settings, of whatever study: the first good one, else the last failure."""
    found: dict[int, Result] = {}
    for row in rows:
        if row.settings != settings:
            continue
        before = found.get(row.seed)
        if before is None or before.status != "done":
            found[row.seed] = row
    return found


def stale(rows: Sequence[Result], study: str, arm: str, settings: str) -> int:
    """How many good rows of an arm were made with other settings, and so do not count."""
    same = [row for row in rows if (row.study, row.arm) == (study, arm) and row.status == "done"]
    return sum(row.settings != settings for row in same)


@contextmanager
def _locked(file: Path) -> typing.Iterator[typing.TextIO]:
    with file.open("a", encoding="utf-8", newline="") as opened:
        fcntl.lockf(opened, fcntl.LOCK_EX)  # goes with the file's closing
        opened.seek(0, 2)
        yield opened
        opened.flush()


def _written(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split()) if isinstance(value, str) else value


def _result(row: dict[str, str], where: str) -> Result:
    values: dict[str, Any] = {}
    for name, text in row.items():
        kind = next(option for option in (*typing.get_args(_KINDS[name]), _KINDS[name]) if option in (int, float, str))
        try:
            values[name] = None if text == "" and kind is not str else kind(text)
        except ValueError:
            raise UserError(f"{where}: {name} is {text!r}, which is no number") from None
    return Result(**values)
