"""The quickstart with several seeds: writes benchmarks/quickstart.csv, and what it found into the recipes' cards.

python benchmarks/quickstart.py [SEED ...]      the default is 0 1 2 3 4

Seeds that the file has already, trained by the recipes as they are now, are not trained again. Several such commands
may run side by side.
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import hashlib
import json
import re
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
from alltokens.engine.recipes import load_recipe, packaged_recipes
from alltokens.engine.run_folder import read_metrics

FILE = Path(__file__).with_suffix(".csv")
RECIPES = ("quickstart", "quickstart_annotator", "quickstart_class")
SEEDS = 5  # at least, for a recipe to state a number
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


def spent(rows: list[dict[str, str]]) -> str:
    """How long the whole takes."""
    minutes = statistics.median(float(row["cpu_seconds"]) for row in rows) / 60
    return f"about {minutes:.0f} minutes of one core, for annotator, labels, both runs and the page"


def read_rows() -> list[dict[str, str]]:
    """The rows of the recipes as they are now; those of other settings are history."""
    if not FILE.is_file():
        return []
    with FILE.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("settings") == settings()]


def add_row(row: dict[str, str]) -> None:
    with (Path(tempfile.gettempdir()) / "alltokens-quickstart.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        rows = [*read_rows(), row]
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: int(row["seed"])))


def write_cards(rows: list[dict[str, str]]) -> None:
    """The recipes say what was measured, in `expected` and in the comment above."""
    for recipe in RECIPES:
        file, sentence = packaged_recipes()[recipe], expected(rows, recipe)
        text = re.sub(r"^# Expected:  .*$", f"# Expected:  {sentence}.", file.read_text(encoding="utf-8"), flags=re.M)
        text = re.sub(r"^  expected: .*$", f'  expected: "{sentence}"', text, flags=re.M)
        if recipe == "quickstart":
            text = re.sub(r"^  time: .*$", f'  time: "{spent(rows)}"', text, flags=re.M)
        file.write_text(text, encoding="utf-8")


def measure(config: RunConfig, seed: int) -> dict[str, str]:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    started, used = time.monotonic(), _cpu_seconds()
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
        "cpu_seconds": _cpu_seconds() - used,
        "threads": torch.get_num_threads(),
    }
    return {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in row.items()}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(seeds: list[int]) -> None:
    config = load_recipe("quickstart")
    for seed in seeds:
        if any(row["seed"] == str(seed) for row in read_rows()):
            continue
        row = measure(config, seed)
        add_row(row)
        print(row, flush=True)
    rows = read_rows()
    if len(rows) >= SEEDS:
        write_cards(rows)
        for recipe in RECIPES:
            print(f"{recipe}: {expected(rows, recipe)}")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(range(SEEDS)))
