"""The rules for shares: exact values on hand-made inputs, limits, and the op against explicit attention."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from alltokens.core import align
from alltokens.core.kernels import attention_share as kernel
from alltokens.core.kernels.attention_with_share import attention_with_share, can_carry


def explicit(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    scores = query.double() @ key.double().transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias.double()
    return (scores.softmax(-1) @ share.double()[:, None, :, None]).squeeze(-1).mean(1)


def inputs(batch=2, heads=3, queries=7, keys=5, channels=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, queries, channels, generator=generator).to(dtype)
    key = torch.randn(batch, heads, keys, channels, generator=generator).to(dtype)
    return query, key, torch.rand(batch, keys, generator=generator)


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


@pytest.mark.parametrize("bias_shape", [None, (1, 3, 7, 5), (2, 1, 1, 5), (7, 5), (2, 3, 7, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_equals_explicit_attention(bias_shape, dtype):
    query, key, share = inputs(dtype=dtype)
    bias = None if bias_shape is None else torch.randn(bias_shape, generator=torch.Generator().manual_seed(1))
    mixed = align.attention_share(query, key, share, 0.4, bias)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), explicit(query, key, share, 0.4, bias), atol=1e-6, rtol=0)


def test_long_rows_are_worked_off_in_stretches(monkeypatch):
    query, key, share = inputs(queries=11)
    bias = torch.randn(1, 3, 11, 5, generator=torch.Generator().manual_seed(1))
    whole = align.attention_share(query, key, share, 0.4, bias)
    monkeypatch.setattr(kernel, "WEIGHTS_AT_ONCE", 2 * 3 * 5 * 4)  # four queries at a time, three at last
    torch.testing.assert_close(align.attention_share(query, key, share, 0.4, bias), whole)


def test_the_op_meets_the_contract_of_torch_library():
    query, key, share = inputs()
    bias = torch.randn(1, 3, 7, 5)
    before = query.clone()
    torch.library.opcheck(kernel.attention_share, (query, key, share, 0.4, bias))
    assert torch.equal(query, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_with_share_is_fused_attention_and_the_op(dtype):
    query, key, share = inputs(channels=16, dtype=dtype)
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    share = share.to(dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    weight = torch.randn(2, 3, 7, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    attended, mixed, _ = attention_with_share(query, key, value, share, 0.3)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    torch.testing.assert_close(attended, plain)
    gradients = torch.autograd.grad((attended * weight).sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad((plain * weight).sum(), leaves))
    assert not mixed.requires_grad
    torch.testing.assert_close(mixed, align.attention_share(query.detach(), key.detach(), share, 0.3))
    torch.library.opcheck(attention_with_share, (query, key, value, share, 0.3))


def test_what_fused_attention_would_round_or_cannot_widen_is_not_carried_along():
    query, key, _ = inputs()
    assert can_carry(query, key, key)
    assert not can_carry(query, key, key.bfloat16())
    assert not can_carry(query.half(), key.half(), key.half())
    assert not can_carry(query, key, key[..., :4])
    assert not can_carry(query.to("meta"), key, key)


def test_masks_become_one_additive_bias():
    keep = torch.tensor([[True, False], [True, True]])
    valid = torch.tensor([[False, True]])
    infinity = float("inf")
    torch.testing.assert_close(align.additive_bias(keep, None, torch.float32), torch.tensor([[0, -infinity], [0, 0.0]]))
    both = align.additive_bias(keep.float(), valid, torch.float32)
    torch.testing.assert_close(both, torch.tensor([[[[-infinity, 0], [-infinity, 1.0]]]]))
    assert align.additive_bias(None, None, torch.float32) is None


INTERPRETED = """
import sys, torch
from alltokens.core.kernels.attention_share import attention_share_plain
from alltokens.core.kernels.attention_share_triton import attention_share_triton
generator = torch.Generator().manual_seed(0)
worst = 0.0
cases = [(2, 2, 7, 7, 24), (1, 1, 70, 70, 60), (2, 1, 1, 40, 32), (1, 1, 33, 17, 80)]
for index, (batch, heads, queries, keys, channels) in enumerate(cases):
    wide = torch.randn(batch, queries + keys, 2, heads, channels, generator=generator)  # strided, as timm's qkv is
    wide = wide.to([torch.float32, torch.float16][index % 2]) * 2  # Triton's interpreter cannot multiply bfloat16
    query = wide[:, :queries, 0].transpose(1, 2)
    key = wide[:, queries:, 1].transpose(1, 2)
    share = torch.rand(batch, keys, generator=generator)
    biases = [None, torch.randn(1, heads, queries, keys, generator=generator)]
    left_out = torch.zeros(batch, 1, 1, keys)
    left_out[..., : keys // 2] = float("-inf")
    biases.append(left_out)
    for bias in biases:
        kernel = attention_share_triton(query, key, share, channels**-0.5, bias)
        plain = attention_share_plain(query, key, share, channels**-0.5, bias)
        worst = max(worst, (kernel - plain).abs().max().item())
print(worst)
sys.exit(not worst < 2e-5)
"""


def test_the_triton_kernel_equals_its_twin_when_interpreted():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton (before 3.7) does not run with numpy 2.4 and newer")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys"), [(197, 197), (49, 49), (1, 577), (3136, 49), (4096, 4096)])
@pytest.mark.parametrize("channels", [24, 32, 60, 64, 80, 96, 128])
@pytest.mark.parametrize("biased", [False, True])
def test_the_triton_kernel_equals_its_twin_on_a_gpu(dtype, queries, keys, channels, biased):
    query, key, share = (
        value.cuda() for value in inputs(heads=2, queries=queries, keys=keys, channels=channels, dtype=dtype)
    )
    bias = torch.randn(1, 2, queries, keys, device="cuda") if biased else None
    mixed = align.attention_share(query, key, share, channels**-0.5, bias)
    plain = kernel.attention_share_plain(query, key, share, channels**-0.5, bias)
    torch.testing.assert_close(mixed, plain, atol=2e-5, rtol=0)
