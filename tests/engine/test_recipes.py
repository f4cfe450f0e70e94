import pytest
import yaml

from alltokens.engine.checks import check
from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.loading import build, parse_yaml, to_mapping, to_yaml
from alltokens.engine.recipes import find_recipe, load_recipe, overlay, packaged_recipes, recipe_name
from alltokens.errors import UserError
from tests.shrink import shrunken

NAMES = sorted(packaged_recipes())


def test_the_recipes_that_the_documentation_names_are_there():
    named = {"quickstart", "base", "deit_tiny", "deit_small", "deit_base", "finetune", "folder", "imagenette"}
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
    assert small.model.options["depth"] == 2
    assert small.supervision == config.supervision
    assert small.data.train_pictures == 2 * small.train.batch_size


def test_deit_is_trained_as_published():
    config = load_recipe("deit_small")
    assert (config.optimizer.lr, config.optimizer.lr_per, config.train.batch_size) == (5e-4, 512, 1024)
    assert (config.augment.repeats, config.model.drop_path, config.augment.interpolation) == (3, 0.1, "bicubic")
    mixer = config.supervision.mixer
    assert (mixer.name, mixer.mixup_alpha, mixer.alpha, mixer.switch_probability) == ("mixup+cutmix", 0.8, 1.0, 0.5)


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
        ("quickstrat", "unknown recipe 'quickstrat'.*Did you mean 'quickstart'.*deit_base.*quickstrat.yaml"),
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
