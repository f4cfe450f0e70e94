"""Mixing ratios, presence and the distance of aligned labels, against plain re-computations."""

import copy
import math

import pytest
import torch

import alltokens as at
from alltokens.explain import alignment_error, mixing_ratios, token_presence
from alltokens.explain.fluctuation import similarity_share
from tests.explain.test_maps import swin, vit


@pytest.fixture
def images():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def plan():
    return at.MixPlan.from_box(torch.tensor([1, 2, 3, 0]), (0, 8, 2, 14), (16, 16))


def weights_of(model, images):
    """The attention of every block, heads averaged, by hooks on unfused code of a copy."""
    seen = []
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "attn_drop"):
            module.fused_attn = False
            module.attn_drop.register_forward_pre_hook(lambda _, given: seen.append(given[0].mean(1)))
    with torch.no_grad():
        twin(images)
    return seen


def test_ratios_of_a_vit(images, plan):
    model = vit()
    ratios = mixing_ratios(model, images, plan)
    assert list(ratios) == ["area", "token labeling", "TransMix", "TL-Align", "similarity"]
    assert {tuple(ratio.shape) for ratio in ratios.values()} == {(4, 4)}  # the input and three layers, four pictures
    assert (ratios["area"] == 96 / 256).all()
    # Of 4 x 4 patches, columns 0 and 3 of the upper half show the partner to exactly a half: not most of the patch.
    assert (ratios["token labeling"] == 4 / 16).all()
    mixed = at.mix_images(images, plan)
    aligner = at.TLAlign(model, layer_shares=True)
    with aligner.follow(plan), torch.no_grad():
        model(mixed)
    expected = torch.stack([plan.share, *[layer.share for layer in aligner.layer_shares]])
    torch.testing.assert_close(ratios["TL-Align"], expected)
    assert (ratios["TL-Align"][3] - ratios["TL-Align"][0]).abs().max() > 1e-3
    aligner.detach()
    follower = at.TransMix(model)
    with follower.follow(plan), torch.no_grad():
        model(mixed)
    torch.testing.assert_close(ratios["TransMix"], follower.share.expand(4, -1))
    follower.detach()


def test_similarity_is_the_supplements_equation(images, plan):
    model = vit()
    found = mixing_ratios(model, images, plan)["similarity"]
    assert found[0].isnan().all()
    tokens = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, given, came, number=number: tokens.setdefault(number, []).append(came))
    with torch.no_grad():
        for batch in (images, at.mix_images(images, plan)):
            model(batch)
    for number, (alone, both) in tokens.items():
        for sample in range(4):
            best = []
            for other in (sample, int(plan.partner[sample])):
                cosines = torch.cosine_similarity(both[sample, 0][None], alone[other])
                best.append(max(cosines.tolist()))
            share = math.exp(best[1]) / (math.exp(best[0]) + math.exp(best[1]))
            assert found[number + 1, sample] == pytest.approx(share, abs=1e-5)


def test_similarity_of_what_is_not_mixed():
    tokens = torch.randn(2, 5, 8)
    torch.testing.assert_close(similarity_share(tokens, tokens, tokens, True), torch.full((2,), 0.5))
    own = similarity_share(tokens, tokens, -tokens.abs(), class_token=False)
    assert (own < 0.5).all()


def test_ratios_of_a_swin_are_means_over_its_tokens():
    model = swin()
    images = torch.randn(2, 3, 40, 40)
    plan = at.MixPlan.from_box(torch.tensor([1, 0]), (0, 20, 0, 40), (40, 40))
    ratios = mixing_ratios(model, images, plan)
    assert list(ratios) == ["area", "token labeling", "TL-Align", "similarity"]  # no class token: no TransMix
    assert ratios["TL-Align"].shape == (5, 2)
    torch.testing.assert_close(ratios["TL-Align"][0], torch.full((2,), 0.5))
    assert ratios["similarity"][1:].isfinite().all()


def test_mixup_does_not_fluctuate(images):
    plan = at.MixPlan(torch.tensor([1, 2, 3, 0]), torch.full((1, 16, 16), 0.3))
    ratios = mixing_ratios(vit(), images, plan)
    torch.testing.assert_close(ratios["TL-Align"], torch.full((4, 4), 0.3))


def test_presence_is_the_column_sum_of_attention(images):
    model = vit(reg_tokens=1)
    found = token_presence(model, images)
    assert len(found) == 3
    for presence, weights in zip(found, weights_of(model, images), strict=True):
        columns = weights.sum(1)  # (B, 18): weight of each token over all outputs; rows sum to 1
        torch.testing.assert_close(presence.flatten(1), columns[:, 2:])
    # With every token counted it is 1 on average; alone the patches may have more or less.
    assert columns.mean() == pytest.approx(1, abs=1e-5)


def test_presence_in_a_swin_stays_within_windows():
    """40 px are 10 x 10 patches in windows of 4: those of a window share the weight of that window's queries."""
    model = swin()
    images = torch.randn(1, 3, 40, 40)
    found = token_presence(model, images)
    assert [tuple(presence.shape) for presence in found] == [(1, 10, 10)] * 2 + [(1, 5, 5)] * 2
    first = found[0][0]
    assert first.sum() == pytest.approx(100, rel=1e-4)
    assert first[:4, :4].sum() == pytest.approx(16, rel=1e-4)
    assert first[8:, 8:].sum() == pytest.approx(4, rel=1e-4)  # padding takes and gives nothing
    weights = weights_of(model, images)[0]  # (windows, S, S); the first window is whole
    torch.testing.assert_close(first[:4, :4].flatten(), weights[0].sum(0))


def test_alignment_error_is_the_root_mean_square_over_all_mixes(images):
    model = vit()

    def draw(count, generator):
        return at.draw_cutmix(count, 16, per_sample=True, generator=generator)

    error = alignment_error(model, [images[:3], images[3:]], draw, draws=2, seed=7)
    aligner, expected = at.TLAlign(model), []
    for seed in (7, 8):
        generator, squares = torch.Generator().manual_seed(seed), []
        for batch in (images[:3], images[3:]):
            plan = draw(len(batch), generator)
            with aligner.follow(plan), torch.no_grad():
                model(at.mix_images(batch, plan))
            squares += ((aligner.share - plan.share) ** 2).tolist()
        expected.append(math.sqrt(sum(squares) / 4))
    assert error.rmse == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert error.spread == pytest.approx(abs(expected[0] - expected[1]) / math.sqrt(2), rel=1e-4)
    assert error[2:] == (4, 2)
    assert error.rmse > 1e-3


def test_mistakes_are_named(images, plan):
    with pytest.raises(at.UserError, match="0 batches"):
        alignment_error(vit(), [], lambda count, generator: plan)
    with pytest.raises(at.UserError, match="0 draws"):
        alignment_error(vit(), [images], lambda count, generator: plan, draws=0)
    with pytest.raises(at.UnsupportedModel):
        mixing_ratios(torch.nn.Linear(2, 2), images, plan)
