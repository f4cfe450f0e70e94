"""docs/results.md and docs/performance.md, out of the files that studies and benches wrote; no number is typed.

python -m benchmarks.docs
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from alltokens.cli.bench import BENCHES
from alltokens.report.style import as_svg
from alltokens.study.page import draw_study
from alltokens.study.plan import load_study
from alltokens.study.results import read_results
from alltokens.study.table import ENOUGH, Compared, columns, compare, number, sentences
from benchmarks.findings import findings, in_short

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
STUDIES = HERE / "studies"
RESULTS = HERE / "results"
INK = "#6b6b75"  # of pictures that lie on a page of unknown colour


def main() -> None:
    compared = all_studies()
    (DOCS / "results.md").write_text(results_page(compared), encoding="utf-8")
    for one in compared:
        if one.n:
            svg = as_svg(draw_study(one)).replace("currentColor", INK)
            (DOCS / "images" / f"study_{one.study.name}.svg").write_text(svg, encoding="utf-8")
    (DOCS / "performance.md").write_text(performance_page(RESULTS), encoding="utf-8")


def all_studies(folder: Path = STUDIES) -> list[Compared]:
    rows = read_results(folder / "results.csv")
    return [compare(load_study(file), rows) for file in sorted(folder.glob("*.yaml"))]


def results_page(compared: Sequence[Compared]) -> str:
    runs = {(arm.settings, row.seed): row for one in compared for arm in one.arms for row in arm.rows}
    lines = [
        "# Results",
        "",
        "Small vision transformers on small pictures, with many seeds: what the methods do there, and how sure that",
        "is. ImageNet itself was not used. Published numbers stand beside ours to show what was expected, not to",
        "compete: they are of other pictures, larger models and longer training. Pictures of 64 px and 40 epochs are",
        "a choice for many seeds: at 112 px and 100 epochs, as the recipe imagenette trains, the same time on a GPU",
        "would have given a handful of runs, and a handful shows nothing as small as what the papers report.",
        "",
        "Written by `python -m benchmarks.docs` out of benchmarks/studies/results.csv; how studies are run:",
        "[studies.md](studies.md). A difference is taken seed by seed; *detectable* is the true difference that so",
        f"many seeds would have shown with a chance of 80 %. Nothing is claimed of fewer than {ENOUGH} seeds.",
        "",
    ]
    if runs:
        used = list(runs.values())
        devices = sorted({f"{row.device}, torch {row.torch}" for row in used})
        commits = sorted({row.commit for row in used if row.commit})
        lines += [f"{len(runs)} runs on {'; '.join(devices)}; commits {', '.join(commits) or 'not known'}.", ""]
        lines += ["## In short", "", *in_short(compared), ""]
    else:
        lines += ["**No study has been run yet**: the tables below are empty, and nothing is claimed.", ""]
    for one in compared:
        lines += section(one)
    return "\n".join(lines).rstrip() + "\n"


def section(one: Compared) -> list[str]:
    plan = one.study.plan
    config = one.study.arms[plan.baseline or next(iter(one.study.arms))]
    options = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in config.model.options.items())
    model = f"{config.model.name}{f' ({options})' if options else ''}"
    lines = [f"## {one.study.name}", "", f"{plan.about}.", ""]
    lines += [
        f"Ours: {plan.data}, {config.data.image_size} px, {config.train.epochs} epochs, {model}; what arms do "
        f"otherwise: [{one.study.file.name}](../benchmarks/studies/{one.study.file.name}).",
        "",
    ]
    if not one.n:
        arms = ", ".join(one.study.arms)
        return [*lines, f"**Not run yet.** Planned: {plan.seeds} seeds of each of {arms}.", ""]
    shown = columns(one)
    lines += table(
        ["arm", *(head for head, _ in shown), *(f"published [{place}]" for place, _ in enumerate(plan.paper, 1))],
        [
            [arm.arm, *(cell(arm) for _, cell in shown), *(number(paper.top1.get(arm.arm), 1) for paper in plan.paper)]
            for arm in one.arms
        ],
    )
    lines += [""] + [f"- [{place}] {paper.source}: {paper.setting}." for place, paper in enumerate(plan.paper, 1)]
    if plan.paper:
        lines.append("")
    picture = f"images/study_{one.study.name}.svg"
    lines += [f"![{one.study.name}: top-1 of every seed, means with their 95 % intervals]({picture})", ""]
    missing = [arm.arm for arm in one.arms if arm.baseline is not None and arm.comparison is None]
    found = [f"- {finding.text}" for finding in findings(one)]
    found += [f"- Not run yet, or too seldom to be compared: {', '.join(missing)}."] * bool(missing)
    lines += ["What came of it:", "", *found, ""]
    lines += ["To be read with it:", "", *(f"- {sentence}" for sentence in [*sentences(one), *plan.notes])]
    return [*lines, ""]


def performance_page(folder: Path) -> str:
    lines = [
        "# Performance",
        "",
        "What `alltokens bench` measured; `make bench-device` runs all of it on the machine at hand. Written by",
        "`python -m benchmarks.docs` out of benchmarks/results/. Times are medians with quartiles, warm-up excluded;",
        "ratios are to the first arm of the same run, taken round by round.",
        "",
        "Arms take turns on a device that does nothing else meanwhile. On a GPU each arm of a comparison with compiled",
        "steps has a process of its own, because compiling keeps one Python thread busy: so all of them, those of",
        "several models too, compile at the same time.",
        "",
    ]
    for name, bench in BENCHES.items():
        file = folder / f"{name}.csv"
        lines += [f"## {name}", "", f"{bench.meaning[:1].upper()}{bench.meaning[1:]}: `alltokens bench {name}`.", ""]
        if not file.is_file():
            lines += ["**Not measured yet.**", ""]
            continue
        with file.open(encoding="utf-8", newline="") as opened:
            rows = list(csv.DictReader(opened))
        for device in dict.fromkeys((row["device"], row["torch"]) for row in rows):
            same = [row for row in rows if (row["device"], row["torch"]) == device]
            lines += [f"On {device[0]}, torch {device[1]}:", "", *bench_table(same), ""]
    return "\n".join(lines).rstrip() + "\n"


_APART = ("bench", "device", "torch")
_QUARTILES = ("_low", "_high")


def bench_table(rows: Sequence[dict[str, str]]) -> list[str]:
    """All columns that hold something; a value with quartiles gets them in brackets."""
    names = [
        name
        for name in rows[0]
        if name not in _APART and not name.endswith(_QUARTILES) and any(row[name] for row in rows)
    ]

    def cell(row: dict[str, str], name: str) -> str:
        low, high = (row.get(f"{name}{end}", "") for end in _QUARTILES)
        return shortened(row[name]) + (f" ({shortened(low)} to {shortened(high)})" if low and high else "")

    return table([name.replace("_", " ") for name in names], [[cell(row, name) for name in names] for row in rows])


def shortened(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(row)} |" for row in (heads, marks, *rows)]


if __name__ == "__main__":
    main()
