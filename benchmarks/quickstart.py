"""The quickstart with five seeds: writes benchmarks/quickstart.csv, which the recipe's `expected` line is taken from.

python benchmarks/quickstart.py [SEEDS]
"""

import csv
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from alltokens.engine.recipes import load_recipe
from alltokens.engine.runs import train

FILE = Path(__file__).with_suffix(".csv")


def expected(rows: list[dict[str, str]]) -> str:
    """The sentence that a recipe may state."""
    top1 = [float(row["last_top1"]) for row in rows]
    return (
        f"{statistics.mean(top1):.1f} % top-1 after the last epoch (n = {len(top1)} seeds, standard deviation "
        f"{statistics.stdev(top1):.1f}, median {statistics.median(top1):.1f})"
    )


def main(seeds: int) -> None:
    rows = []
    config = load_recipe("quickstart")
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            settings = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
            result = train(settings, recipe="quickstart", run_dir=Path(folder) / "run", quiet=True)
        assert result.scores is not None
        rows.append(
            {
                "seed": seed,
                "last_top1": round(result.scores.top1, 2),
                "best_top1": round(result.best_top1, 2),
                "threads": torch.get_num_threads(),
                "training_seconds": round(result.seconds, 1),
            }
        )
        print(rows[-1], flush=True)
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(expected([{key: str(value) for key, value in row.items()} for row in rows]))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
