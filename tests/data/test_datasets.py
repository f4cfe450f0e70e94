from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from alltokens.data.datasets import IGNORED, PictureDataset, Sample
from alltokens.data.picture_source import PictureSource
from alltokens.data.pictures import UnreadablePicture
from alltokens.data.sampler import Draw
from alltokens.errors import UserError


class Maps(NamedTuple):
    ids: Tensor
    scores: Tensor


class Store:
    def __getitem__(self, key: str) -> Maps:
        return Maps(torch.tensor([len(key)]), torch.tensor([0.5]))


def noisy(picture: Image.Image, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The first pixel's colour, and noise in the place of the matrix."""
    colour = torch.tensor(picture.getpixel((0, 0)), dtype=torch.float32)
    return colour.reshape(3, 1, 1), torch.rand(2, 3, generator=generator)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six pictures of the shades 10 to 60 in two classes."""
    for index in range(6):
        path = tmp_path / "cd"[index // 3] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (10 * index + 10, 0, 0)).save(path)
    return tmp_path


def shade(sample: Sample) -> int:
    return int(sample.image[0, 0, 0])


def test_samples_carry_picture_label_key_and_matrix(root: Path) -> None:
    dataset = PictureDataset(root, noisy)
    assert (len(dataset), dataset.num_classes, dataset.class_names) == (6, 2, ("c", "d"))
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1]
    sample = dataset[4]
    assert (shade(sample), sample.label, sample.key, sample.maps, sample.trouble) == (50, 1, "d/4.png", (), "")
    assert sample.matrix.shape == (2, 3)
    assert dataset[-1].key == "d/5.png"
    with pytest.raises(IndexError):
        dataset[6]


def test_a_draw_makes_the_sample_a_function_of_its_seed(root: Path) -> None:
    dataset = PictureDataset(root, noisy)
    before = torch.get_rng_state()
    first, again, other = dataset[Draw(1, 7)], dataset[Draw(1, 7)], dataset[Draw(1, 8)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.matrix, again.matrix)
    assert not torch.equal(first.matrix, other.matrix)
    assert torch.equal(first.matrix, torch.rand(2, 3, generator=torch.Generator().manual_seed(7)))


def test_without_a_draw_torch_draws(root: Path) -> None:
    dataset = PictureDataset(root, noisy)
    torch.manual_seed(3)
    sample = dataset[0]
    torch.manual_seed(3)
    assert torch.equal(sample.matrix, torch.rand(2, 3))


def test_plain_collate_makes_a_batch(root: Path) -> None:
    dataset = PictureDataset(root, noisy)
    batch = default_collate([dataset[index] for index in (5, 0, 3)])
    assert isinstance(batch, Sample)
    assert batch.image[:, 0, 0, 0].tolist() == [60, 10, 40]
    assert batch.label.tolist() == [1, 0, 1]
    assert (batch.key, len(batch.maps)) == (("d/5.png", "c/0.png", "d/3.png"), 0)
    assert batch.matrix.shape == (3, 2, 3)


def test_label_maps_come_by_key_and_collate(root: Path) -> None:
    dataset = PictureDataset(root, noisy, labels=Store())
    batch = default_collate([dataset[0], dataset[1]])
    assert isinstance(batch.maps, Maps)
    assert batch.maps.ids.tolist() == [[7], [7]]


def test_to_moves_every_tensor_and_keeps_the_rest(root: Path) -> None:
    dataset = PictureDataset(root, noisy, labels=Store())
    batch = default_collate([dataset[0], dataset[1]])
    moved = batch.to("meta")
    tensors = (moved.image, moved.label, moved.matrix, *moved.maps)
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 5
    assert (moved.key, moved.trouble) == (batch.key, ("", ""))
    assert batch.image.device.type == "cpu"
    assert dataset[0].to("meta").label == 0


def test_class_names_of_the_training_pictures_order_the_labels(root: Path) -> None:
    names = ("d", "x", "c")
    assert PictureDataset(root, noisy, class_names=names).labels.tolist() == [2, 2, 2, 0, 0, 0]
    source = PictureDataset(root, noisy).source
    assert PictureDataset(source, noisy, class_names=names).labels.tolist() == [2, 2, 2, 0, 0, 0]


def test_a_bad_picture_is_an_error_that_names_it(root: Path) -> None:
    (root / "c/1.png").write_bytes(b"")
    with pytest.raises(UnreadablePicture, match=r"c/1\.png: .*empty"):
        PictureDataset(root, noisy)[1]


def test_a_picture_that_has_gone_is_named(root: Path) -> None:
    dataset = PictureDataset(root, noisy)
    (root / "c/1.png").unlink()
    with pytest.raises(UnreadablePicture, match=r"c/1\.png: cannot be read \(No such file"):
        dataset[1]


def test_a_skipped_picture_is_replaced_by_the_next_and_told(root: Path) -> None:
    for name in ("c/1.png", "c/2.png", "d/5.png"):
        (root / name).write_bytes(b"broken")
    dataset = PictureDataset(root, noisy, on_bad_picture="skip")
    sample = dataset[Draw(1, 0)]
    assert (shade(sample), sample.label, sample.key) == (40, 1, "d/3.png")
    assert [line.partition(": ")[0][-7:] for line in sample.trouble.splitlines()] == ["c/1.png", "c/2.png"]
    assert dataset[5].key == "c/0.png"
    assert dataset[0].trouble == ""


def test_a_marked_picture_keeps_its_place_and_has_no_label(root: Path) -> None:
    (root / "c/1.png").write_bytes(b"broken")
    sample = PictureDataset(root, noisy, on_bad_picture="mark")[1]
    assert (shade(sample), sample.label, sample.key) == (0, IGNORED, "c/1.png")
    assert "c/1.png" in sample.trouble


def test_pictures_beyond_max_pixels_are_bad_pictures(root: Path) -> None:
    with pytest.raises(UnreadablePicture, match=r"4x4 pixels .*data\.max_pixels=15"):
        PictureDataset(root, noisy, max_pixels=15)[0]


def test_when_nothing_can_be_read_it_stops() -> None:
    source = PictureSource("disk", ("a", "b"), np.zeros(1000, dtype=np.int64), ["x"] * 1000, lambda index: b"")
    with pytest.raises(UnreadablePicture, match="100 pictures in a row cannot be read; the last is disk/x"):
        PictureDataset(source, noisy, on_bad_picture="skip")[950]


def test_settings_are_checked(root: Path) -> None:
    with pytest.raises(UserError, match=r"unknown on_bad_picture 'skp'. Did you mean 'skip'"):
        PictureDataset(root, noisy, on_bad_picture="skp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="split chooses within a path"):
        PictureDataset(PictureDataset(root, noisy).source, noisy, split="train")
