"""TransMix against explicit class attention, and Area, which follows nothing."""

from __future__ import annotations

import pytest
import torch

import alltokens as at
from alltokens.follow.area import Area
from alltokens.follow.transmix import TransMix
from tests.follow.oracle import attention_matrices
from tests.follow.test_families import CASES, mixed_batch, sharp


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["vit", "vit_registers", "vit_parallel_scaling", "eva", "cait"])
def test_the_share_is_the_mean_of_area_and_attended_area(name, fused):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float64), mixed_batch(size, torch.float64)
    attention = attention_matrices(model, images)[-1].mean(1)[:, 0, -16:]  # (B, N): to the patches
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    patches = plan.token_share((4, 4)).flatten(1).double()
    follower = TransMix(model)
    with follower.follow(plan):
        model(images)
    expected = (plan.share + (attention * patches).sum(1) / attention.sum(1)) / 2
    torch.testing.assert_close(follower.share, expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(follower.token_shares, patches.float())
    assert (follower.share - plan.share).abs().max() > 1e-3


def test_pvt_attends_to_the_patches_of_its_last_grid():
    build, size, _ = CASES["pvt"]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    follower = TransMix(model)
    with follower.follow(plan):
        model(images)
    assert follower.token_shares.shape == (3, 2)
    low, high = follower.token_shares.min(1).values, follower.token_shares.max(1).values
    assert ((plan.share + low) / 2 <= follower.share).all()
    assert (follower.share <= (plan.share + high) / 2).all()


def test_mixup_is_a_fixed_point_and_official_masks_take_the_top_left_pixel():
    model = sharp(CASES["vit"][0], torch.float32)
    images, _ = mixed_batch((32, 32), torch.float32)
    mixup = at.draw_mixup(3, 32, generator=torch.Generator().manual_seed(0))
    inside_a_patch = at.MixPlan.from_box(torch.tensor([2, 1, 0]), (9, 15, 9, 15), (32, 32))  # misses its top-left pixel
    follower = TransMix(model, official=True)
    with follower.follow(mixup):
        model(images)
    torch.testing.assert_close(follower.share, mixup.share)
    with follower.follow(inside_a_patch):
        model(images)
    torch.testing.assert_close(follower.share, inside_a_patch.share / 2)


@pytest.mark.parametrize("name", ["vit_average", "vit_map", "deit_distilled", "swin", "mixer"])
def test_models_that_classify_no_class_token_are_refused(name):
    with pytest.raises(at.UnsupportedModel, match="class token that is classified"):
        TransMix(sharp(CASES[name][0], torch.float32))


def test_detach_leaves_the_model_as_before():
    model = sharp(CASES["vit"][0], torch.float32)
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    follower = TransMix(model)
    follower.detach()
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes


def test_area_gives_the_plans_own_shares():
    _, plan = mixed_batch((32, 32), torch.float32)
    area = Area(grid=(4, 4))
    with pytest.raises(at.UserError, match="no batch has been followed"):
        _ = area.share
    with area.follow(plan):
        pass
    assert torch.equal(area.share, plan.share)
    assert torch.equal(area.token_shares, plan.token_share((4, 4)).flatten(1))
    area.detach()
    blind = Area()
    with blind.follow(plan):
        pass
    with pytest.raises(at.UserError, match="grid"):
        _ = blind.token_shares
    with area.follow(plan), pytest.raises(at.UserError, match="already"), area.follow(plan):
        pass
