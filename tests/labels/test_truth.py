"""Labels held against the class of every pixel."""

import numpy as np
import pytest
import torch

from alltokens.core.label_maps import LabelMap
from alltokens.data.scenes import render_scenes
from alltokens.errors import UserError
from alltokens.labels.manifest import Description
from alltokens.labels.truth import NO_CLASS, CellScores, score_cells, true_cells
from alltokens.labels.writer import LabelWriter


def test_a_cells_class_is_that_of_most_of_its_pixels():
    pixels = torch.full((1, 4, 6), 255, dtype=torch.uint8)
    pixels[0, :2, :2] = 3  # all of the first cell
    pixels[0, 0, 2:4] = 1  # half of the second
    pixels[0, 0, 4] = 2  # a quarter of the third
    pixels[0, 2, :] = torch.tensor([0, 0, 4, 4, 5, 6])
    pixels[0, 3, :] = torch.tensor([0, 1, 255, 5, 5, 5])
    assert true_cells(pixels, (2, 3), 7).tolist() == [[[3, 1, NO_CLASS], [0, 4, 5]]]
    assert true_cells(pixels, (2, 3), 7, least=0.75).tolist() == [[[3, NO_CLASS, NO_CLASS], [0, NO_CLASS, 5]]]
    assert (
        true_cells(pixels.int() - 256 * (pixels == 255), (2, 3), 7).tolist() == true_cells(pixels, (2, 3), 7).tolist()
    )
    assert (true_cells(pixels, (2, 3), 3)[0, 0, 0], true_cells(pixels, (2, 3), 3)[0, 1, 0]) == (NO_CLASS, 0)
    with pytest.raises(UserError, match="B, S, S"):
        true_cells(pixels[0], (2, 3), 7)


@pytest.fixture
def scenes_and_store(tmp_path):
    """Scenes whose labels name the true class first in two of three cells, and second in the others."""
    scenes = render_scenes(6, 32)
    truth = true_cells(torch.from_numpy(np.array(scenes.class_maps)), (4, 4), 10)
    right = torch.arange(16).view(4, 4) % 3 != 0
    true = truth.clamp(min=0)
    other = (true + 1) % 10
    ids = torch.stack([torch.where(right, true, other), torch.where(right, other, true)], 1)
    scores = torch.tensor([2.0, 1.0])[:, None, None].expand(6, 2, 4, 4)
    keys = [f"train/{at:06}" for at in range(6)]
    with LabelWriter(tmp_path / "s", Description((4, 4), 2, 10)) as writer:
        writer.append(keys, LabelMap(ids.int(), scores, torch.zeros(6, 4, 4)))
        return keys, scenes.class_maps, truth, right, writer.finish()


def test_a_store_is_scored_cell_by_cell(scenes_and_store):
    keys, class_maps, truth, right, store = scenes_and_store
    known = truth != NO_CLASS
    expected = float((known & right).sum() / known.sum())
    assert 0.5 < expected < 0.9
    scores = score_cells(store, zip(keys, class_maps, strict=True), at_a_time=4)
    assert scores == CellScores(pytest.approx(expected), 1.0, int(known.sum()))
    turned = score_cells(store, [(key, class_map.T) for key, class_map in zip(keys, class_maps, strict=True)])
    assert turned.top1 < expected - 0.1
    with pytest.raises(UserError, match="no label map for 'train/9'"):
        score_cells(store, [("train/9", class_maps[0])])
    with pytest.raises(UserError, match="not one cell"):
        score_cells(store, [(keys[0], np.full((32, 32), 255))])
