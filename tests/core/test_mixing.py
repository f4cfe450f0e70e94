"""The mixers, pixel by pixel, and the contract that every drawing function keeps."""

import numpy as np
import pytest
import torch

import alltokens as at

DRAWS = {
    "mixup": lambda b, **k: at.draw_mixup(b, (16, 24), 0.8, **k),
    "cutmix": lambda b, **k: at.draw_cutmix(b, (16, 24), 1.0, **k),
    "cutmix snapped": lambda b, **k: at.draw_cutmix(b, (16, 24), 1.0, patch_size=4, **k),
    "random": lambda b, **k: at.draw_random_mix(b, (16, 24), 1.0, patch_size=4, **k),
    "block": lambda b, **k: at.draw_block_mix(b, (16, 24), 1.0, patch_size=4, min_patches=3, **k),
    "mixtoken": lambda b, **k: at.draw_mixtoken(b, (16, 24), 1.0, patch_size=4, **k),
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_draw
@pytest.mark.parametrize("per_sample", [False, True])
def test_every_pixel_is_own_and_partner_in_the_stated_share(draw, per_sample):
    """Own picture all 0, partner all 1 (by pairs): the mixed picture is the mask, its mean the stated share."""
    for seed in range(20):
        plan = draw(4, per_sample=per_sample, generator=seeded(seed))
        if plan.place == "embedding":
            plan = at.MixPlan(plan.partner, plan.mask)
        images = torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None, None, None].expand(4, 3, 16, 24)
        mixed = at.mix_images(images, plan)
        mask = plan.mask.expand(4, 16, 24)
        for sample in range(4):
            partner_seen = mixed[sample, 0] if sample < 2 else 1 - mixed[sample, 0]
            torch.testing.assert_close(partner_seen, mask[sample])
            torch.testing.assert_close(partner_seen.mean(), plan.share[sample])
        assert plan.mask.shape == (4 if per_sample else 1, 16, 24)


@every_draw
def test_the_same_generator_gives_the_same_plan_and_another_seed_another(draw):
    same = [draw(4, generator=seeded(7)).mask for _ in range(2)]
    assert torch.equal(*same)
    assert len({draw(4, generator=seeded(s)).share[0].item() for s in range(40)}) > 6


@every_draw
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_batch_even_or_odd(draw, batch):
    plan = draw(batch, per_sample=True, generator=seeded())
    assert plan.partner.tolist() == list(range(batch - 1, -1, -1))
    assert 0 <= plan.mask.min() <= plan.mask.max() <= 1


@pytest.mark.parametrize("name", ["cutmix snapped", "random", "block", "mixtoken"])
def test_no_patch_is_split(name):
    for seed in range(20):
        tokens = DRAWS[name](3, per_sample=True, generator=seeded(seed)).token_share((4, 6))
        assert set(tokens.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("name", ["random", "block"])
def test_patches_are_exactly_as_many_as_drawn(name):
    """The number of patches is a rounded Beta(1, 1), so every count from 0 to 24 is about equally likely."""
    plan = DRAWS[name](4000, per_sample=True, generator=seeded(3))
    counts = (plan.share * 24).round().long().bincount(minlength=25)
    assert counts.sum() == 4000
    inner = counts[1:24].float()
    assert (inner - 4000 / 24).abs().max() < 5 * (4000 / 24) ** 0.5


def test_shares_follow_the_beta_distribution():
    shares = at.draw_mixup(5000, 4, 0.4, per_sample=True, generator=seeded(1)).share
    assert abs(shares.mean() - 0.5) < 0.02
    assert abs(shares.var() - 1 / (4 * (2 * 0.4 + 1))) < 0.01  # the variance of Beta(a, a)


def test_cutmix_boxes_lie_anywhere_and_are_clipped_at_the_edges():
    plan = at.draw_cutmix(3000, 16, per_sample=True, generator=seeded(2))
    covered = plan.mask.mean(0)
    assert covered.min() > 0.1  # every pixel is pasted now and then
    assert covered[8, 8] > covered[0, 0]  # clipping makes the middle likelier
    rectangle = plan.mask.amax(2)[:, :, None] * plan.mask.amax(1)[:, None, :]
    assert torch.equal(rectangle, plan.mask)  # each mask is one box


@pytest.mark.parametrize("name", ["tlalign_boxes", "mixtoken_boxes"])
def test_a_published_box_as_a_plan_has_the_published_share(name):
    """Boxes drawn by the published programs on 14 x 14 patches; the share they keep is one minus ours."""
    for row in np.load(f"tests/golden/{name}.npz")["rows"]:
        edges = row[2:6] if name == "tlalign_boxes" else row[[2, 4, 3, 5]]
        top, bottom, left, right = (16 * int(edge) for edge in edges)
        plan = at.MixPlan.from_box(torch.arange(1), (top, bottom, left, right), (224, 224))
        area = (bottom - top) * (right - left) / 224**2
        assert abs(plan.share.item() - area) < 1e-6
        if name == "tlalign_boxes":
            assert abs(plan.share.item() - (1 - row[6])) < 1e-6


def test_snapped_boxes_have_odd_and_even_sides_of_the_drawn_area():
    plan = at.draw_cutmix(4000, 14, patch_size=1, per_sample=True, generator=seeded(4))
    heights = plan.mask.amax(2).sum(1).long().bincount(minlength=15)
    assert heights.min() > 0
    middle = heights[3:12].float()
    assert (middle[1:] / middle[:-1]).min() > 0.7  # smooth: no length is skipped


def test_mixing_changes_no_input_and_is_exact_where_the_mask_is():
    images = torch.randn(4, 3, 16, 16, generator=seeded())
    before = images.clone()
    plan = at.draw_cutmix(4, 16, generator=seeded(5))
    mixed = at.mix_images(images, plan)
    assert torch.equal(images, before)
    assert torch.equal(mixed, torch.where(plan.mask[:, None] == 1, images.flip(0), images))
    assert torch.equal(at.mix_images(images, at.MixPlan.identity(4, (16, 16))), images)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_pictures_keep_their_type(dtype):
    images = torch.rand(2, 3, 8, 8, generator=seeded()).to(dtype)
    mixed = at.mix_images(images, at.draw_mixup(2, 8, generator=seeded()))
    assert mixed.dtype == dtype
    exact = at.mix_images(images.double(), at.draw_mixup(2, 8, generator=seeded()))
    torch.testing.assert_close(mixed.double(), exact, atol=0.02, rtol=0)


def test_mixing_passes_gradients_by_share():
    images = torch.zeros(2, 1, 4, 4, requires_grad=True)
    plan = at.MixPlan.from_box(torch.tensor([1, 0]), (0, 2, 0, 4), (4, 4))
    at.mix_images(images, plan)[0].sum().backward()
    assert torch.equal(images.grad[1, 0], plan.mask[0])
    assert torch.equal(images.grad[0, 0], 1 - plan.mask[0])


def test_mixing_compiles():
    plan = at.draw_cutmix(4, 8, generator=seeded())
    images = torch.randn(4, 3, 8, 8, generator=seeded())
    compiled = torch.compile(lambda x: at.mix_images(x, plan), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(images), at.mix_images(images, plan))


def test_wrong_use_is_refused():
    images = torch.zeros(4, 3, 16, 24)
    with pytest.raises(at.UserError, match="patch embedding"):
        at.mix_images(images, DRAWS["mixtoken"](4))
    with pytest.raises(at.UserError, match="cannot mix"):
        at.mix_images(images[:2], DRAWS["mixup"](4))
    with pytest.raises(at.UserError, match="alpha must be above 0"):
        at.draw_mixup(4, 8, 0.0)
    with pytest.raises(at.UserError, match="do not divide"):
        at.draw_random_mix(4, 10, patch_size=4)
