"""The published programs' own numbers (tests/golden, FACTS sections 3 and 4)."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch

import alltokens as at
from alltokens.follow.route import Moment
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix, _class_attention
from tests.golden_rules import golden_arrays, golden_input, golden_json, golden_weights, official_tl_align_box

EXACT = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def deit():
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    model.load_state_dict(golden_weights(golden_json("deit_tiny_state_dict.json")["deit_tiny_c10"]))
    return model.eval()


@pytest.fixture(scope="module")
def images():
    return golden_input(200, (4, 3, 224, 224))


def box_plan(box, patch: int) -> at.MixPlan:
    top, bottom, left, right = (int(edge) * patch for edge in box)
    return at.MixPlan.from_box(torch.arange(3, -1, -1), (top, bottom, left, right), (224, 224))


def test_tl_align_gives_the_published_targets_per_layer_and_the_published_gradients(deit, images):
    golden = golden_arrays("tlalign_deit_tiny.npz")
    plan = box_plan(golden["box"], patch=16)
    mixed = at.mix_images(images, plan)
    np.testing.assert_allclose(mixed.sum((1, 2, 3)), golden["x_mixed_sum"], rtol=1e-4, atol=2e-2)
    aligner = TLAlign(deit, layer_shares=True)
    try:
        with aligner.follow(plan):
            logits = deit(mixed)
        one_hot = at.smooth_one_hot(torch.as_tensor(golden["target"]), 10, 0.1)
        targets = at.blend_targets(one_hot, plan.partner, aligner.share)
        np.testing.assert_allclose(logits.detach(), golden["logits"], **EXACT)
        np.testing.assert_allclose(targets, golden["aligned_cls"], **EXACT)
        for layer, shares in enumerate(aligner.layer_shares):
            cls = at.blend_targets(one_hot, plan.partner, shares.share)
            patches = at.blend_targets(one_hot, plan.partner, shares.token_shares)
            np.testing.assert_allclose(cls, golden["per_layer_cls"][layer], **EXACT)
            np.testing.assert_allclose(patches[0], golden["per_layer_sample0"][layer][1:], **EXACT)
        final = at.blend_targets(one_hot, plan.partner, aligner.token_shares)
        np.testing.assert_allclose(final, golden["final_all_tokens"][:, 1:], **EXACT)
        loss = at.soft_cross_entropy(logits, targets)
        np.testing.assert_allclose(loss.item(), golden["loss"], **EXACT)
        deit.zero_grad()
        loss.backward()
        np.testing.assert_allclose(deit.head.weight.grad, golden["grad_head_weight"], **EXACT)
        np.testing.assert_allclose(deit.cls_token.grad, golden["grad_cls_token"], **EXACT)
    finally:
        aligner.detach()


def test_transmix_gives_the_published_target_end_to_end(deit, images):
    golden = golden_arrays("transmix.npz")
    box = golden["e2e_box"]
    plan = box_plan(box, patch=1)
    follower = TransMix(deit, official=True)
    try:
        with torch.no_grad(), follower.follow(plan):
            deit(at.mix_images(images, plan))
    finally:
        follower.detach()
    one_hot = at.smooth_one_hot(torch.as_tensor(golden["e2e_target"]), 10, 0.1)
    area = at.blend_targets(one_hot, plan.partner, plan.share)
    np.testing.assert_allclose(area, golden["e2e_area_target"], **EXACT)
    np.testing.assert_allclose(at.blend_targets(one_hot, plan.partner, follower.share), golden["e2e_out"], **EXACT)


@pytest.mark.parametrize("case", range(5))
def test_transmix_weighs_a_given_attention_as_published(case):
    """Boxes in pixels, some splitting patches, against published targets made from one table of attention."""
    golden = golden_arrays("transmix.npz")
    attention = torch.as_tensor(golden["attn"])  # (B, N), rows do not sum to 1
    plan = box_plan(golden[f"{case}_box"], patch=1)
    nearest = plan.mask[:, ::16, ::16].flatten(1).expand_as(attention)  # each patch's top left pixel

    def attend(share, valid=None, queries=None):
        return (attention * share).sum(1, keepdim=True)

    weighed = _class_attention(prefix=0)(Moment(nearest, attend, plan.share))[:, 0]
    own, partner = torch.as_tensor(golden["y1"]), torch.as_tensor(golden["y2"])
    np.testing.assert_allclose(torch.lerp(own, partner, plan.share[:, None]), golden[f"{case}_area_target"], **EXACT)
    share = (plan.share + weighed) / 2
    np.testing.assert_allclose(torch.lerp(own, partner, share[:, None]), golden[f"{case}_out"], **EXACT)


def test_official_boxes_are_drawn_and_their_plans_have_the_published_share():
    for seed, drawn, *box, own_share in golden_arrays("tlalign_boxes.npz")["rows"]:
        official_drawn, official_box = official_tl_align_box(int(seed))
        np.testing.assert_allclose(official_drawn, drawn, rtol=1e-6)
        assert official_box == tuple(int(edge) for edge in box)
        np.testing.assert_allclose(1 - box_plan(official_box, patch=16).share, own_share, atol=1e-6)
