"""The quickstart with several seeds: writes benchmarks/quickstart.csv, which its recipes' `expected` lines come from.

python benchmarks/quickstart.py [SEED ...]      the default is 0 1 2 3 4

Seeds that the file has already, trained by the recipes as they are now, are not trained again.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.experiment import COMPARISON, train
from alltokens.engine.loading import to_yaml
from alltokens.engine.recipes import load_recipe
from alltokens.engine.run_folder import read_metrics

FILE = Path(__file__).with_suffix(".csv")
RECIPES = ("quickstart", "quickstart_annotator", "quickstart_class")
COLUMN = {"quickstart": "top1", "quickstart_annotator": "annotator_top1", "quickstart_class": "class_top1"}


def settings() -> str:
    """A short hash of all that the recipes say but their cards."""
    plain = (to_yaml(dataclasses.replace(load_recipe(name), about=RecipeCard())) for name in RECIPES)
    return hashlib.sha256("".join(plain).encode()).hexdigest()[:10]


def expected(rows: list[dict[str, str]], recipe: str) -> str:
    """The sentence that a recipe may state."""
    top1 = [float(row[COLUMN[recipe]]) for row in rows]
    return (
        f"{statistics.mean(top1):.1f} % top-1 after the last epoch (n = {len(top1)} seeds, standard deviation "
        f"{statistics.stdev(top1):.1f}, median {statistics.median(top1):.1f})"
    )


def read_rows() -> list[dict[str, str]]:
    if not FILE.is_file():
        return []
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def measure(config: RunConfig, seed: int) -> dict[str, str]:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    started, spent = time.monotonic(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(config, recipe="quickstart", run_dir=run, quiet=True)
        facts = json.loads((run / COMPARISON).read_text(encoding="utf-8"))
        annotator = [line["top1"] for line in read_metrics(run / "annotator") if line["kind"] == "evaluation"][-1]
    tokens, classes = facts["runs"]
    row = {
        "seed": seed,
        "settings": settings(),
        "top1": tokens["top1"],
        "class_top1": classes["top1"],
        "annotator_top1": annotator,
        "right_labels": facts["right_labels"],
        "right_tokens": tokens["token_accuracy"],
        "class_right_tokens": classes["token_accuracy"],
        "seconds": time.monotonic() - started,
        "cpu_seconds": _cpu_seconds() - spent,
        "threads": torch.get_num_threads(),
    }
    return {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in row.items()}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(seeds: list[int]) -> None:
    config, now = load_recipe("quickstart"), settings()
    for seed in seeds:
        rows = [row for row in read_rows() if row.get("settings") == now]
        if any(row["seed"] == str(seed) for row in rows):
            continue
        rows.append(measure(config, seed))
        print(rows[-1], flush=True)
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[-1])
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: int(row["seed"])))
    rows = read_rows()
    if len(rows) > 1:
        for recipe in RECIPES:
            print(f"{recipe}: {expected(rows, recipe)}")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [0, 1, 2, 3, 4])
