"""The kernels behind shares: each op against explicit attention, and each Triton kernel against its twin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.core import align
from alltokens.core.kernels import attention_share as kernel
from alltokens.core.kernels.attention_with_share import aligned_bias, attention_with_share, can_carry
from alltokens.core.kernels.merge_entries import merge_entries
from alltokens.core.kernels.sparse_cross_entropy import sparse_cross_entropy


def inputs(batch=2, heads=3, queries=7, keys=5, channels=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, queries, channels, generator=generator).to(dtype)
    key = torch.randn(batch, heads, keys, channels, generator=generator).to(dtype)
    return query, key, torch.rand(batch, keys, generator=generator)


def explicit(query: Tensor, key: Tensor, share: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    scores = query.double() @ key.double().transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias.double()
    return (scores.softmax(-1) @ share.double()[:, None, :, None]).squeeze(-1).mean(1)


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


INTERPRETED = """
import torch
from alltokens.core.kernels.attention_share import attention_share_plain
from alltokens.core.kernels.attention_share_triton import attention_share_triton
from alltokens.core.kernels.attention_with_share_triton import Blocks, attention_with_share_triton
generator = torch.Generator().manual_seed(0)
cases = [(2, 2, 7, 7, 24), (1, 1, 70, 70, 60), (2, 1, 1, 40, 32), (1, 1, 33, 17, 80)]
for index, (batch, heads, queries, keys, channels) in enumerate(cases):
    wide = torch.randn(batch, queries + keys, 3, heads, channels, generator=generator)  # strided, as timm's qkv is
    dtype = [torch.float32, torch.float16][index % 2]  # Triton's interpreter cannot multiply bfloat16
    query, key, value = (wide.to(dtype) * 2).permute(2, 0, 3, 1, 4)
    query, key, value = query[:, :, :queries], key[:, :, queries:], value[:, :, queries:]
    share = torch.rand(batch, keys, generator=generator)
    left_out = torch.zeros(batch, 1, 1, keys)
    left_out[..., : keys // 2] = float("-inf")
    scale = channels**-0.5
    for bias in (None, torch.randn(1, heads, queries, keys, generator=generator), left_out):
        mixed = attention_share_triton(query, key, share, scale, bias)
        plain = attention_share_plain(query, key, share, scale, bias)
        torch.testing.assert_close(mixed, plain, atol=2e-5, rtol=0)
        scores = query.double() @ key.double().transpose(-2, -1) * scale + (0 if bias is None else bias)
        expected = scores.softmax(-1) @ value.double(), attention_share_plain(query, key, share, scale, bias)
        for blocks in (None, Blocks(16, 16, 4, 1)):  # with and without whole blocks of keys
            attended, mixed, log_sum = attention_with_share_triton(query, key, value, share, scale, bias, blocks)
            rounding = 2e-5 if dtype == torch.float32 else 4e-3
            torch.testing.assert_close(attended.double(), expected[0], atol=rounding, rtol=rounding)
            torch.testing.assert_close(mixed, expected[1], atol=2e-5, rtol=0)
            torch.testing.assert_close(log_sum.double(), scores.logsumexp(-1), atol=2e-5, rtol=0)

from alltokens.core.kernels import sparse_cross_entropy_triton as kernels
from alltokens.core.kernels.merge_entries import merge_entries
from alltokens.core.kernels.merge_entries_triton import merge_entries_triton
from alltokens.core.kernels.sparse_cross_entropy import _backward_plain, _forward_plain, _mass
kernels.CLASSES_AT_ONCE, kernels.ENTRIES_AT_ONCE = 32, 16
for classes, entries, whole in ((70, 37, 2), (11, 3, 0), (70, 0, 1)):
    logits = 4 * torch.randn(2, 3, classes, generator=generator)
    ids = torch.randint(classes // 2, (2, 3, entries), generator=generator)  # so that many are listed twice
    probabilities = torch.rand(2, 3, entries, generator=generator)
    torch.testing.assert_close(merge_entries_triton(ids, probabilities), merge_entries(ids, probabilities))
    labels, share = torch.rand(2, whole, classes, generator=generator), torch.rand(2, 3, whole, generator=generator)
    rest, upstream = torch.rand(2, 3, generator=generator), torch.randn(2, 3, generator=generator)
    targets = probabilities, rest, _mass(probabilities, rest, labels, share), labels, share
    losses, log_totals = torch.empty_like(rest), torch.empty_like(rest)
    kernels.forward(logits, ids, *targets, losses, log_totals)
    expected = _forward_plain(logits, ids, *targets)
    torch.testing.assert_close((losses, log_totals), expected)
    gradient = torch.empty_like(logits)
    kernels.backward(upstream, logits, ids, *targets, log_totals, gradient)
    torch.testing.assert_close(gradient, _backward_plain(upstream, logits, ids, *targets, expected[1]))
"""


def test_the_triton_kernels_equal_their_twins_when_interpreted():
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys"), [(197, 197), (49, 49), (64, 64), (3136, 49), (4096, 4096)])
@pytest.mark.parametrize("channels", [24, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("biased", [None, "one", "each"])
def test_attention_with_share_is_fused_attention_and_the_op_on_a_gpu(dtype, queries, keys, channels, biased):
    generator = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn(2, queries + keys, 3, 2, channels, generator=generator, device="cuda").to(dtype)
    query, key, value = wide.permute(2, 0, 3, 1, 4)
    leaves = [part.requires_grad_() for part in (query[:, :, :queries], key[:, :, queries:], value[:, :, queries:])]
    bias, scale = None, channels**-0.5
    if biased is not None:  # one for all of a batch, or one for each
        bias = torch.randn(1 if biased == "one" else 2, 2, queries, keys, generator=generator, device="cuda")
        leaves.append(bias.to(dtype).requires_grad_())
        bias = aligned_bias(leaves[3], query)
    share = torch.rand(2, keys, generator=generator, device="cuda")
    weight = torch.randn(2, 2, queries, channels, generator=generator, device="cuda").to(dtype)
    assert can_carry(*leaves)
    attended, mixed, _ = attention_with_share(*leaves[:3], share, scale, bias)
    plain = align.attention_share(leaves[0].detach(), leaves[1].detach(), share, scale, *leaves[3:])
    torch.testing.assert_close(mixed, plain, atol=2e-5, rtol=0)
    found = (attended, *torch.autograd.grad((attended * weight).sum(), leaves))
    fused = F.scaled_dot_product_attention(*leaves)
    fused = (fused, *torch.autograd.grad((fused * weight).sum(), leaves))
    exact_leaves = [part.detach().double().requires_grad_() for part in leaves]
    exact = F.scaled_dot_product_attention(*exact_leaves)
    exact = (exact, *torch.autograd.grad((exact * weight.double()).sum(), exact_leaves))
    for ours, theirs, true in zip(found, fused, exact, strict=True):  # as near to the truth as PyTorch's own
        assert (ours.double() - true).abs().max() <= 1.5 * (theirs.double() - true).abs().max() + 1e-6


@pytest.mark.parametrize("entries", [1, 2, 9])
def test_entries_of_one_class_are_added_up_in_the_first_of_them(entries):
    generator = torch.Generator().manual_seed(entries)
    ids = torch.randint(3, (4, 5, entries), generator=generator)
    values = torch.rand(4, 5, entries, generator=generator, dtype=torch.float64)
    merged = merge_entries(ids, values)
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    first = same.to(torch.float64).argmax(-1) == torch.arange(entries)
    torch.testing.assert_close(merged, (same * values.unsqueeze(-2)).sum(-1) * first)
    torch.library.opcheck(merge_entries, (ids, values))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("classes", "entries", "whole"), [(1000, 90, 0), (21843, 45, 2), (10, 5, 1), (1000, 0, 1)])
def test_the_sparse_loss_equals_its_twin_on_a_gpu(dtype, classes, entries, whole):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 50, classes, generator=generator)).to(dtype)
    ids = torch.randint(classes, (3, 50, entries), generator=generator)
    probabilities = torch.rand(3, 50, entries, generator=generator)
    rest = torch.rand(3, 50, generator=generator)
    common = torch.rand(3, whole, classes, generator=generator), torch.rand(3, 50, whole, generator=generator)
    upstream = torch.randn(3, 50, generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device).requires_grad_()
        targets = (tensor.to(device) for tensor in (ids, probabilities, rest))
        losses = sparse_cross_entropy(leaf, *targets, tuple(tensor.to(device) for tensor in common))
        gradient = torch.autograd.grad(losses, leaf, upstream.to(device))[0]
        merged = merge_entries(ids.to(device), probabilities.to(device))
        found.append((losses.detach().cpu(), gradient.float().cpu(), merged.cpu()))
    exactness = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
    torch.testing.assert_close(found[1], found[0], **exactness)
