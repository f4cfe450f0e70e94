"""What belongs before and after a run: label maps made first, a run to compare it with, a table, a page."""

from __future__ import annotations

import dataclasses
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from alltokens.data.scenes import SCENE_CLASSES
from alltokens.engine import experiment, runs
from alltokens.engine.experiment import COMPARISON
from alltokens.engine.loading import to_yaml
from alltokens.engine.recipes import load_recipe
from alltokens.engine.run_folder import load_config, read_metrics
from alltokens.errors import UserError
from alltokens.evaluate.token_truth import measure_token_truth
from alltokens.labels.store import LabelStore

TINY = """
model:
  name: lvvit_t
  options: {patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2, stem_channels: 4}
data: {root: scenes, image_size: 32, train_pictures: 24, val_pictures: 8, allow_empty_classes: true, workers: 0}
augment: {rand_augment: null}
optimizer: {lr: 1.0e-3}
schedule: {warmup_epochs: 0}
train: {epochs: 1, batch_size: 8, device: cpu}
"""
TOKENS = "extends: tiny\nsupervision: {source: tokens, mixer: {name: mixtoken}}\ncompare: classes.yaml\n"


RECIPES = {
    "tiny": TINY,
    "annotator": "extends: tiny\ntrain: {epochs: 2}\n",
    "classes": "extends: tiny\noptimizer: {lr: 2.0e-3}\ntrain: {epochs: 9}\n",
    "tokens": TOKENS + "data: {annotator: annotator.yaml}\n",
}


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A recipe with token labels, the annotator's and the one to compare with, and the folder to run them in."""
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def without_page(monkeypatch):
    monkeypatch.setattr(experiment, "write_report", lambda runs, out, pictures: SimpleNamespace(file=out))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The whole, undisturbed: labels made, both runs trained, compared, a page written."""
    folder = tmp_path_factory.mktemp("straight")
    for name, text in RECIPES.items():
        (folder / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as said:
        patched.chdir(folder)
        config = load_recipe("tokens.yaml")
        net = experiment.train(config, recipe="tokens", run_dir=Path("run")).net
        own = load_config(Path("run"))
        accuracy = measure_token_truth(net, own, "scenes").accuracy
    (folder / "said.txt").write_text(said.getvalue())
    (folder / "accuracy.txt").write_text(repr(accuracy))
    return folder / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.*")) if file.is_file()}


def test_labels_are_made_by_a_recipe_then_both_runs_trained_and_compared(straight, monkeypatch):
    monkeypatch.chdir(straight.parent)
    config = load_recipe("tokens.yaml")
    store = LabelStore.open("run/labels")
    assert list(store.keys()) == [f"train/{index:06d}" for index in range(24)]
    assert store.manifest.class_names == SCENE_CLASSES
    annotator, twin = load_config(Path("run/annotator")), load_config(Path("run/classes"))
    assert (annotator.train.epochs, annotator.supervision.source, annotator.data.labels) == (2, "class", None)
    assert (twin.train, twin.optimizer.lr, twin.supervision.source) == (config.train, 2e-3, "class")
    assert twin.data == dataclasses.replace(config.data, annotator=None)

    facts = json.loads(Path("run", COMPARISON).read_text())
    scores = [read_metrics(Path(folder))[-1]["top1"] for folder in ("run", "run/classes")]
    assert [row["top1"] for row in facts["runs"]] == scores
    assert [row["recipe"] for row in facts["runs"]] == ["tokens", "classes"]
    assert repr(facts["runs"][0]["token_accuracy"]) == Path("accuracy.txt").read_text()
    assert 0 <= facts["right_labels"] <= 100
    assert "<html" in Path("run/report.html").read_text()[:200]
    said = Path("said.txt").read_text()
    assert "the annotator first: recipe annotator.yaml" in said
    assert "cells that show a class name it first" in said
    assert f"{scores[0] - scores[1]:+.2f} points of top-1, with one seed each" in said
    assert "look at it: run/report.html" in said


@pytest.mark.parametrize("stage", ["annotator", "labels", "run", "twin"])
def test_what_was_stopped_anywhere_goes_on_to_the_same_end(recipes, without_page, straight, monkeypatch, stage):
    """Stopped in the middle of each part; what is complete by then is not done again."""
    config = load_recipe("tokens.yaml")
    at = {
        "annotator": (runs, "train"),
        "labels": (experiment, "annotate_source"),
        "run": (runs, "resume"),
        "twin": (experiment, "_compare"),
    }[stage]

    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*at, stopped)
        experiment.train(config, recipe="tokens", run_dir=Path("halting"), quiet=True)
    before = contents(Path("halting"))
    experiment.resume(Path("halting"), quiet=True)
    first, second = (json.loads((run / COMPARISON).read_text()) for run in (straight, Path("halting")))
    for row in (*first["runs"], *second["runs"]):
        del row["seconds"]
    assert first == second
    after = contents(Path("halting"))
    done = [name for name in before if name.startswith(("annotator/weights", "labels/", "weights/"))]
    assert all(after[name] == before[name] for name in done)
    assert bool(done) == (stage != "annotator")


def test_a_store_that_is_there_is_taken(recipes):
    config = load_recipe("tokens.yaml")
    alone = dataclasses.replace(config, compare=None)
    experiment.train(alone, run_dir=Path("first"), quiet=True)
    assert not Path("first", COMPARISON).exists()
    shared = dataclasses.replace(alone, data=dataclasses.replace(alone.data, labels="first/labels", annotator="first"))
    experiment.train(shared, run_dir=Path("second"), quiet=True)
    assert not Path("second/annotator").exists()
    assert not Path("second/labels").exists()
    for run in ("first", "second"):
        assert read_metrics(Path(run))[-1]["kind"] == "evaluation"
    assert read_metrics(Path("first"))[-1]["loss"] == read_metrics(Path("second"))[-1]["loss"]


def test_a_run_can_annotate_for_the_next(recipes):
    """Self-made labels: the first model writes the maps of the second."""
    alone = dataclasses.replace(load_recipe("tokens.yaml"), compare=None)
    experiment.train(alone, run_dir=Path("first"), quiet=True)
    again = dataclasses.replace(alone, data=dataclasses.replace(alone.data, annotator="first"))
    experiment.train(again, run_dir=Path("second"), quiet=True)
    assert LabelStore.open("second/labels").manifest.annotator == "first"


def test_a_dry_run_needs_no_labels_and_says_so(recipes):
    said = runs.dry_run(load_recipe("tokens.yaml"))
    assert "label maps  not made yet" in said
    assert "annotator: annotator.yaml" in said
    assert not any(path.is_dir() for path in recipes.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data: {annotator: annotatr.yaml}\n", "unknown recipe file 'annotatr.yaml'.*Did you mean 'annotator.yaml'"),
        ("data: {annotator: vit_tinny}\n", "vit_tin"),
        ("data: {annotator: tokens.yaml}\n", "itself reads label maps"),
        ("compare: nothing.yaml\ndata: {annotator: annotator.yaml}\n", "unknown recipe file 'nothing.yaml'"),
        ("supervision: {source: class}\ndata: {annotator: annotator.yaml}\n", "source class does not read it"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(recipes, change, message):
    source = "" if "source" in change else "supervision: {source: tokens}\n"
    Path("wrong.yaml").write_text(f"extends: tiny\n{source}{change}")
    with pytest.raises(UserError, match=message):
        experiment.train(load_recipe("wrong.yaml"), run_dir=Path("run"), quiet=True)
    assert not Path("run").exists()


def test_runs_alone_make_no_labels(recipes):
    alone = dataclasses.replace(load_recipe("tokens.yaml"), compare=None)
    with pytest.raises(UserError, match=r"runs by themselves want data\.labels"):
        runs.train(alone, run_dir=Path("run"), quiet=True)


def test_changed_settings_are_refused(recipes):
    alone = dataclasses.replace(load_recipe("tokens.yaml"), compare=None)
    experiment.train(alone, run_dir=Path("run"), quiet=True)
    own = load_config(Path("run"))
    assert to_yaml(own.data).count("run/labels") == 1
    longer = dataclasses.replace(own, train=dataclasses.replace(own.train, epochs=3))
    with pytest.raises(UserError, match=r"train.epochs: 1 -> 3"):
        experiment.resume(Path("run"), config=longer, quiet=True)
