"""The recipes of Token Labeling: the paper's numbers, what each changes, and how larger pictures are fine-tuned."""

from dataclasses import replace

import pytest

from alltokens.engine.config import RecipeCard
from alltokens.engine.loading import flatten, to_mapping
from alltokens.engine.recipes import load_recipe, packaged_recipes
from alltokens.engine.schedule import learning_rate, peak_rate

NAMES = sorted(packaged_recipes())

# Token Labeling: name -> (top-1 of the paper, table).
TOKEN_LABELS = {
    "lvvit_t": (79.1, "Table 1"),
    "lvvit_s": (83.3, "Table 1"),
    "lvvit_m": (84.1, "Table 1"),
    "lvvit_l": (85.3, "Table 1"),
    "lvvit_s_384": (84.4, "Table 4"),
    "lvvit_m_384": (85.4, "Table 4"),
    "lvvit_l_448": (85.9, "Table 4"),
    "lvvit_l_448_scratch": (86.2, "Table 4"),
    "lvvit_l_512": (86.4, "Table 4"),
    "lvvit_s_relabel": (83.0, "Table 2"),
    "lvvit_s_relabel_cutmix": (82.8, "Table 2"),
    "lvvit_s_class": (82.5, "Table 2"),
    "lvvit_s_class_cutmix": (82.4, "Table 2"),
    "lvvit_s_no_mixtoken": (81.3, "Table 3"),
    "lvvit_s_mixup": (83.1, "Table 3"),
    "lvvit_s_no_erasing": (83.0, "Table 3"),
    "lvvit_s_no_rand_augment": (82.8, "Table 3"),
    "path_1_depth": (81.2, "supplement, Table 2"),
    "path_2_mlp": (81.1, "supplement, Table 2"),
    "path_3_stem": (82.2, "supplement, Table 2"),
    "path_4_residual": (82.4, "supplement, Table 2"),
    "mixer_small": (75.6, "Table 11"),
    "tokens_mixer_small": (76.1, "Table 11"),
    "mixer_base": (78.3, "Table 11"),
    "tokens_mixer_base": (79.5, "Table 11"),
    "mixer_large": (77.7, "Table 11"),
    "tokens_mixer_large": (80.1, "Table 11"),
    "resnest50": (80.9, "Table 11"),
    "tokens_resnest50": (81.5, "Table 11"),
}


@pytest.mark.parametrize(("name", "promise"), TOKEN_LABELS.items())
def test_a_recipe_of_token_labeling_promises_the_papers_number(name, promise):
    card = load_recipe(name).about
    assert card.expected.startswith(f"{promise[0]} % top-1 as published")
    assert card.expected.endswith("not measured with this program")
    assert promise[1] in card.source


def differing(name, other):
    """The settings that two recipes do not share."""
    first, second = (flatten(to_mapping(replace(load_recipe(one), about=RecipeCard()))) for one in (name, other))
    return {key: value for key, value in first.items() if second.get(key) != value}


def test_token_labels_are_trained_as_the_paper_says():
    config = load_recipe("lvvit_s")
    assert peak_rate(config.optimizer, 1024) == pytest.approx(1e-3 * 1024 / 640)
    assert (config.train.epochs, config.train.batch_size, config.schedule.warmup_epochs) == (300, 1024, 5)
    assert (config.optimizer.weight_decay, config.model.drop_path) == (0.05, 0.1)
    assert (config.supervision.source, config.supervision.mixer.name) == ("tokens", "mixtoken")
    assert config.supervision.dense_weight == 0.5


@pytest.mark.parametrize("size", ["t", "s", "m", "l"])
def test_the_published_program_stands_beside_the_paper(size):
    changes = differing(f"lvvit_{size}_official", f"lvvit_{size}")
    augmented = changes.pop("augment.rand_augment", None)
    assert augmented == ("rand-m9-n3-mstd0.5-inc1" if size == "l" else None)
    assert changes == {
        "model.options.readout": "class+max",
        "supervision.dense_weight": 1.0,
        "supervision.axes": "official",
        "optimizer.lr": 1.6e-3,
        "optimizer.lr_per": None,
        "schedule.cooldown_epochs": 10,
        "train.ema_decay": 0.99992,
        "train.ema_warmup": False,
    }


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lvvit_s_no_mixtoken", {"supervision.mixer.name": "none"}),
        ("lvvit_s_mixup", {"supervision.mixer.then_mixup": 1.0}),
        ("lvvit_s_no_erasing", {"augment.erase_probability": 0}),
        ("lvvit_s_no_rand_augment", {"augment.rand_augment": None}),
    ],
)
def test_an_augmentation_is_all_that_a_row_of_table_3_changes(name, changes):
    assert differing(name, "lvvit_s") == changes


def test_the_ablation_path_goes_one_step_at_a_time():
    assert differing("path_2_mlp", "path_1_depth") == {"model.options.mlp_ratio": 3.0}
    assert differing("path_3_stem", "path_2_mlp") == {"model.name": "lvvit_s", "model.options.residual_scale": 1.0}
    assert set(differing("path_4_residual", "path_3_stem")) <= {"model.options"}
    assert load_recipe("path_1_depth").model == replace(load_recipe("deit_small").model, options={"depth": 16})


@pytest.mark.parametrize("name", ["lvvit_s_384", "lvvit_m_384", "lvvit_m_448", "lvvit_l_448", "lvvit_l_512"])
def test_larger_pictures_are_fine_tuned_at_a_constant_rate_after_the_warmup(name):
    config = load_recipe(name)
    peak = peak_rate(config.optimizer, config.train.batch_size)
    rates = {learning_rate(at, peak, config.train.epochs, config.schedule) for at in (5, 10, 29.9)}
    assert max(rates) == pytest.approx(5e-6)
    assert min(rates) == pytest.approx(5e-6)
    assert (config.train.epochs, config.train.batch_size, config.optimizer.weight_decay) == (30, 512, 1e-8)
    assert config.data.image_size == int(name.rpartition("_")[2])
    assert "--weights-from" in config.about.command
