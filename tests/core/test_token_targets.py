"""Labels of tokens, mixed and followed, against the same written out in full; and against the K-wide transport."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alltokens.core.plan import MixPlan, flipped_partner
from alltokens.core.token_targets import TokenTargets
from alltokens.errors import UserError

GRID, CLASSES = (3, 4), 6


def random_targets(batch: int = 3, seed: int = 0, weight: Tensor | None = None) -> TokenTargets:
    """Labels that sum to 1, two entries each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = GRID[0] * GRID[1]
    shares = torch.rand(batch, tokens, 3, generator=generator, dtype=torch.float64).softmax(-1)
    ids = torch.rand(batch, tokens, CLASSES, generator=generator).topk(2, -1).indices
    weight = torch.ones(batch, tokens, dtype=torch.float64) if weight is None else weight
    return TokenTargets(ids, shares[..., :2], shares[..., 2] / CLASSES, weight, GRID)


def box_plan(batch: int = 3) -> MixPlan:
    """A box whose edge splits tokens: 12 x 16 pixels, tokens of 4 x 4."""
    return MixPlan.from_box(flipped_partner(batch), (2, 10, 4, 11), (12, 16))


def random_shares(batch: int = 3) -> Tensor:
    return torch.rand(batch, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def by_the_rule(targets: TokenTargets, plan: MixPlan, shares: Tensor) -> Tensor:
    """(B, N, K), token by token: a visible picture gives its label there, a hidden one its visible mean."""
    dense = targets.dense(CLASSES)
    visible = plan.token_share(GRID).flatten(1).double()
    result = torch.zeros_like(dense)
    for sample in range(len(dense)):
        other = int(plan.partner[sample])
        own_mean = ((1 - visible[sample])[:, None] * dense[sample]).sum(0) / (1 - visible[sample]).sum()
        partner_mean = (visible[sample][:, None] * dense[other]).sum(0) / visible[sample].sum()
        for token in range(dense.shape[1]):
            own = dense[sample, token] if visible[sample, token] < 1 else own_mean
            partner = dense[other, token] if visible[sample, token] > 0 else partner_mean
            result[sample, token] = (1 - shares[sample, token]) * own + shares[sample, token] * partner
    return result


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_followed_labels_are_those_of_the_rule(batch):
    targets, plan, shares = random_targets(batch), box_plan(batch), random_shares(batch)
    followed = targets.follow(plan, shares, CLASSES)
    torch.testing.assert_close(followed.dense(CLASSES), by_the_rule(targets, plan, shares))
    torch.testing.assert_close(followed.dense(CLASSES).sum(-1), torch.ones(batch, 12, dtype=torch.float64))
    assert torch.equal(followed.weight, torch.ones(batch, 12, dtype=torch.float64))


def test_tokens_that_did_not_move_keep_their_pasted_labels():
    targets, plan = random_targets(), box_plan()
    followed = targets.follow(plan, plan.token_share(GRID).flatten(1), CLASSES)
    torch.testing.assert_close(followed.dense(CLASSES), targets.mix(plan).dense(CLASSES))


@pytest.mark.parametrize("box", [(0, 0, 0, 0), (0, 12, 0, 16)])
def test_without_a_mix_and_in_a_full_swap_only_one_picture_speaks(box):
    """Where one picture is nowhere visible it has no label at all, whatever share of it is claimed."""
    targets, plan = random_targets(), MixPlan.from_box(flipped_partner(3), box, (12, 16))
    expected = targets.dense(CLASSES)
    expected = expected[plan.partner] if box[1] else expected
    torch.testing.assert_close(targets.follow(plan, random_shares(), CLASSES).dense(CLASSES), expected)


def test_one_label_for_all_places_follows_the_share_alone():
    """With one label a picture the transport is rank one: the rule is then exact."""
    labels = torch.rand(3, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(-1)
    targets, plan, shares = TokenTargets.of_pictures(labels, GRID), box_plan(), random_shares()
    expected = torch.lerp(labels[:, None], labels[plan.partner][:, None], shares.unsqueeze(-1))
    torch.testing.assert_close(targets.follow(plan, shares, CLASSES).dense(CLASSES), expected)
    pasted = plan.token_share(GRID).flatten(1).double().unsqueeze(-1)
    torch.testing.assert_close(
        targets.mix(plan).dense(CLASSES), torch.lerp(labels[:, None], labels[plan.partner][:, None], pasted)
    )


def test_what_has_no_label_says_nothing():
    """A token outside its picture has no label of its own; a mean is that of labelled places only."""
    weight = torch.ones(2, 12, dtype=torch.float64)
    weight[0, ::2] = 0
    targets = random_targets(2, weight=weight)
    plan, shares = MixPlan.from_box(flipped_partner(2), (0, 12, 0, 8), (12, 16)), random_shares(2)
    followed = targets.follow(plan, shares, CLASSES)
    visible = plan.token_share(GRID).flatten(1).double()
    dense, got = targets.dense(CLASSES), followed.dense(CLASSES)
    for token in range(12):
        mean = (visible[0] * weight[1])[:, None] * dense[1]
        partner = dense[1, token] if visible[0, token] > 0 else mean.sum(0) / visible[0].sum()
        if weight[0, token] == 0 and visible[0, token] == 0:
            torch.testing.assert_close(got[0, token], partner)  # only the other one has something to say
            torch.testing.assert_close(followed.weight[0, token], shares[0, token])
    hidden = random_targets(2, weight=torch.zeros(2, 12, dtype=torch.float64)).follow(plan, shares, CLASSES)
    assert torch.equal(hidden.weight, torch.zeros(2, 12, dtype=torch.float64))
    assert torch.isfinite(hidden.dense(CLASSES)).all()


def test_labels_can_be_followed_twice():
    """Labels in common are carried on by a second mix."""
    targets, plan, shares = random_targets(), box_plan(), random_shares()
    once = targets.follow(plan, shares, CLASSES)
    full = once.dense(CLASSES)
    pasted = plan.token_share(GRID).flatten(1).double().unsqueeze(-1)
    torch.testing.assert_close(once.mix(plan).dense(CLASSES), torch.lerp(full, full[plan.partner], pasted))
    torch.testing.assert_close(once.follow(plan, shares, CLASSES).dense(CLASSES), by_the_rule(once, plan, shares))


def test_the_distance_to_the_transport_of_whole_labels_is_in_the_hidden_picture_alone():
    """The oracle: labels of K classes carried by the attention that made the shares (see docs/token_labels.md).

    Both give each picture the same total, the token's share; only how it spreads over classes can differ.
    """
    generator = torch.Generator().manual_seed(5)
    targets, plan = random_targets(), box_plan()
    attention = torch.rand(3, 12, 12, generator=generator, dtype=torch.float64).softmax(-1)
    attention = (attention + torch.eye(12, dtype=torch.float64)) / 2
    visible = plan.token_share(GRID).flatten(1).double()
    shares = (attention @ visible.unsqueeze(-1)).squeeze(-1)
    transported = attention @ targets.mix(plan).dense(CLASSES)
    ruled = targets.follow(plan, shares, CLASSES).dense(CLASSES)
    torch.testing.assert_close(transported.sum(-1), ruled.sum(-1))
    distance = (transported - ruled).abs().sum(-1) / 2
    assert 0 < distance.max() < 1
    still = targets.follow(plan, visible, CLASSES).dense(CLASSES)
    torch.testing.assert_close(still, targets.mix(plan).dense(CLASSES))  # identity attention: no distance


def test_inputs_stay_and_wrong_ones_are_refused():
    targets, plan, shares = random_targets(), box_plan(), random_shares()
    before = [tensor.clone() for tensor in (*targets[:4], shares)]
    targets.follow(plan, shares, CLASSES)
    assert all(torch.equal(was, now) for was, now in zip(before, (*targets[:4], shares), strict=True))
    with pytest.raises(UserError, match="cannot follow the shares"):
        targets.follow(plan, shares[:, :4], CLASSES)
    with pytest.raises(UserError, match="a plan for 2 pictures"):
        targets.mix(box_plan(2))


def test_compiled_is_eager():
    targets, plan, shares = random_targets(), box_plan(), random_shares()

    def run(targets: TokenTargets, shares: Tensor) -> Tensor:
        return targets.follow(plan, shares, CLASSES).dense(CLASSES)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(targets, shares), run(targets, shares))
