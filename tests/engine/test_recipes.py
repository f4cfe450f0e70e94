import json
from dataclasses import replace

import pytest
import timm
import yaml

from alltokens.engine.checks import check
from alltokens.engine.config import FollowerConfig, MixerConfig, RecipeCard, RunConfig
from alltokens.engine.loading import build, parse_yaml, to_mapping, to_yaml
from alltokens.engine.recipes import find_recipe, load_recipe, overlay, packaged_recipes, recipe_name
from alltokens.engine.schedule import learning_rate, peak_rate
from alltokens.errors import UserError
from tests.conftest import ROOT
from tests.shrink import shrunken

NAMES = sorted(packaged_recipes())
LOSSES = ROOT / "tests" / "golden" / "losses"


def test_the_recipes_that_the_documentation_names_are_there():
    named = {
        "quickstart",
        "base",
        "deit_tiny",
        "deit_small",
        "deit_base",
        "finetune",
        "folder",
        "imagenette",
        "lvvit_s",
    }
    assert named <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_passes_the_checks(name):
    check(load_recipe(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_survives_yaml(name):
    config = load_recipe(name)
    assert build(RunConfig, to_mapping(config), "again") == config
    assert build(RunConfig, parse_yaml(to_yaml(config), "again"), "again") == config


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_says_what_to_expect(name):
    text = packaged_recipes()[name].read_text(encoding="utf-8")
    assert text.startswith("# ")
    own = yaml.safe_load(text)["about"]
    assert set(own) == set(to_mapping(RecipeCard()))
    assert all(isinstance(value, str) and value.strip() for value in own.values())
    assert name in own["command"]
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_shrinks_to_something_sound(name):
    config = load_recipe(name)
    small = shrunken(config)
    check(small)
    options = small.model.options
    depth = options.get("depth", len(options.get("depths", ())))
    assert depth <= max(small.supervision.follower.layers or (2,))
    assert small.supervision == config.supervision
    assert (small.data.annotator, small.compare) == (None, None)
    assert small.data.train_pictures == 2 * small.train.batch_size


def test_deit_is_trained_as_published():
    config = load_recipe("deit_small")
    assert (config.optimizer.lr, config.optimizer.lr_per, config.train.batch_size) == (5e-4, 512, 1024)
    assert (config.augment.repeats, config.model.drop_path, config.augment.interpolation) == (3, 0.1, "bicubic")
    mixer = config.supervision.mixer
    assert (mixer.name, mixer.mixup_alpha, mixer.alpha, mixer.switch_probability) == ("mixup+cutmix", 0.8, 1.0, 0.5)


# Paper, Table 1: name -> top-1 without and with TL-Align.
TABLE_1 = {
    "deit_tiny": (72.2, 73.2),
    "deit_small": (79.8, 80.6),
    "pvt_tiny": (75.1, 75.5),
    "pvt_small": (79.8, 80.4),
    "swin_tiny": (81.2, 81.4),
    "swin_small": (83.0, 83.4),
    "deit_base_finetune": (81.8, 82.3),
    "swin_base_finetune": (83.5, 83.7),
}
# Recipes that differ in the follower alone.
TWINS = {f"tlalign_{name}": f"cutmix_{name}" for name in TABLE_1} | {
    "tlalign_deit_small_random": "random_deit_small",
    "tlalign_deit_small_block": "block_deit_small",
    "transmix_deit_small": "deit_small_310",
    "transmix_deit_small_same": "cutmix_deit_small",
    "tlalign_deit_small_last_layer": "cutmix_deit_small",
    "tlalign_deit_small_layers_2468": "cutmix_deit_small",
    "tlalign_deit_small_no_normalization": "cutmix_deit_small",
}


def without_follower(name):
    config = load_recipe(name)
    return replace(config, about=RecipeCard(), supervision=replace(config.supervision, follower=FollowerConfig()))


@pytest.mark.parametrize(("name", "twin"), TWINS.items())
def test_twins_differ_in_the_follower_alone_and_in_what_they_learn(name, twin):
    assert without_follower(name) == without_follower(twin)
    assert load_recipe(name).supervision.follower != load_recipe(twin).supervision.follower
    losses, twin_losses = (json.loads((LOSSES / f"{recipe}.json").read_text()) for recipe in (name, twin))
    assert losses != twin_losses


@pytest.mark.parametrize(("name", "numbers"), TABLE_1.items())
def test_a_recipe_of_table_1_promises_its_numbers(name, numbers):
    card = load_recipe(f"tlalign_{name}").about
    assert card.expected.startswith(f"{numbers[1]} % top-1 as published")
    assert f": {numbers[0]} %" in card.expected
    assert "Table 1" in card.source


@pytest.mark.parametrize(
    ("name", "number", "table"),
    [
        ("tlalign_deit_small_mixup_cutmix", 80.2, "Table 7"),
        ("tlalign_deit_small_random", 80.2, "Table 7"),
        ("random_deit_small", 79.7, "Table 7"),
        ("tlalign_deit_small_block", 80.3, "Table 7"),
        ("block_deit_small", 80.0, "Table 7"),
        ("tlalign_deit_small_last_layer", 80.1, "Table 8"),
        ("tlalign_deit_small_layers_2468", 80.2, "Table 8"),
        ("tlalign_deit_small_no_normalization", 80.3, "Table 8"),
        ("transmix_deit_small", 80.7, "Table 9"),
        ("transmix_deit_small_same", 80.1, "Table 2"),
        ("deit_small_plain", 76.4, "Table 9"),
        ("deit_small", 79.8, "Table 9"),
        ("deit_small_310", 80.3, "Table 9"),
        ("cutmix_deit_small", 79.8, "Tables 2 and 7"),
    ],
)
def test_a_recipe_of_an_ablation_promises_its_number(name, number, table):
    card = load_recipe(name).about
    assert card.expected.startswith(f"{number} % top-1 as published")
    assert card.expected.endswith("not measured with this program")
    assert table in card.source


@pytest.mark.parametrize("name", ["tlalign_deit_tiny", "tlalign_deit_small", "cutmix_deit_small"])
def test_tl_align_is_trained_as_deit_but_for_cutmix_on_patches(name):
    config = load_recipe(name)
    deit = load_recipe("deit_small")
    assert config.supervision.mixer == MixerConfig(name="cutmix", alpha=1.0, patch_size=16)
    for section in ("data", "augment", "optimizer", "schedule", "train"):
        assert getattr(config, section) == getattr(deit, section)


def test_the_ablations_turn_the_right_screws():
    followers = {
        name: load_recipe(name).supervision.follower for name in NAMES if name.startswith("tlalign_deit_small")
    }
    assert followers["tlalign_deit_small_last_layer"] == FollowerConfig("tl_align", layers=(12,))
    assert followers["tlalign_deit_small_layers_2468"] == FollowerConfig("tl_align", layers=(2, 4, 6, 8))
    assert followers["tlalign_deit_small_no_normalization"] == FollowerConfig("tl_align", residual="ignore")
    mixer = load_recipe("tlalign_deit_small_mixup_cutmix").supervision.mixer
    assert replace(mixer, patch_size=None) == load_recipe("deit_small").supervision.mixer


def test_transmix_is_trained_as_published():
    config = load_recipe("transmix_deit_small")
    optimizer, schedule, train = config.optimizer, config.schedule, config.train
    assert peak_rate(optimizer, train.batch_size) == 1e-3
    assert (optimizer.weight_decay, train.batch_size, train.ema_decay, train.ema_warmup) == (0.03, 256, 0.99996, False)
    assert (train.epochs, schedule.cooldown_epochs, schedule.warmup_epochs, schedule.min_lr) == (300, 10, 20, 1e-5)
    assert (config.augment.erase_probability, config.supervision.mixer.switch_probability) == (0, 0.8)
    assert config.supervision.follower == FollowerConfig("transmix", official=True)


@pytest.mark.parametrize("name", ["tlalign_deit_base_finetune", "tlalign_swin_base_finetune"])
def test_base_models_are_fine_tuned_at_a_constant_rate(name):
    config = load_recipe(name)
    rates = [
        learning_rate(at, peak_rate(config.optimizer, config.train.batch_size), config.train.epochs, config.schedule)
        for at in (0, 0.5, 20, 39.9)
    ]
    assert rates == [1e-5] * 4
    assert (config.train.epochs, config.optimizer.weight_decay, config.model.pretrained) == (40, 1e-8, True)
    architecture, tag = config.model.name.split(".")
    assert f"{architecture}.{tag}" in timm.list_pretrained(f"{architecture}*"), "official ImageNet-1k weights"
    assert tag.endswith("_in1k")


def written(folder, name, text):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_what_a_recipe_leaves_out_comes_from_the_one_it_extends(tmp_path):
    written(tmp_path, "mine.yaml", "train: {epochs: 7, seed: 3}\nmodel: {options: {depth: 4}}\nabout: {expected: 99 %}")
    child = written(tmp_path, "child.yaml", "extends: mine\ntrain: {epochs: 8}\nmodel: {options: {num_heads: 2}}")
    config = load_recipe(child)
    assert (config.train.epochs, config.train.seed) == (8, 3)
    assert config.model.options == {"depth": 4, "num_heads": 2}
    assert config.about == RecipeCard(), "the promise of another recipe must not be passed on"


def test_a_recipe_may_extend_a_packaged_one_even_of_its_own_name(tmp_path):
    config = load_recipe(written(tmp_path, "quickstart.yaml", "extends: quickstart\ntrain: {seed: 9}"))
    assert config.train.seed == 9
    assert config.model == load_recipe("quickstart").model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: deit_small", "deit_small.*itself extends 'base'; only one level"),
        ("extends: deit_smal", "unknown recipe 'deit_smal'.*Did you mean 'deit_small'"),
        ("extends: [base, folder]", "expected the name of one recipe"),
        ("extends: base\ntrain: {epoch: 3}", "unknown key 'epoch'.*Did you mean 'epochs'"),
        ("train: {epochs: 3.5}", "epochs: expected a whole number, got 3.5"),
        ("- 1", "expected settings"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_recipe(written(tmp_path, "wrong.yaml", text))


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ("quickstrat", "unknown recipe 'quickstrat'.*Did you mean 'quickstart'.*quickstrat.yaml"),
        ("nowhere/mine.yaml", "unknown recipe file 'nowhere/mine.yaml'"),
        ("", "unknown recipe ''"),
    ],
)
def test_an_unknown_recipe_is_refused(came, message):
    with pytest.raises(UserError, match=message):
        load_recipe(came)


def test_a_missing_file_is_compared_with_those_beside_it(tmp_path):
    written(tmp_path, "pictures.yaml", "")
    with pytest.raises(UserError, match=r"Did you mean '.*pictures\.yaml'"):
        find_recipe(tmp_path / "picture.yaml")


def test_options_belong_to_their_model():
    config = build(
        RunConfig, {"model": {"name": "vit_tiny_patch16_224", "options": {"depth": 6, "embed_dim": 128}}}, ""
    )
    same = overlay(config, {"model": {"options": {"depth": 2}}}, "here")
    other = overlay(config, {"model": {"name": "resnet18", "options": {"in_chans": 1}}}, "here")
    assert same.model.options == {"depth": 2, "embed_dim": 128}
    assert other.model.options == {"in_chans": 1}
    assert config.model.options == {"depth": 6, "embed_dim": 128}


@pytest.mark.parametrize(
    ("came", "name"), [("quickstart", "quickstart"), ("a/b/mine.yaml", "mine"), ("x.y.yml", "x.y")]
)
def test_a_run_is_named_after_its_recipe(came, name):
    assert recipe_name(came) == name
