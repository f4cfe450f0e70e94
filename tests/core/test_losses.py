"""Targets and the soft cross-entropy, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

import alltokens as at


def test_smooth_one_hot():
    target = at.smooth_one_hot(torch.tensor([2, 0]), 4, 0.2)
    torch.testing.assert_close(target, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))
    assert at.smooth_one_hot(torch.zeros(2, 3, dtype=torch.int64), 4).shape == (2, 3, 4)


def test_soft_cross_entropy_is_torchs_own():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(5, (6,), generator=generator)
    ours = at.soft_cross_entropy(logits, at.smooth_one_hot(labels, 5, 0.1).double())
    torch.testing.assert_close(ours, F.cross_entropy(logits, labels, label_smoothing=0.1), atol=1e-7, rtol=1e-6)
    (gradient,) = torch.autograd.grad(ours, logits)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, labels, label_smoothing=0.1), logits)
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-5)


def test_the_loss_is_float32_for_half_precision_logits():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = at.smooth_one_hot(torch.arange(4), 9)
    loss = at.soft_cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, at.soft_cross_entropy(logits.float(), targets))


def test_blend_per_picture_and_per_token():
    targets = torch.eye(3)
    partner = torch.tensor([2, 1, 0])
    blended = at.blend_targets(targets, partner, torch.tensor([0.25, 0.5, 1.0]))
    assert blended.tolist() == [[0.75, 0, 0.25], [0, 1, 0], [1, 0, 0]]
    shares = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.25, 0.75]])
    per_token = at.blend_targets(targets, partner, shares)
    assert per_token.shape == (3, 2, 3)
    assert per_token[2].tolist() == [[0.25, 0, 0.75], [0.75, 0, 0.25]]
    dense = targets[:, None, :].expand(3, 2, 3)
    assert torch.equal(at.blend_targets(dense, partner, shares), per_token)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_blend_is_exact_at_the_limits(share):
    targets = at.smooth_one_hot(torch.tensor([0, 3]), 7, 0.1)
    partner = torch.tensor([1, 0])
    expected = targets if share == 0 else targets[partner]
    assert torch.equal(at.blend_targets(targets, partner, torch.full((2,), share)), expected)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(at.UserError, match="do not fit"):
        at.blend_targets(torch.zeros(2, 3, 4), torch.arange(2), torch.zeros(2))
    with pytest.raises(at.UserError, match="same shape"):
        at.soft_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(at.UserError, match="smoothing"):
        at.smooth_one_hot(torch.zeros(2, dtype=torch.int64), 4, 1.0)
