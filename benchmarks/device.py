"""All of `alltokens bench` on this machine, one file for each, into benchmarks/results/.

python -m benchmarks.device [--data DIR] [--models MODEL ...] [--out DIR] [--only NAME ...]      (make bench-device)

A bench that fails is named at the end, and what it had before stays; the others run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from alltokens.cli.bench import BENCHES

RESULTS = Path(__file__).with_name("results")
WITH_PICTURES = ("data", "annotate")  # measured on drawn scenes unless --data names real ones
WITH_STEPS = ("train", "tl_align", "token_labels")  # of the models that --models names, or of their own


def command(name: str, out: Path, data: str | None, models: Sequence[str] = ()) -> list[str]:
    words = [sys.executable, "-m", "alltokens", "bench", name]
    words += ["--csv", str(out / f".{name}.new.csv"), "--json", str(out / f".{name}.new.json")]
    words += ["--data", data] if data is not None and name in WITH_PICTURES else []
    return words + (["--models", *models] if models and name in WITH_STEPS else [])


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description="All benches of this machine, into one folder.")
    options.add_argument("--data", help="pictures for the benches that read some")
    options.add_argument("--models", nargs="+", default=(), help=f"timm models for {', '.join(WITH_STEPS)}")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--only", nargs="+", choices=sorted(BENCHES), default=list(BENCHES))
    chosen = options.parse_args(words)
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name in chosen.only:
        started = time.monotonic()
        print(f"== {name}: {BENCHES[name].meaning}", flush=True)
        done = subprocess.run(command(name, chosen.out, chosen.data, chosen.models), check=False)
        made = [chosen.out / f".{name}.new{ending}" for ending in (".csv", ".json")]
        if done.returncode == 0:
            for file in made:
                file.replace(chosen.out / (name + file.suffix))
        else:
            failed.append(name)
            for file in made:
                file.unlink(missing_ok=True)
        print(f"== {name}: exit code {done.returncode}, {time.monotonic() - started:.0f} s\n", flush=True)
    print(f"results in {chosen.out}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
