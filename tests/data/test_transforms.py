"""Transforms: the picture is where the matrix says; crops, erasing and evaluation as timm does them."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation

from alltokens.core import geometry
from alltokens.data import augment
from alltokens.data.augment import (
    NUMBER,
    PLAIN,
    draw_crop,
    draw_erasing,
)
from alltokens.data.transforms import EvalTransform, TrainTransform, moved, resized_crop
from alltokens.errors import UserError
from tests.data.draws import MOVES, assert_same_distribution, generator, noise_picture

PLAIN_LOOK = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def coordinate_picture(width: int, height: int) -> Image.Image:
    """Red says x, green says y, both from 0 to 1 in 255 levels at the edges; blue is full, so that fill is seen."""
    x = (np.arange(width) + 0.5) / width * 255
    y = (np.arange(height) + 0.5) / height * 255
    levels = np.stack((*np.meshgrid(x, y), np.full((height, width), 255.0)), axis=-1)
    return Image.fromarray(levels.round().astype(np.uint8))


def assert_colors_are_places(image: torch.Tensor, matrix: torch.Tensor, levels: float) -> float:
    """Where the coordinate picture is shown (3, H, W), its colours must be what the matrix says. -> share checked."""
    x, y = geometry.coordinates(matrix, tuple(image.shape[1:]))
    # Two pixels away from the fill and from the crop's edge, where filters lean on what is not there.
    shown = torch.nn.functional.avg_pool2d((image[2:3] > 0.999).float(), 5, 1, 2)[0] > 0.999
    inner = ((x - 0.5).abs() < 0.47) & ((y - 0.5).abs() < 0.47) & shown
    if inner.any():
        error = 255 * torch.stack(((image[0] - x)[inner], (image[1] - y)[inner]))
        assert error.abs().max() < levels
        assert error.mean(dim=1).abs().max() < 0.9  # half a pixel would be one to two levels everywhere
    return float(inner.float().mean())


def doing_only(name: str, monkeypatch: pytest.MonkeyPatch, **settings) -> TrainTransform:
    """A transform whose RandAugment always does this operation, at full strength, one way or the other."""

    def drawn(_settings, pictures, rng):
        sign = np.sign(rng.random((pictures, 1)) - 0.5)
        return np.full((pictures, 1), NUMBER[name]), sign * PLAIN[NUMBER[name]].span

    monkeypatch.setattr(augment, "draw_rand_augment", drawn)
    return TrainTransform(rand_augment="rand-m9-n1", erase_probability=0.0, **settings, **PLAIN_LOOK)


@pytest.mark.parametrize("source", [(300, 200), (90, 120), (64, 64), (1200, 700)])
def test_crop_and_flips_follow_the_matrix(source):
    transform = TrainTransform(64, rand_augment=None, erase_probability=0.0, vertical_flip=0.5, **PLAIN_LOOK)
    picture = coordinate_picture(*source)
    flips = set()
    for seed in range(40):
        image, matrix = transform(picture, generator(seed))
        assert assert_colors_are_places(image, matrix, 1.5) > 0.3
        flips.add((bool(matrix[0, 0] < 0), bool(matrix[1, 1] < 0)))
    assert len(flips) == 4


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [64, (48, 80)])
@pytest.mark.parametrize("name", MOVES)
def test_every_move_at_full_strength_follows_the_matrix(name, size, interpolation, monkeypatch):
    settings = {"size": size, "interpolation": interpolation, "scale": (0.3, 1.0), "vertical_flip": 0.5}
    transform = doing_only(name, monkeypatch, **settings)
    picture = coordinate_picture(300, 200)
    # Half a level each for the picture and the crop, up to one for PIL's affine map, which cuts instead of rounding.
    shares = [assert_colors_are_places(*transform(picture, generator(seed)), 2.2) for seed in range(25)]
    assert np.mean(shares) > 0.25


def test_moves_one_after_the_other_follow_the_matrix(monkeypatch):
    def drawn(_settings, pictures, rng):
        chosen = rng.integers(augment.FIRST_MOVE, len(PLAIN), (pictures, 3))
        return chosen, np.array([operation.span for operation in PLAIN])[chosen] * rng.uniform(-0.5, 0.5, (pictures, 3))

    monkeypatch.setattr(augment, "draw_rand_augment", drawn)
    transform = TrainTransform(64, erase_probability=0.0, **PLAIN_LOOK)
    picture = coordinate_picture(200, 300)
    shares = [assert_colors_are_places(*transform(picture, generator(seed)), 2.2) for seed in range(40)]
    assert np.mean(shares) > 0.25


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_timm_s_move(name, sign):
    picture, fill, amount = noise_picture(64, 64), (1, 2, 3), sign * PLAIN[NUMBER[name]].span
    if name.startswith("Translate"):
        amount = sign * 29 / 64  # ours go by whole pixels
    theirs = timm_ops.NAME_TO_OP[name](picture, amount, resample=Image.Resampling.BILINEAR, fillcolor=fill)
    move = augment._moves(np.array([[NUMBER[name]]]), np.array([[amount]]), (64, 64))[0]
    ours = moved(picture, move, Image.Resampling.BILINEAR, fill)
    assert np.abs(np.asarray(ours).astype(int) - np.asarray(theirs)).max() <= 1


def test_shifts_are_rounded_to_whole_pixels():
    move = augment._moves(np.array([[NUMBER["TranslateXRel"]]]), np.array([[0.45]]), (64, 64))
    assert move[0].tolist() == [[1, 0, 29 / 64], [0, 1, 0]]  # 28.8


def test_a_pure_flip_is_exact():
    picture = noise_picture(64, 48)
    settings = {"scale": (1.0, 1.0), "ratio": (4 / 3, 4 / 3), "rand_augment": None, "erase_probability": 0.0}
    straight, _ = TrainTransform((48, 64), horizontal_flip=0.0, **settings)(picture, generator())
    across, matrix = TrainTransform((48, 64), horizontal_flip=1.0, **settings)(picture, generator())
    both, _ = TrainTransform((48, 64), horizontal_flip=1.0, vertical_flip=1.0, **settings)(picture, generator())
    assert torch.equal(across, straight.flip(2))
    assert torch.equal(both, straight.flip(1, 2))
    assert matrix.tolist() == [[-1, 0, 1], [0, 1, 0]]


def test_a_whole_picture_of_the_right_size_is_only_normalised():
    picture = noise_picture(32, 32)
    transform = TrainTransform(
        32, scale=(1.0, 1.0), ratio=(1.0, 1.0), horizontal_flip=0.0, rand_augment=None, erase_probability=0.0
    )
    image, matrix = transform(picture)
    levels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    mean, std = torch.tensor(transform.mean)[:, None, None], torch.tensor(transform.std)[:, None, None]
    torch.testing.assert_close(image, (levels - mean) / std)
    assert torch.equal(matrix, torch.eye(2, 3))
    assert image.dtype == matrix.dtype == torch.float32
    assert image.is_contiguous()


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize(
    ("box", "levels"),
    [
        ((13, 40, 200, 240), 2),
        ((100, 100, 101, 103), 1),
        ((50, 60, 120, 110), 2),
        ((0, 0, 500, 375), 12),  # more than four times smaller: PIL's own short cut
    ],
)
def test_the_resized_crop_is_pil_s(box, levels, resample):
    picture = noise_picture(500, 375)
    ours = np.asarray(resized_crop(picture, box, (64, 96), resample)).astype(int)
    theirs = np.asarray(picture.crop(box).resize((96, 64), resample)).astype(int)
    assert np.abs(ours - theirs).max() <= levels
    assert np.abs(ours - theirs).mean() < levels / 12


@pytest.mark.parametrize("size", [(500, 375), (60, 90)])
def test_crops_are_distributed_as_timm_s(size):
    width, height = size
    count, rng = 4000, np.random.default_rng(0)
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    ours = draw_crop(np.full(count, height), np.full(count, width), scale, ratio, rng)
    picture = Image.new("RGB", size)
    random.seed(0)  # timm draws from it
    theirs = np.array([RandomResizedCropAndInterpolation.get_params(picture, scale, ratio) for _ in range(count)])
    top, left, tall, wide = theirs.T.astype(float)
    mine = {"left": ours[:, 0], "top": ours[:, 1], "width": ours[:, 2], "height": ours[:, 3]}
    for name, theirs_one in {"left": left, "top": top, "width": wide, "height": tall}.items():
        assert_same_distribution(mine[name], theirs_one)
    assert_same_distribution(mine["width"] * mine["height"], wide * tall)
    assert_same_distribution(np.log(mine["width"] / mine["height"]), np.log(wide / tall))
    assert (ours[:, 0] + ours[:, 2] <= width).all()
    assert (ours[:, 1] + ours[:, 3] <= height).all()


def test_small_crops_have_uniform_areas_and_log_uniform_ratios():
    side = np.full(5000, 4000)
    box = draw_crop(side, side, (0.1, 0.4), (0.5, 2.0), np.random.default_rng(0))
    area, ratio = box[:, 2] * box[:, 3] / 4000**2, np.log(box[:, 2] / box[:, 3])
    assert_same_distribution(area, np.linspace(0.1, 0.4, 5000))
    assert_same_distribution(ratio, np.linspace(-math.log(2), math.log(2), 5000))


def test_crops_that_cannot_fit_are_the_greatest_central_box():
    box = draw_crop(np.array([3, 500]), np.array([500, 3]), (0.9, 1.0), (3 / 4, 4 / 3), np.random.default_rng(0))
    assert box.tolist() == [[248, 0, 4, 3], [0, 248, 3, 4]]


@pytest.mark.parametrize("source", [(1, 1), (3, 500), (500, 3), (2, 2)])
def test_pictures_of_any_size_work(source):
    picture = coordinate_picture(*source)
    for seed in range(20):
        image, matrix = TrainTransform(32)(picture, generator(seed))
        assert image.shape == (3, 32, 32)
        assert image.isfinite().all()
        assert matrix.isfinite().all()
    image, matrix = EvalTransform(32)(picture)
    assert image.shape == (3, 32, 32)
    assert image.isfinite().all()


def test_erased_boxes_are_distributed_as_timm_s():
    count, side = 3000, 64
    transform = TrainTransform(side, erase_probability=0.5, erase_count=2)
    boxes = draw_erasing(transform.augmentation, count, np.random.default_rng(0))
    ours = (boxes[..., 1] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 2])  # (n, 2)
    erase = RandomErasing(0.5, mode="const", max_count=2, device="cpu")
    random.seed(0)  # timm draws from it
    theirs = np.array([side**2 - float(erase(torch.ones(1, side, side)).sum()) for _ in range(count)])
    covered = np.zeros(count)
    for number, picture in enumerate(boxes):
        mask = np.zeros((side, side), dtype=bool)
        for top, bottom, left, right in picture:
            mask[top:bottom, left:right] = True
        covered[number] = mask.sum()
    assert_same_distribution(covered, theirs)
    assert abs((ours[:, 0] > 0).mean() - 0.5) < 0.03
    assert abs((ours[:, 1] > 0).mean() - 0.25) < 0.03
    assert boxes.min() >= 0
    assert boxes.max() <= side


def test_erasing_fills_with_noise_or_nothing_and_leaves_the_rest():
    picture = noise_picture(64, 64)
    settings = {"rand_augment": None, "scale": (1.0, 1.0), "ratio": (1.0, 1.0), "horizontal_flip": 0.0}
    whole, _ = TrainTransform(64, erase_probability=0.0, **settings)(picture)
    values, shares = [], []
    for seed in range(60):
        noisy, matrix = TrainTransform(64, erase_probability=1.0, **settings)(picture, generator(seed))
        blank, _ = TrainTransform(64, erase_probability=1.0, erase_mode="const", **settings)(picture, generator(seed))
        erased = blank != whole
        assert torch.equal(erased, (noisy != whole) | erased)
        assert (blank[erased] == 0).all()
        assert torch.equal(matrix, torch.eye(2, 3))
        values.append(noisy[erased])
        shares.append(float(erased.float().mean()))
    values = torch.cat(values)
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 1) < 0.02
    assert 0.018 < min(shares) < max(shares) < 0.34


def test_the_same_generator_gives_the_same_result_and_the_picture_is_kept():
    picture, transform = noise_picture(100, 80), TrainTransform(48, erase_probability=0.7)
    before = picture.tobytes()
    differ = 0
    for seed in range(20):
        image, matrix = transform(picture, generator(seed))
        again, same_matrix = transform(picture, generator(seed))
        assert torch.equal(image, again)
        assert torch.equal(matrix, same_matrix)
        differ += not torch.equal(matrix, transform(picture, generator(seed + 100))[1])
    assert differ == 20
    assert picture.tobytes() == before


def test_transforms_travel_to_workers():
    picture = noise_picture()
    for transform in (TrainTransform(16), EvalTransform(16)):
        copy = pickle.loads(pickle.dumps(transform))
        assert torch.equal(copy(picture, generator())[0], transform(picture, generator())[0])
        assert repr(copy) == repr(transform)


def test_without_a_generator_torch_s_own_seed_decides():
    picture, transform = noise_picture(), TrainTransform(16)
    state = torch.random.get_rng_state()
    try:
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(transform(picture)[1])
    finally:
        torch.random.set_rng_state(state)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("source", [(500, 375), (375, 500), (341, 256), (50, 60)])
@pytest.mark.parametrize("fraction", [0.875, 0.95, 1.0])
@pytest.mark.parametrize(("mode", "theirs"), [("center", None), ("squash", "squash")])
def test_evaluation_is_timm_s(source, fraction, mode, theirs):
    picture = noise_picture(*source)
    reference = create_transform(64, crop_pct=fraction, crop_mode=theirs, interpolation="bicubic")
    image, matrix = EvalTransform(64, fraction, mode=mode)(picture)
    difference = (image - reference(picture)).abs()
    assert difference.mean() < 0.01  # a level is about 0.017
    assert difference.max() < 0.06
    box_center = geometry.apply(matrix, torch.tensor([[0.5, 0.5]]))
    assert (box_center - 0.5).abs().max() < 0.02


def test_evaluation_s_matrix_says_where_the_pixels_came_from():
    for source in ((300, 200), (200, 300)):
        image, matrix = EvalTransform(64, **PLAIN_LOOK)(coordinate_picture(*source))
        assert assert_colors_are_places(image, matrix, 1.5) > 0.85
    image, matrix = EvalTransform((40, 80), 1.0, mode="squash", **PLAIN_LOOK)(coordinate_picture(300, 200))
    torch.testing.assert_close(matrix, torch.eye(2, 3))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size": 0}, "size must be positive"),
        ({"scale": (0.5, 0.1)}, "scale must be"),
        ({"scale": (0.5, 1.1)}, "scale must be"),
        ({"ratio": (0.0, 1.0)}, "ratio must be"),
        ({"horizontal_flip": 1.5}, "horizontal_flip"),
        ({"interpolation": "bicubik"}, "Did you mean 'bicubic'"),
        ({"erase_mode": "pixels"}, "Did you mean 'pixel'"),
        ({"erase_count": 0}, "erase_count"),
        ({"color_jitter": (0.4, 0.4, 0.4, 0.1)}, "color_jitter"),
        ({"color_jitter": -0.1}, "color_jitter"),
        ({"std": (1.0, 0.0, 1.0)}, "std above 0"),
    ],
)
def test_settings_that_cannot_work_are_explained(settings, said):
    with pytest.raises(UserError, match=said):
        TrainTransform(**settings)


@pytest.mark.parametrize("transform", [TrainTransform(16), EvalTransform(16)])
def test_only_rgb_pictures_are_taken(transform):
    with pytest.raises(UserError, match=r"convert\('RGB'\)"):
        transform(Image.new("L", (20, 20)))


def test_evaluation_refuses_what_it_does_not_know():
    for settings, said in (
        ({"crop_fraction": 1.2}, "crop_fraction"),
        ({"mode": "centre"}, "Did you mean 'center'"),
        ({"interpolation": "lanczos"}, "unknown interpolation"),
    ):
        with pytest.raises(UserError, match=said):
            EvalTransform(16, **settings)
