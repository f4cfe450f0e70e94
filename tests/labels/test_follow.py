"""Labels follow their picture: a picture of its own coordinates and a map of them meet again in every token.

The picture's colours say where in it each pixel lies, the map's scores where each cell does. After the same
augmentation the mean colour of a token and the label that it reads must name the same place, to a tenth of a cell.
"""

import numpy as np
import pytest
import torch

from alltokens.core.label_maps import LabelMap, sample_token_targets
from alltokens.data import augment
from alltokens.data.augment import PLAIN
from alltokens.data.device_augment import DeviceAugment
from alltokens.data.transforms import TrainTransform
from tests.data.test_device_augment import coordinate_pictures
from tests.data.test_transforms import MOVES, PLAIN_LOOK, coordinate_picture, generator

CELLS, TOKENS, SIZE = 18, 14, 224
SEEDS = 24


def coordinate_maps(count):
    """(2 * count, 1, 18, 18): x of each cell for the first half, y for the others."""
    x = ((torch.arange(CELLS) + 0.5) / CELLS).expand(CELLS, CELLS)
    scores = torch.stack([x, x.T]).repeat_interleave(count, 0)[:, None]
    return LabelMap(torch.zeros(scores.shape, dtype=torch.int64), scores)


def places_read(matrix):
    """(B, 2, N), (B, N): where each token's label says it lies, x and y in [0, 1]; which tokens lie inside."""
    targets = sample_token_targets(coordinate_maps(len(matrix)), matrix.repeat(2, 1, 1), (TOKENS, TOKENS), 2)
    place = torch.logit(targets.dense(2)[..., 0].double())  # between the score and the other class's zero
    return torch.stack(place.chunk(2), 1), targets.weight[: len(matrix)] == 1


def places_shown(images):
    """(B, 2, N), (B, N): the mean place of each token's pixels; whether all of them and their neighbours are shown."""
    means = torch.nn.functional.avg_pool2d(images.double(), SIZE // TOKENS)
    filled = torch.nn.functional.max_pool2d((images[:, 2:] < 0.999).float(), 5, 1, 2)
    full = torch.nn.functional.max_pool2d(filled, SIZE // TOKENS)[:, 0] == 0
    return means[:, :2].flatten(2), full.flatten(1)


def cells_apart(images, matrix):
    """How far what is read lies from what is shown, in cells (M, 2), for the tokens that can be compared."""
    shown, full = places_shown(images)
    read, inside = places_read(matrix)
    inner = ((shown - 0.5).abs() < 0.5 - 1.5 / CELLS).all(1)  # at the map's edge the outermost cells go on
    known = full & inside & inner
    return ((read - shown) * CELLS).transpose(1, 2)[known]


def some_operation(monkeypatch, name):
    """RandAugment that does nothing but this operation, at up to full strength; or three moves one after the other."""
    if name == "crops and flips":
        return None

    def drawn(_settings, pictures, rng):
        if name == "three moves":
            chosen = rng.integers(augment.FIRST_MOVE, len(PLAIN), (pictures, 3))
            strength = 0.4
        else:
            chosen, strength = np.full((pictures, 1), augment.NUMBER[name]), 1.0
        spans = np.array([operation.span for operation in PLAIN])[chosen]
        return chosen, strength * spans * rng.uniform(-1, 1, chosen.shape)

    monkeypatch.setattr(augment, "draw_rand_augment", drawn)
    return "rand-m9-n1"


def transform_of(monkeypatch, name, **settings):
    rand_augment = some_operation(monkeypatch, name)
    common = {"scale": (0.2, 1.0), "vertical_flip": 0.3, "erase_probability": 0.0, **PLAIN_LOOK}
    return TrainTransform(SIZE, rand_augment=rand_augment, **{**common, **settings})


OPERATIONS = ["crops and flips", *MOVES, "three moves"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_pictures_one_by_one(name, monkeypatch):
    transform = transform_of(monkeypatch, name)
    pictures = [coordinate_picture(300, 200), coordinate_picture(180, 260)]
    both = [transform(pictures[seed % 2], generator(seed)) for seed in range(SEEDS)]
    images, matrix = (torch.stack(part) for part in zip(*both, strict=True))
    apart = cells_apart(images, matrix)
    assert len(apart) > 12 * SEEDS
    assert apart.abs().max() < 0.1
    assert apart.mean(0).abs().max() < 0.04  # a matrix off by half a pixel or a cell would shift them all


@pytest.mark.parametrize("name", OPERATIONS)
def test_batches_on_the_device(name, monkeypatch):
    transform = transform_of(monkeypatch, name)
    images, matrix = DeviceAugment(transform)(coordinate_pictures(SEEDS, 256, 256), None, generator())
    apart = cells_apart(images, matrix)
    assert len(apart) > 12 * SEEDS
    assert apart.abs().max() < 0.1


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "TranslateYRel"])
def test_labels_that_follow_crops_alone_are_elsewhere_after_a_move(name, monkeypatch):
    """That the comparison can fail: moves that are kept from the labels part them from their pixels."""
    transform = transform_of(monkeypatch, name, labels_follow="crop")
    both = [transform(coordinate_picture(300, 200), generator(seed)) for seed in range(8)]
    images, matrix = (torch.stack(part) for part in zip(*both, strict=True))
    assert cells_apart(images, matrix).abs().max() > 1


def test_outside_of_the_picture_no_token_has_a_label(monkeypatch):
    """Where turning shows what lies beyond the picture, the weight is the share of the token inside."""
    transform = transform_of(monkeypatch, "Rotate", scale=(1.0, 1.0), vertical_flip=0.0)
    both = [transform(coordinate_picture(256, 256), generator(seed)) for seed in range(12)]
    images, matrix = (torch.stack(part) for part in zip(*both, strict=True))
    shown = torch.nn.functional.avg_pool2d((images[:, 2:] > 0.999).double(), SIZE // TOKENS)[:, 0].flatten(1)
    weight = sample_token_targets(coordinate_maps(12), matrix.repeat(2, 1, 1), (TOKENS, TOKENS), 2).weight[:12]
    assert (weight[shown == 0] < 0.3).all()  # its samples are few: one or two of four at the very edge
    assert (weight[shown == 1] > 0.7).all()
    assert (shown == 0).any()
