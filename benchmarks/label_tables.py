"""The tables of docs/labels.md, out of the files in benchmarks/labels/; what was not run has no column.

python -m benchmarks.label_tables

Those files were made by these commands, each in a folder that holds what they name:

alltokens annotate --model efficientnet_lite2 --data imagenette128 --split train --out imagenette_lite2 \\
    --image-size 288 --form packed --class-map auto --batch-size 8 --json > imagenette128_train.json
(the same with `--split val`, into imagenette_lite2_val, for imagenette128_val.json)
alltokens bench labels --csv reads.csv
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "labels.md"
RESULTS = Path(__file__).with_name("labels")
PLACE = re.compile(r"(<!-- benchmarks/labels: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """The page with every table as the results say."""
    return PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def imagenette() -> str:
    parts = {"train": "imagenette128_train.json", "val": "imagenette128_val.json"}
    there = {part: RESULTS / name for part, name in parts.items() if (RESULTS / name).exists()}
    said = {part: json.loads(file.read_text(encoding="utf-8")) for part, file in there.items()}
    train = said["train"]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("pictures", lambda said: f"{said['pictures']:,}"),
        ("failed", lambda said: f"{len(said['failed']):,}"),
        ("the averaged map names the folder's class", lambda said: f"{said['agreement']:.2%}"),
        ("probability of a cell's first class", lambda said: f"{said['top_probability']:.1%}"),
        ("entropy of a cell", lambda said: f"{said['entropy']:.2f} nats"),
        ("probability that the kept classes have", lambda said: f"{said['kept_mass']:.1%}"),
        ("different first classes in a picture", lambda said: f"{said['classes_per_picture']:.1f}"),
        ("bytes a picture", lambda said: f"{said['bytes_per_picture']:,.0f}"),
        ("greatest rounding of a score", lambda said: f"{said['score_error']:.2g}"),
    ]
    rows_high, rows_wide = train["grid"]
    size = train["transform"]["image_size"]
    about = (
        f"\nMade by `{train['annotator']}` at {size} px: {rows_high} x {rows_wide} cells, top {train['kept']} of "
        f"{train['num_classes']} classes and the tail, {train['form']}; the classes found by `--class-map auto`.\n\n"
    )
    table = _table(("", *said), [(name, *map(cell, said.values())) for name, cell in rows])
    return about + table + f"\n```\n{train['command']}\n```\n\n"


def reads() -> str:
    with (RESULTS / "reads.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    devices = sorted({f"{row['device']}, torch {row['torch']}" for row in rows})
    cells = [
        (
            row["model"],
            row["arm"],
            f"{float(row['bytes_per_picture']):,.0f}",
            f"{float(row['bytes_at_most']):,.0f}" if row["bytes_at_most"] else "",
            f"{float(row['pictures_per_second']):,.0f}",
            " to ".join(f"{1e3 * int(row['batch']) / float(row[f'step_ms_{end}']):,.0f}" for end in ("high", "low")),
            f"{float(row['reads_at_least']):,.0f}" if row["reads_at_least"] else "",
        )
        for row in rows
    ]
    batch = rows[0]["batch"]
    return (
        f"\n`alltokens bench labels` on {'; '.join(devices)}: batches of {batch} by random keys, files in the system's "
        "cache, the processor's own time; the median of 15 rounds:\n\n"
        + _table(("maps", "form", "bytes a picture", "at most", "pictures/s", "quartiles", "at least"), cells)
        + "\n"
    )


TABLES: dict[str, Callable[[], str]] = {"imagenette": imagenette, "reads": reads}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
