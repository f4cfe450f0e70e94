"""The rules for shares: exact values on hand-made inputs, limits."""

from __future__ import annotations

import pytest
import torch

from alltokens.core import align
from tests.core.test_kernels import inputs


def test_spatial_mixing_takes_absolute_weights_and_normalises_rows():
    weights = torch.tensor([[1.0, -3.0], [0.5, 0.5]])
    torch.testing.assert_close(align.spatial_mixing(weights, torch.tensor([0.2, 0.6])), torch.tensor([0.5, 0.4]))


def test_spatial_mixing_leaves_invalid_columns_out():
    weights = torch.tensor([[1.0, 1.0, 2.0]])
    valid = torch.tensor([True, False, True])
    mixed = align.spatial_mixing(weights, torch.tensor([0.3, 1.0, 0.6]), valid)
    torch.testing.assert_close(mixed, torch.tensor([0.5]))


@pytest.mark.parametrize(("terms", "expected"), [(0, 0.8), (1, 0.5), (2, 0.4), (3, 0.35)])
def test_residual_is_the_mean_of_all_summands(terms, expected):
    value = align.residual(torch.tensor([0.2]), torch.tensor([0.8]), terms)
    torch.testing.assert_close(value, torch.tensor([expected]))


def test_growing_sums_divided_at_the_end_equal_the_average_of_every_layer():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.rand(4, 6, 6, generator=generator, dtype=torch.float64).softmax(-1)
    averaged = grown = torch.rand(6, generator=generator, dtype=torch.float64)
    for matrix in matrices:
        averaged = align.residual(averaged, matrix @ averaged)
        grown = grown + matrix @ grown
    torch.testing.assert_close(averaged, grown / 2 ** len(matrices), atol=1e-12, rtol=0)


def test_aggregation_is_the_mean_of_what_lies_inside():
    row = torch.tensor([[[0.0, 0.2, 1.0], [0.4, 0.6, 0.5], [0.1, 0.3, 0.9]]])
    merged = align.aggregation(row, 2, 2, ceil=True)
    torch.testing.assert_close(merged, torch.tensor([[[0.3, 0.75], [0.2, 0.9]]]))
    overlapping = align.aggregation(row, 3, 2, 1)
    torch.testing.assert_close(overlapping[0, 0, 0], row[0, :2, :2].mean())


def test_convolution_is_normalised_over_the_picture_at_its_edges():
    kernel_ = torch.zeros(2, 1, 3, 3)
    kernel_[0, 0, 1] = torch.tensor([-1.0, 2.0, 1.0])  # the mean of both channels: 1, 1, 1 in the middle row
    kernel_[1, 0, 1] = torch.tensor([1.0, 0.0, -1.0])
    row = torch.tensor([[[0.0, 0.3, 0.9]]])
    torch.testing.assert_close(align.convolution(row, kernel_, (1, 1)), torch.tensor([[[0.15, 0.4, 0.6]]]))


def test_pooling_minus_identity_equals_its_absolute_matrix():
    row = torch.tensor([[[0.0, 1.0, 0.0]]])  # three tokens in a line: 2, 3 and 2 in their neighbourhoods
    expected = torch.tensor([[[1 / 2, (2 / 3) / (4 / 3), 1 / 2]]])
    torch.testing.assert_close(align.pooling_minus_identity(row, 3), expected)


@pytest.mark.parametrize("constant", [0.0, 0.37, 1.0])
def test_every_rule_keeps_a_constant_share(constant):
    row = torch.full((2, 4, 6), constant)
    query, key, share = inputs()
    kernel_ = torch.randn(3, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    for mixed in (
        align.spatial_mixing(weights, row.flatten(1).unsqueeze(1)),
        align.residual(row, row, 2),
        align.aggregation(row, 3, 2, 1),
        align.convolution(row, kernel_, (1, 1)),
        align.pooling_minus_identity(row, 3),
        align.attention_share(query, key, torch.full_like(share, constant), 0.5),
    ):
        torch.testing.assert_close(mixed, torch.full_like(mixed, constant), atol=1e-6, rtol=0)


def test_uniform_attention_gives_the_mean_and_sharp_attention_the_chosen_key():
    query, key, share = inputs(queries=5, channels=5)
    uniform = align.attention_share(torch.zeros_like(query), key, share, 1.0)
    torch.testing.assert_close(uniform, share.mean(1, keepdim=True).expand(-1, 5))
    identity = torch.eye(5).expand(2, 3, 5, 5)
    torch.testing.assert_close(align.attention_share(identity, identity, share, 1e4), share)


def test_masks_become_one_additive_bias():
    keep = torch.tensor([[True, False], [True, True]])
    valid = torch.tensor([[False, True]])
    infinity = float("inf")
    torch.testing.assert_close(align.additive_bias(keep, None, torch.float32), torch.tensor([[0, -infinity], [0, 0.0]]))
    both = align.additive_bias(keep.float(), valid, torch.float32)
    torch.testing.assert_close(both, torch.tensor([[[[-infinity, 0], [-infinity, 1.0]]]]))
    assert align.additive_bias(None, None, torch.float32) is None
