"""Labels read from maps, against the numbers of the published program."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from alltokens.core import geometry
from alltokens.core.label_maps import LabelMap, sample_token_labels, sample_token_targets
from alltokens.core.plan import MixPlan, flipped_partner
from tests.golden_rules import golden_arrays

GOLDEN = golden_arrays("token_labels.npz")


def golden_maps(name: str) -> LabelMap:
    stored = torch.from_numpy(GOLDEN[name])  # (B, 2, k, h, w)
    return LabelMap(stored[:, 1].int(), stored[:, 0])


def golden_matrices(name: str, mirrored: bool = False) -> Tensor:
    top, left, height, width = torch.from_numpy(GOLDEN[name]).float().unbind(1)
    crops = geometry.crop(left, top, width, height)
    return geometry.compose(geometry.flip(torch.full_like(left, mirrored).bool()), crops)


@pytest.mark.parametrize(
    "name", [name for name in GOLDEN if re.fullmatch(r"(official|xyfixed)_(hflip_)?size\d+_smooth0.\d", name)]
)
def test_published_labels(name):
    parts = name.split("_")
    size, smoothing = int(parts[-2][len("size") :]), float(parts[-1][len("smooth") :])
    axes = "official" if parts[0] == "official" else "right"
    matrices = golden_matrices("coords_top_left_h_w", mirrored="hflip" in name)
    expected = torch.from_numpy(GOLDEN[name])
    maps = golden_maps("topk")
    class_targets, token_targets = sample_token_labels(maps, matrices, (size, size), 40, smoothing, axes=axes)
    torch.testing.assert_close(class_targets, expected[:, :, 1], atol=2e-5, rtol=1e-4)
    if size > 1:
        torch.testing.assert_close(token_targets.mT, expected[:, :, 2:], atol=2e-5, rtol=1e-4)


def test_published_labels_of_1000_classes():
    expected = torch.from_numpy(GOLDEN["official_1000_size14_smooth0.1_first32tokens"])
    matrices = golden_matrices("coords_top_left_h_w")[:2]
    class_targets, token_targets = sample_token_labels(
        golden_maps("topk_1000"), matrices, (14, 14), 1000, 0.1, axes="official"
    )
    torch.testing.assert_close(class_targets, expected[:, :, 1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(token_targets[:, :32].mT, expected[:, :, 2:], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(class_targets.sum(-1), torch.full((2,), 1 + 0.1 / 1000))


def test_published_labels_of_a_crop_narrower_than_a_cell():
    expected = torch.from_numpy(GOLDEN["official_7x7_size4_smooth0.0"])
    class_targets, token_targets = sample_token_labels(
        golden_maps("topk_7x7"), golden_matrices("coords_7x7"), (4, 4), 12, axes="official"
    )
    torch.testing.assert_close(class_targets, expected[:, :, 1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(token_targets.mT, expected[:, :, 2:], atol=2e-5, rtol=1e-4)


def test_published_mixing_of_all_tokens_alike_is_a_plan_of_one_share():
    maps, matrices = golden_maps("topk"), golden_matrices("coords_top_left_h_w")
    plan = MixPlan(flipped_partner(4), torch.full((1, 28, 28), 0.7))
    targets = sample_token_targets(maps, matrices, (14, 14), 40, 0.1, axes="official").mix(plan)
    expected = torch.from_numpy(GOLDEN["official_size14_smooth0.1_lam0.3"])
    torch.testing.assert_close(targets.dense(40).mT, expected[:, :, 2:], atol=2e-5, rtol=1e-4)


def test_entries_do_not_depend_on_the_number_of_classes():
    """What is stored of a token is C * k entries: 3 x 3 cells of 5 classes for 18x18 maps and 14x14 tokens."""
    targets = sample_token_targets(golden_maps("topk"), golden_matrices("coords_top_left_h_w"), (14, 14), 21843)
    assert targets.ids.shape == (4, 196, 45)
    assert all(tensor.device.type == "cpu" for tensor in targets.to("cpu")[:4])
