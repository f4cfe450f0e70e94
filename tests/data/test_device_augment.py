from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from alltokens.core import geometry
from alltokens.data import augment
from alltokens.data.augment import NUMBER, PLAIN
from alltokens.data.color import recolor, recolor_batch
from alltokens.data.device_augment import DeviceAugment, sample
from alltokens.data.transforms import TrainTransform
from alltokens.errors import UserError

PLAIN_LOOK = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
MOVES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
COLORS = [operation.name for operation in PLAIN[1:] if operation.name not in MOVES]


def coordinate_pictures(batch: int, height: int, width: int) -> torch.Tensor:
    """Red says x, green says y, in 255 levels; blue is full, so that fill is seen."""
    x = ((torch.arange(width) + 0.5) / width * 255).round().expand(height, -1)
    y = ((torch.arange(height) + 0.5) / height * 255).round()[:, None].expand(-1, width)
    return torch.stack((x, y, torch.full_like(x, 255))).to(torch.uint8).expand(batch, -1, -1, -1)


def smooth_pictures(batch: int, size: int = 32, seed: int = 0) -> torch.Tensor:
    coarse = torch.rand(batch, 3, 8, 8, generator=generator(seed)) * 220 + 15
    return torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear").round().to(torch.uint8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_picture(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def rows_of(operations: torch.Tensor) -> torch.Tensor:
    """What recolor_batch wants to know of Equalize, filled up with one row that leads nowhere."""
    return torch.cat(((operations == NUMBER["Equalize"]).nonzero()[:, 0], torch.tensor([len(operations)])))


@pytest.mark.parametrize("stored", [(64, 64), (128, 128), (150, 150)])
@pytest.mark.parametrize("name", [None, *MOVES])
def test_colors_are_where_the_matrix_says(name, stored, monkeypatch):
    def drawn(_settings, pictures, rng):
        sign = np.sign(rng.random((pictures, 1)) - 0.5)
        return np.full((pictures, 1), NUMBER[name]), sign * PLAIN[NUMBER[name]].span

    if name is not None:
        monkeypatch.setattr(augment, "draw_rand_augment", drawn)
    transform = TrainTransform(
        64,
        scale=(0.3, 1.0),
        rand_augment=None if name is None else "rand-m9-n1",
        vertical_flip=0.5,
        erase_probability=0.0,
        **PLAIN_LOOK,
    )
    images, matrix = DeviceAugment(transform)(coordinate_pictures(32, *stored), None, generator())
    x, y = geometry.coordinates(matrix, (64, 64))
    shown = torch.nn.functional.avg_pool2d((images[:, 2:] > 0.999).float(), 5, 1, 2)[:, 0] > 0.999
    inner = ((x - 0.5).abs() < 0.48) & ((y - 0.5).abs() < 0.48) & shown
    error = 255 * torch.stack(((images[:, 0] - x)[inner], (images[:, 1] - y)[inner]))
    assert error.abs().max() < 1.2
    assert error.mean(dim=1).abs().max() < 0.1
    assert inner.float().mean() > 0.4


@pytest.mark.parametrize("name", MOVES)
def test_a_moved_batch_is_the_moved_pictures(name, monkeypatch):
    """The same parameters in both forms: the same pixels shown, the same fill outside of the crop."""

    def drawn(_settings, pictures, rng):
        return np.full((pictures, 1), NUMBER[name]), np.full((pictures, 1), 0.8 * PLAIN[NUMBER[name]].span)

    monkeypatch.setattr(augment, "draw_rand_augment", drawn)
    transform = TrainTransform(48, scale=(0.5, 0.5), interpolation="bilinear", erase_probability=0.0)
    pictures = smooth_pictures(1, 64)
    for seed in range(5):
        batch, matrices = DeviceAugment(transform)(pictures, None, generator(seed))
        single, matrix = transform(as_picture(pictures[0]), generator(seed))
        torch.testing.assert_close(matrices[0], matrix)
        difference = (batch[0] - single).abs()  # a level is about 0.017; PIL cuts, and antialiases
        assert difference.median() < 0.03
        assert (difference > 0.3).float().mean() < 0.03


@pytest.mark.parametrize("name", COLORS)
@pytest.mark.parametrize("strength", [0.0, 0.45, 1.0])
@pytest.mark.parametrize("table", [augment.PLAIN, augment.INCREASING])
def test_every_color_operation_is_pil_s_to_a_level(name, strength, table):
    operation = table[NUMBER[name]]
    argument = operation.start + (np.trunc if operation.whole else float)(operation.span * strength)
    noise = torch.randint(0, 256, (2, 3, 32, 32), generator=generator(1), dtype=torch.uint8)
    flat = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    images = torch.cat((smooth_pictures(3), noise, noise // 3 + 60, flat))
    before = images.clone()
    operations = torch.full((len(images),), float(NUMBER[name]))
    colored = recolor_batch(images, operations, torch.full((len(images),), float(argument)), rows_of(operations))
    for image, ours in zip(images, colored, strict=True):
        theirs = torch.from_numpy(np.array(recolor(as_picture(image), NUMBER[name], float(argument)))).permute(2, 0, 1)
        assert (ours.int() - theirs.int()).abs().max() <= 1
    assert colored.dtype == torch.uint8
    assert torch.equal(images, before)


def test_each_sample_gets_its_own_operation():
    operations = torch.arange(augment.FIRST_MOVE).repeat(2).float()
    arguments = torch.linspace(0.2, 1.8, len(operations))
    images = smooth_pictures(len(operations))
    colored = recolor_batch(images, operations, arguments, rows_of(operations))
    for image, ours, operation, argument in zip(images, colored, operations, arguments, strict=True):
        theirs = recolor(as_picture(image), int(operation), float(argument))
        theirs = torch.from_numpy(np.array(theirs)).permute(2, 0, 1)
        if PLAIN[int(operation)].whole:  # such an argument would have been whole
            continue
        assert (ours.int() - theirs.int()).abs().max() <= 1
    assert torch.equal(colored[0], images[0])  # Identity


@pytest.mark.parametrize("settings", [{"rand_augment": "rand-m9-n1-p1"}, {"rand_augment": None}])
def test_compiled_is_eager_and_in_one_piece(settings):
    transform = TrainTransform(24, interpolation="bilinear", erase_probability=0.6, **settings)
    eager, compiled = DeviceAugment(transform), DeviceAugment(transform, backend="aot_eager")
    pictures = smooth_pictures(6)
    for seed in range(2):
        images, matrix = eager(pictures, None, generator(seed))
        same_images, same_matrix = compiled(pictures, None, generator(seed))
        torch.testing.assert_close(same_images, images)
        assert torch.equal(matrix, same_matrix)


@pytest.mark.slow
def test_inductor_s_code_is_eager_s():
    transform = TrainTransform(32, interpolation="bilinear", erase_probability=0.6)
    pictures = torch.randint(0, 256, (128, 3, 48, 48), generator=generator(1), dtype=torch.uint8)
    images, _ = DeviceAugment(transform)(pictures, None, generator(1))
    compiled, _ = DeviceAugment(transform, backend="inductor")(pictures, None, generator(1))
    # A sample that falls on half a level may be rounded the other way, and be a level off; few are.
    assert ((images - compiled).abs() > 1e-3).float().mean() < 0.01


def test_the_same_generator_gives_the_same_batch_and_the_pictures_are_kept():
    pictures, augmented = smooth_pictures(5), DeviceAugment(TrainTransform(24))
    before = pictures.clone()
    images, matrix = augmented(pictures, None, generator(3))
    again, same_matrix = augmented(pictures, None, generator(3))
    assert torch.equal(images, again)
    assert torch.equal(matrix, same_matrix)
    assert not torch.equal(matrix, augmented(pictures, None, generator(4))[1])
    assert torch.equal(pictures, before)


def test_a_batch_of_one_is_the_picture_form_s_draw():
    """One picture, one generator: both forms draw the same numbers, so the matrices are equal."""
    transform, picture = TrainTransform(32), smooth_pictures(1, 64)
    for seed in range(20):
        images, matrix = DeviceAugment(transform)(picture, None, generator(seed))
        single, single_matrix = transform(as_picture(picture[0]), generator(seed))
        assert images.shape == (1, *single.shape)
        torch.testing.assert_close(matrix[0], single_matrix)


def test_batches_with_many_rows_to_equalize_are_equalized(monkeypatch):
    monkeypatch.setattr(
        augment, "draw_rand_augment", lambda _, n, rng: (np.full((n, 1), NUMBER["Equalize"]), np.zeros((n, 1)))
    )
    settings = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "horizontal_flip": 0.0, "erase_probability": 0.0}
    pictures = smooth_pictures(21)
    images, _ = DeviceAugment(TrainTransform(32, **settings, **PLAIN_LOOK))(pictures, None, generator())
    for image, ours in zip(pictures, images, strict=True):
        theirs = np.array(recolor(as_picture(image), NUMBER["Equalize"], 0.0))
        torch.testing.assert_close(ours * 255, torch.from_numpy(theirs).permute(2, 0, 1).float(), atol=1.01, rtol=0)


def test_crops_keep_their_proportions_in_the_original():
    sizes = torch.tensor([[200, 800]]).expand(300, 2)
    transform = TrainTransform(16, scale=(0.1, 0.1), ratio=(1.0, 1.0), rand_augment=None, erase_probability=0.0)
    _, matrix = DeviceAugment(transform)(coordinate_pictures(300, 64, 64), sizes, generator())
    width, height = matrix[:, 0, 0].abs(), matrix[:, 1, 1].abs()
    torch.testing.assert_close(width * 800, height * 200)  # square in the original's pixels
    torch.testing.assert_close(width * height, torch.full_like(width, 0.1), rtol=0.02, atol=0)


def test_the_host_never_reads_from_the_device():
    pictures = smooth_pictures(4).to("meta")  # holds no values: reading one raises
    images, matrix = DeviceAugment(TrainTransform(24, erase_mode="const"))(pictures, None, generator())
    assert images.shape == (4, 3, 24, 24)
    assert matrix.is_meta


def test_samples_are_drawn_one_by_one():
    _, matrix = DeviceAugment(TrainTransform(16))(smooth_pictures(50), None, generator())
    assert len(torch.unique(matrix.flatten(1), dim=0)) == 50


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_smaller_outputs_are_averaged(interpolation):
    checkers = ((torch.arange(64)[:, None] + torch.arange(64)) % 2 * 255).to(torch.uint8).expand(1, 3, 64, 64)
    images = sample(checkers, geometry.identity()[None], (16, 16), interpolation)
    torch.testing.assert_close(images, torch.full_like(images, 127.5), atol=25, rtol=0)  # not 0 or 255


def test_the_whole_picture_is_only_normalised():
    pictures = smooth_pictures(3, 32)
    transform = TrainTransform(
        32, scale=(1.0, 1.0), ratio=(1.0, 1.0), horizontal_flip=0.0, rand_augment=None, erase_probability=0.0
    )
    images, matrix = DeviceAugment(transform)(pictures, None, generator())
    mean, std = (torch.tensor(values)[:, None, None] for values in (transform.mean, transform.std))
    torch.testing.assert_close(images, (pictures / 255 - mean) / std, atol=1e-4, rtol=0)
    torch.testing.assert_close(matrix, torch.eye(2, 3).expand(3, 2, 3))


def test_erasing_covers_the_drawn_share_with_noise_or_nothing():
    settings = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "horizontal_flip": 0.0, "rand_augment": None}
    pictures = torch.full((400, 3, 32, 32), 255, dtype=torch.uint8)
    noisy, _ = DeviceAugment(TrainTransform(32, erase_probability=0.5, **settings))(pictures, None, generator())
    blank, _ = DeviceAugment(TrainTransform(32, erase_probability=0.5, erase_mode="const", **settings))(
        pictures, None, generator()
    )
    erased = blank == 0
    shares = erased[:, 0].float().mean(dim=(1, 2))
    assert 0.42 < (shares > 0).float().mean() < 0.58
    assert 0.14 < shares[shares > 0].mean() < 0.21  # areas are uniform from 0.02 to a third
    assert torch.equal(noisy[~erased], blank[~erased])
    assert abs(float(noisy[erased].mean())) < 0.02
    assert abs(float(noisy[erased].std()) - 1) < 0.02


def test_inputs_that_cannot_work_are_explained():
    augmented = DeviceAugment(TrainTransform(16))
    with pytest.raises(UserError, match="uint8"):
        augmented(torch.rand(2, 3, 8, 8))
    with pytest.raises(UserError, match=r"sizes must be \(2, 2\)"):
        augmented(smooth_pictures(2), torch.tensor([[3, 4]]))
    with pytest.raises(UserError, match="on the CPU"):
        augmented(smooth_pictures(2), torch.zeros(2, 2, device="meta"))
