"""Token predictions against the class of every pixel, on pictures made by hand."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from alltokens.core import geometry
from alltokens.data.sources import open_source
from alltokens.data.transforms import EvalTransform
from alltokens.errors import UserError
from alltokens.evaluate.token_truth import (
    NO_CLASS,
    UNKNOWN,
    class_maps_of,
    measure,
    measure_token_truth,
    open_masks,
    pictures_with_truth,
    sample_classes,
    score_tokens,
    truth_of,
)
from tests.tiny import tiny_config


def test_scores_by_hand():
    # A 2x2 grid over 4x4 pixels, three classes. The upper left token shows class 1; the upper right one is background;
    # the lower left one shows class 2 with half of its pixels; of the lower right one nothing is known.
    truth = torch.full((1, 4, 4), NO_CLASS)
    truth[0, :2, :2] = 1
    truth[0, 2:, 0] = 2
    truth[0, 2:, 2:] = UNKNOWN
    scores = torch.zeros(1, 3, 2, 2)
    scores[0, 1] = torch.tensor([[3.0, 2.9], [-3.0, 9.0]])  # the unknown token is surest, and must not count
    scores[0, 0, 1, 0] = 1.0
    right, tokens, hits, iou, pictures = score_tokens(scores, torch.tensor([1]), truth).tolist()
    assert (right, tokens, hits, pictures) == (1, 2, 1, 1)
    assert iou == pytest.approx(1 / 2)  # two tokens are above the middle, one of them shows class 1
    assert truth_of(score_tokens(scores, torch.tensor([1]), truth))[:3] == (50.0, 100.0, 50.0)
    # Of class 2: its surest known token is one of the upper ones, both alike there; neither shows it.
    _, _, hits, iou, pictures = score_tokens(scores, torch.tensor([2]), truth).tolist()
    assert (hits, pictures) == (1, 1)
    assert iou == 1.0  # at the lower left class 1 is unlikely, so class 2 is likeliest there
    # A class that no token shows: the picture counts nowhere.
    sums = score_tokens(scores, torch.tensor([0]), truth)
    assert truth_of(sums) == (50.0, None, None, 0)


def test_a_border_pixel_counts_neither_way():
    truth = torch.tensor([[[0, UNKNOWN], [UNKNOWN, UNKNOWN]]])
    scores = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    assert score_tokens(scores, torch.tensor([0]), truth).tolist() == [1, 1, 1, 1, 1]


def test_truth_follows_the_evaluation_crop():
    class_map = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert torch.equal(sample_classes(class_map, geometry.identity(), (8, 8)), torch.from_numpy(class_map).short())
    middle = geometry.crop(0.25, 0.25, 0.5, 0.5)
    assert sample_classes(class_map, middle, (4, 4)).tolist() == class_map[2:6, 2:6].tolist()


def trimaps(folder, value=3):
    pictures, masks = folder / "pets.tar", folder / "masks.tar"
    with tarfile.open(pictures, "w") as out, tarfile.open(masks, "w") as out_masks:
        for breed in ("Beagle", "Sphynx"):
            mask = np.full((8, 8), 2, dtype=np.uint8)
            mask[:4] = 1
            mask[4] = value
            for tar, name, array in ((out, "a.webp", np.zeros((8, 8, 3), np.uint8)), (out_masks, "a.png", mask)):
                content = io.BytesIO()
                Image.fromarray(array).save(content, name[2:])
                member = tarfile.TarInfo(f"{breed}/{name}")
                member.size = len(content.getvalue())
                tar.addfile(member, io.BytesIO(content.getvalue()))
    return open_source(pictures), str(masks)


def test_trimaps_become_classes(tmp_path):
    source, masks = trimaps(tmp_path)
    class_map = open_masks(masks, source)(1)
    assert class_map[:, 0].tolist() == [1] * 4 + [UNKNOWN] + [NO_CLASS] * 3
    images, labels, truths = pictures_with_truth(source, EvalTransform(8, crop_fraction=1.0), open_masks(masks, source))
    assert (tuple(images.shape), labels.tolist()) == ((2, 3, 8, 8), [0, 1])
    assert truths[0, :, 0].tolist() == [0] * 4 + [UNKNOWN] + [NO_CLASS] * 3
    with pytest.raises(UserError, match="is no trimap"):
        open_masks(trimaps(tmp_path, value=7)[1], source)(0)
    with tarfile.open(tmp_path / "none.tar", "w") as out:
        out.add(tmp_path / "pets.tar", "Beagle/b.png")
    with pytest.raises(UserError, match=r"no mask for Beagle/a\.webp and 1 more"):
        open_masks(str(tmp_path / "none.tar"), source)


class Upper(nn.Module):
    """Sure of class `wanted` in the upper half; its dense head says so for every token."""

    num_classes = 2

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.aux_head = nn.Identity()
        self.answer = nn.Parameter(torch.zeros(2, 4, 4))
        with torch.no_grad():
            self.answer[wanted, :2] = 5.0

    def forward_features(self, images):
        return self.answer.flatten(1).T.expand(len(images), -1, -1)

    def forward_head(self, features):
        return features.mean(1)


def test_a_network_that_is_right_and_one_that_is_wrong(tmp_path):
    source, masks = trimaps(tmp_path)
    pictures = pictures_with_truth(source, EvalTransform(8, crop_fraction=1.0), open_masks(masks, source))
    only_first = [part[:1] for part in pictures]
    colours = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    assert measure(Upper(0), *colours, *only_first)[:3] == (100.0, 100.0, 100.0)
    wrong = measure(Upper(1), *colours, *only_first)
    assert (wrong.accuracy, wrong.pointing) == (0.0, 0.0)


def test_scenes_know_their_truth(tmp_path):
    from alltokens.engine.assembly import build_net

    config = tiny_config()
    found = measure_token_truth(build_net(config, 10), config, "scenes")
    assert found.pictures == 40
    assert 0 <= found.accuracy <= 40  # ten classes, untrained
    source, _ = trimaps(tmp_path)
    with pytest.raises(UserError, match="do not fit"):
        class_maps_of(source, "scenes", 32)
