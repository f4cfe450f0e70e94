from dataclasses import replace
from pathlib import Path

import pytest

from alltokens.cli import main
from alltokens.engine import run_folder
from alltokens.engine.recipes import load_recipe


@pytest.fixture
def calls(monkeypatch):
    """What the command hands to the trainer, instead of training."""
    from alltokens.engine import experiment, runs

    seen = []
    for module, name in ((experiment, "train"), (experiment, "resume"), (runs, "dry_run")):
        monkeypatch.setattr(module, name, lambda *args, _name=name, **options: seen.append((_name, args, options)))
    return seen


def config_of(calls):
    (call,) = calls
    return call[1][0]


def test_a_recipe_is_trained_as_it_is(calls):
    assert main(["train", "quickstart"]) == 0
    ((name, (config,), options),) = calls
    assert (name, config) == ("train", load_recipe("quickstart"))
    assert options["recipe"] == "quickstart"
    assert options["run_dir"] is None
    assert options["weights_from"] is None
    assert options["command"] == ["alltokens", "train", "quickstart"]


def test_places_are_handed_over(calls):
    assert main(["train", "finetune", "--run-dir", "runs/x", "--weights_from=runs/y", "--data.root", "pictures"]) == 0
    ((_, (config,), options),) = calls
    assert (options["run_dir"], options["weights_from"], config.data.root) == (Path("runs/x"), "runs/y", "pictures")


@pytest.mark.parametrize(
    ("words", "section", "expected"),
    [
        (["--train.epochs", "7"], "train", {"epochs": 7}),
        (["--train.epochs=1e2"], "train", {"epochs": 100}),
        (["--train.batch-size", "8", "--train.ema_decay", "0.9"], "train", {"batch_size": 8, "ema_decay": 0.9}),
        (["--train.channels_last"], "train", {"channels_last": True}),
        (["--train.channels_last", "true"], "train", {"channels_last": True}),
        (["--train.ema_warmup", "false"], "train", {"ema_warmup": False}),
        (["--train.compile"], "train", {"compile": "on"}),
        (["--train.compile", "off"], "train", {"compile": "off"}),
        (["--train.precision", "bf16"], "train", {"precision": "bf16"}),
        (["--data.num_classes", "null"], "data", {"num_classes": None}),
        (["--data.num_classes", "None"], "data", {"num_classes": None}),
        (["--data.root", "None"], "data", {"root": None}),
        (["--data.root", "7"], "data", {"root": "7"}),
        (["--data.root="], "data", {"root": ""}),
        (["--augment.scale", "0.5", "1"], "augment", {"scale": (0.5, 1.0)}),
        (["--augment.scale", "[0.5, 1]"], "augment", {"scale": (0.5, 1.0)}),
        (["--augment.rand_augment", "rand-m5"], "augment", {"rand_augment": "rand-m5"}),
        (["--optimizer.betas", "0.9", "0.95"], "optimizer", {"betas": (0.9, 0.95)}),
        (["--optimizer.betas", "null"], "optimizer", {"betas": None}),
        (["--optimizer.lr", "1e-3"], "optimizer", {"lr": 1e-3}),
        (["--log.trackers", "wandb", "tensorboard"], "log", {"trackers": ("wandb", "tensorboard")}),
        (["--model", "deit_tiny_patch16_224"], "model", {"name": "deit_tiny_patch16_224", "options": {}}),
        (["--optimizer=sgd"], "optimizer", {"name": "sgd"}),
        (["--log.trackers", "[]"], "log", {"trackers": ()}),
        (["--train.seed", "1", "--train.seed", "2"], "train", {"seed": 2}),
    ],
)
def test_options_lie_over_the_recipe(words, section, expected, calls):
    assert main(["train", "quickstart", *words]) == 0
    recipe = load_recipe("quickstart")
    assert config_of(calls) == replace(recipe, **{section: replace(getattr(recipe, section), **expected)})


def test_options_of_options_are_reached(calls):
    assert main(["train", "quickstart", "--supervision.mixer.name", "mixup", "--supervision.smoothing", "0"]) == 0
    supervision = config_of(calls).supervision
    assert (supervision.mixer.name, supervision.smoothing) == ("mixup", 0.0)
    assert supervision.mixer.patch_size == load_recipe("quickstart").supervision.mixer.patch_size


def test_a_group_with_a_name_takes_the_name_as_yaml_does(calls):
    assert main(["train", "quickstart", "--supervision.mixer", "mixup", "--supervision.follower=tl_align"]) == 0
    supervision = config_of(calls).supervision
    assert (supervision.mixer.name, supervision.follower.name) == ("mixup", "tl_align")


def test_model_options_merge(calls):
    assert main(["train", "quickstart", "--model.options", "{depth: 3, qk_norm: true}"]) == 0
    recipe = load_recipe("quickstart").model.options
    assert config_of(calls).model.options == recipe | {"depth": 3, "qk_norm": True}


def test_the_recipe_may_stand_last(calls):
    assert main(["train", "--train.epochs", "3", "--dry-run", "quickstart"]) == 0
    assert config_of(calls).train.epochs == 3


def test_a_command_line_means_what_yaml_means(calls, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: quickstart\ntrain: {epochs: 4, compile: on}\nmodel: {options: {depth: 2}}\n")
    assert main(["train", str(file)]) == 0
    assert main(["train", "quickstart", "--train.epochs", "4", "--train.compile", "--model.options", "{depth: 2}"]) == 0
    (first, second) = (call[1][0] for call in calls)
    assert replace(first, about=second.about) == second
    assert calls[0][2]["recipe"] == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which recipe? alltokens train quickstart is a first run"),
        (["quickstat"], "unknown recipe 'quickstat'. Did you mean 'quickstart'?"),
        (["none.yaml"], "unknown recipe file 'none.yaml'"),
        (["quickstart", "--supervision.mixer", "cutmx"], "Did you mean 'cutmix'?"),
        (["quickstart", "--supervision.mixer"], "--supervision.mixer wants a value: {none,mixup,"),
        (["quickstart", "--train", "3"], "unknown option --train."),
        (["quickstart", "more"], "unexpected argument 'more'"),
        (["quickstart", "--train.seed", "1", "more"], "unexpected argument 'more'"),
        (["quickstart", "--train.epoch", "3"], "unknown option --train.epoch. Did you mean --train.epochs?"),
        (["quickstart", "--epochs", "3"], "unknown option --epochs. Did you mean --train.epochs?"),
        (["quickstart", "--rundir", "x"], "unknown option --rundir. Did you mean --run-dir?"),
        (["quickstart", "--train.epochs"], "--train.epochs wants a value: INT"),
        (["quickstart", "--train.epochs", "--dry-run"], "--train.epochs wants a value"),
        (["quickstart", "--train.epochs", "3.5"], "train.epochs: expected a whole number, got '3.5'"),
        (["quickstart", "--train.epochs", "null"], "expected a whole number, got 'null'"),
        (["quickstart", "--optimizer.lr", "fast"], "optimizer.lr: expected a number, got 'fast'"),
        (["quickstart", "--train.channels_last", "yes please"], "expected true or false, got 'yes please'"),
        (["quickstart", "--train.precision", "bf61"], "Did you mean 'bf16'?"),
        (["quickstart", "--augment.scale", "0.5"], "augment.scale: expected a list of 2"),
        (["quickstart", "--augment.scale", "[0.5"], "not valid YAML"),
        (["quickstart", "--log.trackers", "wandbx"], "Did you mean 'wandb'?"),
        (["quickstart", "--model.options", "3"], "model.options: expected settings as 'key: value', got 3"),
        (["quickstart", "--dry-run=no"], "unexpected argument 'no'"),
        (["--resume", "runs/x", "quickstart"], "a recipe does not go with it"),
        (["--resume", "runs/x", "--dry-run"], "--dry-run does not go with it"),
        (["--resume"], "--resume wants a value"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, message, calls, capsys):
    assert main(["train", *words]) == 2
    shown, errors = capsys.readouterr()
    assert (shown, calls) == ("", [])
    assert errors.startswith("alltokens: ")
    assert errors.count("\n") == 1
    assert message in errors


def test_an_unknown_model_is_refused_before_anything_is_written(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["train", "quickstart", "--model.name", "deit_smal", "--run-dir", str(run_dir)]) == 2
    assert "unknown model 'deit_smal'. Did you mean 'deit_small_patch16_224'?" in capsys.readouterr().err
    assert not run_dir.exists()


def test_a_run_goes_on_with_its_own_settings(calls):
    assert main(["train", "--resume", "runs/x"]) == 0
    assert calls == [
        ("resume", (Path("runs/x"),), {"config": None, "command": ["alltokens", "train", "--resume", "runs/x"]})
    ]


def test_options_beside_resume_are_laid_over_the_run_for_the_trainer_to_judge(calls, monkeypatch):
    own = load_recipe("folder")
    monkeypatch.setattr(run_folder, "load_config", lambda run_dir: own)
    assert main(["train", "--resume", "runs/x", "--train.epochs", "9"]) == 0
    ((_, _, options),) = calls
    assert options["config"] == replace(own, train=replace(own.train, epochs=9))


def test_a_missing_run_is_refused(tmp_path, capsys):
    assert main(["train", "--resume", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_dry_run_prints_what_it_found(monkeypatch, capsys):
    from alltokens.engine import runs

    monkeypatch.setattr(runs, "dry_run", lambda config, weights_from: f"{config.train.epochs} from {weights_from}")
    assert main(["train", "quickstart", "--dry-run", "--train.epochs", "5", "--weights-from", "w"]) == 0
    assert capsys.readouterr().out == "5 from w\n"


def test_the_short_help_names_the_recipes(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "quickstart" in shown
    assert len(shown.splitlines()) < 20


def test_the_long_help_shows_every_setting_with_the_recipes_value(capsys):
    from alltokens.engine.loading import flatten, to_mapping

    assert main(["train", "imagenette", "--help"]) == 0
    shown = capsys.readouterr().out
    recipe = load_recipe("imagenette")
    names = set(flatten(to_mapping(replace(recipe, about=None, model=replace(recipe.model, options={}))))) - {"about"}
    assert [name for name in sorted(names) if f"--{name} " not in shown] == []
    for words in ("--run-dir DIR", "--dry-run", "(default: 100)", "{patch_size: 8}", "Pictures per update"):
        assert words in shown
    assert "--about" not in shown
    assert "--run_dir" not in shown


def test_a_default_in_the_help_can_be_typed_back(calls, capsys):
    from alltokens.cli import _options

    config = load_recipe("deit_base")
    for section, name in [("augment", "scale"), ("model", "options"), ("log", "trackers"), ("data", "root")]:
        words = _options._as_typed(getattr(getattr(config, section), name))
        assert main(["train", "deit_base", f"--{section}.{name}", *words]) == 0
    assert all(call[1][0] == config for call in calls)
