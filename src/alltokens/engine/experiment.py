"""A run with what belongs before and after it: its label maps, a run to compare it with, a table, a page.

Everything lies in the run's folder, and each part is taken up where it stopped:

    RUN/annotator/      the annotator's run, where data.annotator is a recipe
    RUN/labels/         the label store, unless data.labels says otherwise
    RUN/<recipe>/       the run that `compare` names
    RUN/comparison.json and RUN/report.html
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alltokens.data.scenes import load_scenes
from alltokens.engine import checks, runs
from alltokens.engine.annotation import annotate_source, own_labels
from alltokens.engine.annotators import open_annotator
from alltokens.engine.config import RunConfig
from alltokens.engine.feeding import open_pictures
from alltokens.engine.progress import closing_table, duration, output_console, table
from alltokens.engine.recipes import find_recipe, load_recipe, packaged_recipes, recipe_name
from alltokens.engine.run_folder import RunFolder, load_config, read_metrics, write_atomically
from alltokens.engine.runs import RunResult
from alltokens.engine.runtime import Runtime, start_runtime
from alltokens.engine.together import together
from alltokens.errors import UserError
from alltokens.evaluate.token_truth import measure_token_truth
from alltokens.labels.inspect import summarise
from alltokens.labels.manifest import MANIFEST_NAME
from alltokens.labels.store import LabelStore
from alltokens.labels.truth import CellScores, score_cells
from alltokens.report import write_report

COMPARISON = "comparison.json"
PICTURES_ON_THE_PAGE = 200  # of each run, looked at for confusions and overlays


@dataclass(frozen=True)
class Row:
    """What one of the runs came to. Percent; None where it is not known."""

    recipe: str
    labels: str  # source x mixer x follower
    top1: float | None  # after the last epoch
    best_top1: float
    token_accuracy: float | None  # of the validation pictures' tokens, where the class of every pixel is known
    seconds: float


def train(
    config: RunConfig,
    *,
    recipe: str = "run",
    run_dir: Path | None = None,
    weights_from: str | None = None,
    command: Sequence[str] = (),
    quiet: bool = False,
) -> RunResult:
    """`runs.train`, with label maps made first and a run to compare with trained afterwards, if the settings say so."""
    checks.check(config)
    if config.data.annotator is None and config.compare is None:
        return runs.train(
            config, recipe=recipe, run_dir=run_dir, weights_from=weights_from, command=command, quiet=quiet
        )
    if not runs.was_restarted(run_dir):
        run_dir = _begin(config, recipe, run_dir, weights_from, command)
    assert run_dir is not None
    return resume(run_dir, command=command, quiet=quiet)


def resume(
    run_dir: Path, *, config: RunConfig | None = None, command: Sequence[str] = (), quiet: bool = False
) -> RunResult:
    """Go on with all that `train` began. Whatever is complete is left as it is."""
    own = load_config(run_dir)
    runs.refuse_changes(own, config)
    runtime = start_runtime(own.train)
    quiet = quiet or not runtime.is_main
    _make_labels(own, run_dir, runtime, quiet)
    result = runs.resume(run_dir, command=command, quiet=quiet)
    if own.compare is not None:
        _compare(own, result, runtime, quiet)
    return result


def _begin(
    config: RunConfig, recipe: str, run_dir: Path | None, weights_from: str | None, command: Sequence[str]
) -> Path:
    """A run folder for the whole. What can be found wrong before hours of work is found here."""
    if config.compare is not None:
        checks.check(_twin(config))
    if _is_recipe(config.data.annotator):
        checks.check(_annotator(config))
    elif config.data.annotator is not None:
        open_annotator(config.data.annotator)
    runtime = start_runtime(config.train)
    with together(runtime):
        open_pictures(config.data, "train")
        folder = RunFolder(runs.choose_folder(runtime, recipe, run_dir))
        if config.data.annotator is not None and config.data.labels is None:
            config = _with_data(config, labels=str(folder.path / "labels"))
        if runtime.is_main:
            folder.create(config, recipe, command, weights_from)
            folder.release()
        runtime.wait()
    return folder.path


def _train_or_resume(config: RunConfig, recipe: str, folder: Path, quiet: bool) -> RunResult:
    if RunFolder(folder).config_file.exists():
        return runs.resume(folder, config=config, quiet=quiet)
    return runs.train(config, recipe=recipe, run_dir=folder, quiet=quiet)


# Label maps


def _make_labels(config: RunConfig, run_dir: Path, runtime: Runtime, quiet: bool) -> None:
    """The store that data.annotator stands for, unless it is there and finished."""
    name = config.data.annotator
    if name is None:
        return
    assert config.data.labels is not None
    store = Path(config.data.labels)
    if (store / MANIFEST_NAME).exists():
        return
    if _is_recipe(name):
        _say(quiet, f"the annotator first: recipe {name}")
        _train_or_resume(_annotator(config), recipe_name(name), run_dir / "annotator", quiet)
        name = str(run_dir / "annotator")
    opened, source = open_annotator(name), open_pictures(config.data, "train")
    made = annotate_source(
        opened,
        source,
        store,
        device=runtime.device,
        command=shlex.join(["alltokens", "train", "--resume", str(run_dir)]),
        quiet=quiet,
        annotator=name,
        workers=0 if _shows_scenes(config) else config.data.workers,
        max_pixels=config.data.max_pixels,
    )
    if not quiet:
        closing_table(_of_labels(config, made, own_labels(made, source)))
        _say(quiet, "")


def _of_labels(config: RunConfig, store: LabelStore, labels: dict[str, int] | None) -> list[tuple[str, str]]:
    """How right the made labels are, as far as that can be told."""
    what = store.manifest
    rows = [("label maps", f"{len(store):,} pictures, {what.grid[0]}x{what.grid[1]} cells, top {what.kept} classes")]
    summary = summarise(store, labels)
    if summary.agreement is not None:
        rows.append(("pictures", f"{summary.agreement:.1%} of the averaged maps name the picture's class"))
    if (scores := _truth_of_labels(config, store)) is not None:
        rows.append(("tokens", f"{scores.top1:.1%} of {scores.cells:,} cells that show a class name it first"))
    return rows


def _truth_of_labels(config: RunConfig, store: LabelStore) -> CellScores | None:
    """How right labels are, cell by cell, where the class of every pixel is known."""
    if not _shows_scenes(config):
        return None
    truth = load_scenes(len(store), config.data.image_size, split="train").class_maps
    return score_cells(store, zip(open_pictures(config.data, "train").keys, truth, strict=True))


# What is compared


def _compare(config: RunConfig, result: RunResult, runtime: Runtime, quiet: bool) -> None:
    assert config.compare is not None
    name, folder = recipe_name(config.compare), result.run_dir
    _say(quiet, "", f"to compare with: recipe {name}")
    twin = _twin(config)
    other = _train_or_resume(twin, name, folder / name, quiet)
    facts = json.loads(RunFolder(folder).facts_file.read_text(encoding="utf-8"))
    rows = [_row(facts["recipe"], config, result, runtime), _row(name, twin, other, runtime)]
    if not runtime.is_main:
        return
    labels = None if config.data.labels is None else _truth_of_labels(config, LabelStore.open(config.data.labels))
    facts = {"right_labels": labels and 100 * labels.top1, "runs": [asdict(row) for row in rows]}
    write_atomically(folder / COMPARISON, json.dumps(facts, indent=2) + "\n")
    if not quiet:
        _show(rows)
    page = write_report([folder, other.run_dir], folder / "report.html", pictures=PICTURES_ON_THE_PAGE)
    _say(quiet, "", f"look at it: {page.file}")


def _row(recipe: str, config: RunConfig, result: RunResult, runtime: Runtime) -> Row:
    last = [line for line in read_metrics(result.run_dir) if line["kind"] == "evaluation"][-1:]
    truth = None
    if _shows_scenes(config):
        truth = measure_token_truth(result.net.to(runtime.device), config, "scenes").accuracy
    chosen = config.supervision
    return Row(
        recipe,
        f"{chosen.source} x {chosen.mixer.name} x {chosen.follower.name}",
        last[0].get("average_top1", last[0]["top1"]) if last else None,
        result.best_top1,
        truth,
        result.seconds,
    )


def _show(rows: Sequence[Row]) -> None:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} %"

    lines = [
        (row.recipe, row.labels, *map(percent, (row.top1, row.best_top1, row.token_accuracy)), duration(row.seconds))
        for row in rows
    ]
    _say(False, "")
    table(("recipe", "labels", "last top-1", "best top-1", "right tokens", "training"), lines, numbers=(2, 3, 4, 5))
    first, second = (row.top1 for row in rows)
    if first is not None and second is not None:
        _say(False, f"{first - second:+.2f} points of top-1, with one seed each; `alltokens study` compares by many")


def _twin(config: RunConfig) -> RunConfig:
    """The recipe to compare with, on the run's own pictures, as long, by the same schedule, from the same seed."""
    assert config.compare is not None
    other = load_recipe(config.compare)
    reads_maps = other.supervision.source != "class"
    labels = config.data.labels if reads_maps else None
    if reads_maps and labels is None and config.data.annotator is None:
        raise UserError(f"compare: {config.compare} reads label maps, and this run has none; set data.labels")
    return dataclasses.replace(
        other,
        data=dataclasses.replace(config.data, labels=labels, annotator=config.data.annotator if reads_maps else None),
        schedule=config.schedule,
        train=config.train,
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        log=config.log,
        compare=None,
    )


def _annotator(config: RunConfig) -> RunConfig:
    """The annotator's recipe on the run's own pictures; their size, its length and all else are its own."""
    assert config.data.annotator is not None
    own, data = load_recipe(config.data.annotator), config.data
    if own.supervision.source != "class":
        raise UserError(
            f"data.annotator: {config.data.annotator} itself reads label maps; an annotator makes the first"
        )
    shared = {
        name: getattr(data, name)
        for name in (
            *("root", "train", "val", "num_classes", "train_pictures", "val_pictures"),
            *("workers", "max_pixels", "on_bad_picture", "allow_empty_classes"),
        )
    }
    batch = min(own.train.batch_size, config.train.batch_size)  # what memory and the number of pictures allow
    seeded = dataclasses.replace(own.train, batch_size=batch, seed=config.train.seed, device=config.train.device)
    return dataclasses.replace(
        _with_data(own, **shared, annotator=None, labels=None), train=seeded, log=config.log, compare=None
    )


def _is_recipe(name: str | None) -> bool:
    if name is None or (Path(name) / "config.yaml").is_file():
        return False
    if name in packaged_recipes():
        return True
    return name.endswith((".yaml", ".yml")) and find_recipe(name).is_file()


def _shows_scenes(config: RunConfig) -> bool:
    return (config.data.train or config.data.root) == "scenes"


def _with_data(config: RunConfig, **values: Any) -> RunConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **values))


def _say(quiet: bool, *lines: str) -> None:
    if not quiet:
        console = output_console()
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
