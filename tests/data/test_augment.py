"""RandAugment and colour jitter: timm's operations, levels and spelling, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.data import auto_augment as timm_ops

from alltokens.data.augment import INCREASING, NUMBER, PLAIN, RandAugment, draw_color_jitter, draw_rand_augment
from alltokens.data.color import recolor
from alltokens.data.transforms import TrainTransform
from alltokens.errors import UserError
from tests.data.draws import MOVES, assert_same_distribution, generator, noise_picture

TIMM_NAMES = {
    True: [*timm_ops._RAND_INCREASING_TRANSFORMS],
    False: [*timm_ops._RAND_TRANSFORMS],
}


@pytest.mark.parametrize("increasing", [False, True])
def test_every_operation_of_timm_is_there_once(increasing):
    assert sorted(name.removesuffix("Increasing") for name in TIMM_NAMES[increasing]) == sorted(
        operation.name for operation in PLAIN[1:]
    )


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("level", [0.0, 3.3, 7.0, 9.2, 10.0])
def test_every_level_means_timm_s_argument(level, increasing):
    settings = RandAugment(level, 1, 0.0, increasing, 1.0)
    operations, arguments = draw_rand_augment(settings, 600, np.random.default_rng(0))
    table = INCREASING if increasing else PLAIN
    for name in TIMM_NAMES[increasing]:
        to_argument = timm_ops.LEVEL_TO_ARG[name]
        number = NUMBER[name.removesuffix("Increasing")]
        ours = set(arguments[operations == number].round(9).tolist())
        if to_argument is None:
            assert ours == {0.0}
            continue
        theirs = {round(to_argument(level, {})[0], 9) for _ in range(40)}
        assert ours == theirs
        assert len(ours) == (2 if table[number].signed and level > 0 else 1)


@pytest.mark.parametrize("name", [operation.name for operation in PLAIN[1:] if operation.name not in MOVES])
@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("level", [2.5, 4.0, 9.0])
def test_every_color_operation_is_timm_s_pixel_by_pixel(name, increasing, level):
    theirs_name = name + "Increasing" if increasing and name + "Increasing" in timm_ops.NAME_TO_OP else name
    to_argument = timm_ops.LEVEL_TO_ARG[theirs_name]
    arguments = () if to_argument is None else to_argument(level, {})
    for seed in range(3):
        picture = noise_picture(seed=seed)
        before = picture.tobytes()
        theirs = timm_ops.NAME_TO_OP[theirs_name](picture, *arguments)
        ours = recolor(picture, NUMBER[name], arguments[0] if arguments else 0.0)
        assert ours.tobytes() == theirs.tobytes()
        assert picture.tobytes() == before


def test_keeping_no_bits_is_a_black_picture():
    assert recolor(noise_picture(), NUMBER["Posterize"], 0.0).getextrema() == ((0, 0),) * 3


def test_rand_augment_applies_each_layer_half_of_the_time_and_all_operations_alike():
    operations, _ = draw_rand_augment(RandAugment.parse("rand-m9-n3-mstd0.5-inc1"), 10_000, np.random.default_rng(0))
    assert operations.shape == (10_000, 3)
    shares = np.bincount(operations.ravel(), minlength=len(PLAIN)) / operations.size
    assert abs(shares[0] - 0.5) < 0.01
    assert np.abs(shares[1:] - 0.5 / 15).max() < 0.006


def test_magnitudes_spread_and_stay_within_ten():
    settings = RandAugment(9.0, 1, 0.5, False, 1.0)
    operations, arguments = draw_rand_augment(settings, 60_000, np.random.default_rng(0))
    magnitude = (arguments[operations == NUMBER["Color"]] - 0.1) / 0.18
    assert abs(magnitude.mean() - 9.0) < 0.05
    assert abs(magnitude.std() - 0.5) < 0.03
    assert 9.9999 < magnitude.max() <= 10 + 1e-9
    uniform = RandAugment.parse("rand-m8-mstd101-p1-n1")
    operations, arguments = draw_rand_augment(uniform, 60_000, np.random.default_rng(0))
    assert_same_distribution((arguments[operations == NUMBER["Color"]] - 0.1) / 0.18, np.linspace(0, 8, 4000))


def test_rand_augment_reads_timm_s_spelling():
    assert RandAugment.parse("rand-m9-mstd0.5-inc1") == RandAugment(9.0, 2, 0.5, True, 0.5)
    assert RandAugment.parse("rand-n3-p0.75") == RandAugment(10.0, 3, 0.0, False, 0.75)
    assert RandAugment.parse("rand") == RandAugment()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("randm9", "must look like"),
        ("rand-m9-q3", "unknown piece of rand_augment 'q'"),
        ("rand-m9-m8", "'m8'"),
        ("rand-m", "'m'"),
        ("rand-m11", r"\[0, 10\]"),
        ("rand-n0", "whole number"),
        ("rand-inc2", "inc 0 or 1"),
        ("rand-p1.5", r"p in \[0, 1\]"),
        ("rand-mstd", "'mstd'"),
    ],
)
def test_anything_else_in_rand_augment_is_an_error(text, said):
    with pytest.raises(UserError, match=said):
        TrainTransform(32, rand_augment=text)


def test_color_jitter_draws_factors_about_one_in_every_order():
    operations, arguments = draw_color_jitter((0.4, 0.2, 1.5), 6000, np.random.default_rng(0))
    orders, counts = np.unique(operations, axis=0, return_counts=True)
    assert len(orders) == 6
    assert counts.min() > 850
    for name, low, high in (("Brightness", 0.6, 1.4), ("Contrast", 0.8, 1.2), ("Color", 0.0, 2.5)):
        assert_same_distribution(arguments[operations == NUMBER[name]], np.linspace(low, high, 6000))
    operations, arguments = draw_color_jitter((0.0, 0.3, 0.0), 5, np.random.default_rng(0))
    assert (operations == NUMBER["Contrast"]).all()
    assert draw_color_jitter((0.0, 0.0, 0.0), 5, np.random.default_rng(0))[0].shape == (5, 0)


def test_color_jitter_colors_and_rand_augment_turns_it_off():
    picture = noise_picture()
    plain = {"rand_augment": None, "erase_probability": 0.0}
    still, matrix = TrainTransform(32, **plain)(picture, generator())
    jittered, same_matrix = TrainTransform(32, color_jitter=0.4, **plain)(picture, generator())
    assert torch.equal(matrix, same_matrix)
    assert (still - jittered).abs().mean() > 0.02
    settings = {"erase_probability": 0.0, "rand_augment": "rand-m9"}
    augmented, _ = TrainTransform(32, **settings)(picture, generator())
    assert torch.equal(TrainTransform(32, color_jitter=0.4, **settings)(picture, generator())[0], augmented)
