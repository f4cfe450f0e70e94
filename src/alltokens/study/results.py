"""One row for each run, in a CSV that travels: what has a good row is not trained again, on no machine."""

from __future__ import annotations

import csv
import fcntl
import io
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
    """All rows, in order; none if the file is not there. A last line that was cut off is no row."""
    if not file.is_file():
        return []
    try:
        lines = list(csv.reader(io.StringIO(_whole(file.read_bytes()).decode(), newline=""), strict=True))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{file} is no file of results: {error}; move it away, or give another --out") from None
    if lines and tuple(lines[0]) != COLUMNS:
        raise UserError(f"{file} has other columns than a study's results; move it away, or give another --out")
    return [_result(line, f"{file}, line {number}") for number, line in enumerate(lines[1:], 2)]


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
    """Open for appending, for this process alone; a line that another was writing when it was killed is cut off."""
    with file.open("a+b") as raw:
        fcntl.lockf(raw, fcntl.LOCK_EX)  # goes with the file's closing
        raw.seek(0)
        whole = _whole(raw.read())
        raw.truncate(len(whole))
        raw.write(b"" if whole.endswith(b"\n") or not whole else b"\n")
        with io.TextIOWrapper(raw, encoding="utf-8", newline="") as opened:
            opened.seek(0, 2)
            yield opened


def _whole(content: bytes) -> bytes:
    """Without a last line that was cut off: it has no end, and not all values."""
    end = content.rfind(b"\n") + 1
    if not end:
        header = ",".join(COLUMNS).encode()
        return b"" if content != header and header.startswith(content) else content
    try:
        last = next(csv.reader([content[end:].decode()], strict=True), [])
    except (ValueError, csv.Error):
        last = []
    return content if len(last) == len(COLUMNS) else content[:end]


def _written(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split()) if isinstance(value, str) else value


def _result(line: Sequence[str], where: str) -> Result:
    if len(line) != len(COLUMNS):
        raise UserError(f"{where}: {len(line)} values instead of {len(COLUMNS)}; mend or remove the line")
    values: dict[str, Any] = {}
    for name, text in zip(COLUMNS, line, strict=True):
        kind = next(option for option in (*typing.get_args(_KINDS[name]), _KINDS[name]) if option in (int, float, str))
        try:
            values[name] = None if text == "" and kind is not str else kind(text)
        except ValueError:
            raise UserError(f"{where}: {name} is {text!r}, which is no number") from None
    return Result(**values)
