"""MixPlan: shares of pixels, tokens and pictures agree, and plans compose."""

import pytest
import torch

import alltokens as at
from alltokens.core.plan import flipped_partner


def plan_of(mask: torch.Tensor, batch: int = 2) -> at.MixPlan:
    return at.MixPlan(flipped_partner(batch), mask)


def test_a_box_is_the_partner_inside_and_own_outside():
    plan = at.MixPlan.from_box(flipped_partner(3), (1, 3, 2, 5), (4, 6))
    expected = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    assert torch.equal(plan.mask, expected.float()[None])
    assert torch.equal(plan.share, torch.full((3,), 6 / 24))


def test_boxes_per_sample():
    boxes = torch.tensor([[0, 2, 0, 2], [1, 1, 0, 4], [0, 4, 0, 4]])
    plan = at.MixPlan.from_box(flipped_partner(3), boxes, (4, 4))
    assert plan.share.tolist() == [4 / 16, 0, 1]


def test_a_split_token_gets_its_exact_ratio():
    # A box of rows 0..5 of 8, in a grid of 2 x 2 tokens of 4 pixels: the lower tokens are half partner... 1 row of 4.
    plan = at.MixPlan.from_box(flipped_partner(2), (0, 5, 0, 4), (8, 8))
    assert torch.equal(plan.token_share((2, 2))[0], torch.tensor([[1.0, 0.0], [0.25, 0.0]]))


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (7, 2), (12, 10), (1, 1)])
def test_token_shares_average_to_the_share_on_any_grid(grid):
    mask = torch.rand(3, 12, 10, generator=torch.Generator().manual_seed(1))
    plan = plan_of(mask, batch=3)
    tokens = plan.token_share(grid)
    assert tokens.shape == (3, *grid)
    torch.testing.assert_close(tokens.mean((1, 2)), plan.share)
    assert 0 <= tokens.min() <= tokens.max() <= 1


def test_token_share_on_a_grid_that_divides_is_average_pooling():
    mask = torch.rand(2, 12, 8, generator=torch.Generator().manual_seed(2))
    pooled = torch.nn.functional.avg_pool2d(mask[:, None], (4, 2))[:, 0]
    torch.testing.assert_close(plan_of(mask).token_share((3, 4)), pooled)


def test_then_is_mixing_twice():
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(5, 3, 8, 8, generator=generator)
    first = at.draw_cutmix(5, 8, per_sample=True, generator=generator)
    second = at.draw_mixup(5, 8, 1.0, generator=generator)
    twice = at.mix_images(at.mix_images(images, first), second)
    torch.testing.assert_close(at.mix_images(images, first.then(second)), twice)


def test_then_refuses_other_partners_and_one_way_partners():
    plan = at.draw_cutmix(4, 8)
    with pytest.raises(at.UserError, match="same partners"):
        plan.then(at.MixPlan(torch.arange(4), plan.mask))
    circle = at.MixPlan(torch.arange(4).roll(1), plan.mask)
    with pytest.raises(at.UserError, match="mutual"):
        circle.then(circle)


@pytest.mark.parametrize(
    ("partner", "mask", "message"),
    [
        (torch.zeros(2), torch.zeros(1, 4, 4), "int64"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4, 4), "one per sample"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 4, 4, dtype=torch.int64), "floating point"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(partner, mask, message):
    with pytest.raises(at.UserError, match=message):
        at.MixPlan(partner, mask)
    with pytest.raises(at.UserError, match="place"):
        at.MixPlan(torch.zeros(2, dtype=torch.int64), torch.zeros(1, 4, 4), "nowhere")  # type: ignore[arg-type]
