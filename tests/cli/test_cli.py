import json
import runpy
import signal
import sys
from pathlib import Path

import pytest

import alltokens.cli
from alltokens.cli import VERBS, main
from alltokens.engine.recipes import packaged_recipes
from alltokens.errors import TrainingFailed, TrainingStopped
from alltokens.version import __version__


def stand_in(monkeypatch, error):
    """A verb that fails as told."""

    def fail(words):
        raise error

    module = type(sys)("alltokens.cli.doctor")
    module.main = fail
    monkeypatch.setitem(sys.modules, "alltokens.cli.doctor", module)


def test_every_verb_has_a_file_and_every_file_a_verb():
    folder = Path(alltokens.cli.__file__).parent
    assert sorted(VERBS) == sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_verb(words, capsys):
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown and summary in shown for verb, summary in VERBS.items())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    shown, errors = capsys.readouterr()
    assert f"alltokens {verb}" in shown
    assert errors == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown verb 'trian'. Did you mean 'train'? Allowed: train, evaluate,"),
        (["--verion"], "unknown option '--verion'"),
        (["models", "--jsn"], "unknown option --jsn. Did you mean --json?"),
        (["models", "resnet5O"], "unknown model 'resnet5O'. Did you mean 'resnet50'?"),
        (["recipes", "quikstart"], "unknown recipe 'quikstart'. Did you mean 'quickstart'?"),
        (["recipes", "--out", "x.yaml"], "say which"),
        (["recipes", "folder", "--json"], "leave the name out"),
        (["recipes", "base", "folder"], "unexpected argument 'folder'"),
        (["evaluate"], "evaluate what?"),
        (["evaluate", "run", "--batch-size", "many"], "batch_size: expected a whole number, got 'many'"),
        (["evaluate", "run", "--weights", "lats"], "Did you mean 'last'?"),
        (["evaluate", "run", "--data"], "--data wants a value"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    shown, errors = capsys.readouterr()
    assert shown == ""
    assert errors.startswith("alltokens: ")
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TrainingFailed("the loss is nan at update 3"), 1, "alltokens: the loss is nan at update 3\n"),
        (TrainingStopped(signal.SIGTERM, "runs/x"), 143, "alltokens: stopped by signal 15; go on with"),
        (KeyboardInterrupt(), 130, "alltokens: interrupted\n"),
    ],
)
def test_each_end_has_its_exit_code(error, code, message, monkeypatch, capsys):
    stand_in(monkeypatch, error)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err.startswith(message)


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    stand_in(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["alltokens", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("alltokens", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"alltokens {__version__}\n")


def test_recipes_are_listed_those_to_begin_with_first(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["recipe", "what", "it", "trains"]
    names = [line.split()[0] for line in lines[1 : 1 + len(packaged_recipes())]]
    assert names[:2] == ["quickstart", "folder"]
    assert sorted(names) == sorted(packaged_recipes())
    assert not any("\x1b" in line for line in lines)


def test_recipes_come_as_json_with_what_they_promise(capsys):
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == packaged_recipes().keys()
    assert "79.8 %" in found["deit_small"]["expected"]


def test_a_recipe_is_shown_whole(capsys):
    from alltokens.engine.config import RunConfig
    from alltokens.engine.loading import build, parse_yaml
    from alltokens.engine.recipes import load_recipe

    assert main(["recipes", "deit_tiny"]) == 0
    assert build(RunConfig, parse_yaml(capsys.readouterr().out, "shown"), "shown") == load_recipe("deit_tiny")


def test_a_recipe_is_copied_to_start_from(tmp_path, capsys):
    from alltokens.engine.recipes import load_recipe

    file = tmp_path / "mine.yaml"
    assert main(["recipes", "folder", "--out", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    copy, original = load_recipe(file), load_recipe("folder")
    assert (copy.train, copy.model, copy.augment) == (original.train, original.model, original.augment)
    assert copy.about.summary == "started from folder"
    assert main(["recipes", "folder", "--out", str(file)]) == 2, "nothing is overwritten"
    assert main(["recipes", "folder", "--out", str(tmp_path / "no" / "mine.yaml")]) == 2
    assert main(["recipes", "folder", "--out", str(tmp_path / "mine.txt")]) == 2


def test_models_are_listed_with_cost_and_followers(capsys):
    assert main(["models", "deit_tiny_patch*"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "parameters", "(M)", "GMACs", "at", "followers"]
    assert line.split() == ["deit_tiny_patch16_224", "5.72", "1.25", "224", "px", "area,", "transmix,", "tl_align"]


def test_models_come_as_json(capsys):
    assert main(["models", "--json", "resnet18d"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["name"] == "resnet18d"
    assert found["parameters"] == 11_708_744
    assert found["followers"] == ["area"]


def test_every_model_of_the_short_list_exists():
    from alltokens.cli.models import CURATED, matching

    assert matching(None) == list(CURATED)


def test_the_doctor_finds_versions_and_what_is_missing(monkeypatch, capsys):
    import torch

    from alltokens.cli import doctor

    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "wandb" else real(name))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"]["value"] == torch.__version__.split("+")[0] or found["torch"]["value"] == torch.__version__
    assert found["alltokens"] == {"what": "alltokens", "ok": True, "value": __version__, "advice": ""}
    assert found["extra wandb"]["advice"] == "pip install 'alltokens[wandb]'"
    assert not any(name == "extra dev" for name in found)
    assert main(["doctor"]) == 0
    assert "missing  extra wandb" in capsys.readouterr().out


def test_the_doctor_asks_for_a_compiler_where_there_is_none(monkeypatch):
    from alltokens.cli import doctor

    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = {item.what: item for item in doctor.examine()}
    assert not found["C++ compiler"].ok
    assert "train.compile" in found["C++ compiler"].advice


def test_evaluate_hands_its_options_over_and_shows_the_result(monkeypatch, capsys):
    import alltokens.evaluate

    result = alltokens.evaluate.Evaluation("runs/x", "scenes", 61.5, 93.25, 1.25, 990, 10, 10, 5_717_416, 1.25, 64, 2.0)
    calls = []
    monkeypatch.setattr(
        alltokens.evaluate, "evaluate", lambda *target, **options: (calls.append((target, options)), result)[1]
    )
    assert main(["evaluate", "--data", "pictures", "runs/x", "--batch-size=8", "--weights", "last"]) == 0
    ((target, options),) = calls
    assert target == ("runs/x",)
    assert {key: value for key, value in options.items() if value is not None} == {
        "data": "pictures",
        "split": "val",
        "weights": "last",
        "batch_size": 8,
        "precision": "fp32",
        "device": "auto",
        "on_bad_picture": "error",
    }
    assert capsys.readouterr().out.splitlines() == [
        "model     5.72 M parameters, 1.25 GMACs at 64 px",
        "pictures  990 of 10 classes in scenes, 10 skipped",
        "top-1     61.50 %",
        "top-5     93.25 %",
        "loss      1.2500",
        "took      0:02, 495 pictures/s",
    ]
    assert main(["evaluate", "runs/x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result._asdict()


def test_only_the_main_process_shows_an_evaluation(monkeypatch, capsys):
    import alltokens.evaluate

    monkeypatch.setattr(alltokens.evaluate, "evaluate", lambda target, **options: None)
    assert main(["evaluate", "runs/x"]) == 0
    assert capsys.readouterr().out == ""
