"""A training step with a dense loss against the same step written out by hand; every combination trains."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import alltokens as at
from alltokens.core import geometry
from alltokens.core.token_loss import token_loss
from alltokens.supervision.embedding import EmbeddingMix
from alltokens.supervision.mixer import MIXERS
from alltokens.supervision.source import SOURCES
from alltokens.supervision.step import FOLLOWERS

CLASSES, SIDE, GRID = 5, 32, (4, 4)


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    small = {"img_size": SIDE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **options})


def lvvit(**options) -> nn.Module:
    torch.manual_seed(0)
    small = {"img_size": SIDE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return timm.create_model("lvvit_t", stem_channels=8, dense=True, **{**small, **options})


@pytest.fixture
def net() -> nn.Module:
    return at.TokenClassifier(vit())


def batch_of(count: int = 3, image_size: tuple[int, int] = (SIDE, SIDE)) -> at.Sample:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, *image_size, generator=generator)
    ids = torch.rand(count, CLASSES, 5, 6, generator=generator).topk(3, 1).indices
    maps = at.LabelMap(ids, 4 * torch.rand(count, 3, 5, 6, generator=generator), torch.randn(count, 5, 6))
    matrix = geometry.compose(geometry.rotate(torch.arange(count) * 20.0), geometry.crop(0.2, 0.1, 0.7, 0.8))
    return at.Sample(images, torch.arange(count) % CLASSES, ["k"] * count, matrix, maps)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sharpen(net: nn.Module) -> nn.Module:
    """Fresh attention is nearly uniform: its share is the area."""
    for name, parameter in net.named_parameters():
        if "attn.qkv.weight" in name:
            parameter.data *= 20
    return net


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("make", [lambda: at.TokenClassifier(vit()), lvvit], ids=["wrapped", "lvvit"])
def test_token_labeling_is_mixed_embeddings_pasted_labels_and_two_losses(make, per_sample):
    net, batch = make().train(), batch_of()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    mixer = at.Mixer("mixtoken", per_sample=per_sample)
    step = at.Supervision(net, "tokens", mixer, dense_weight=0.25, class_weight=2.0, smoothing=0.1)
    loss, parts = step(batch, seeded(2))
    assert parts.plan.place == "embedding"
    share = parts.plan.token_share(GRID).flatten(1)
    assert set(share.unique().tolist()) == {0.0, 1.0}  # whole patches

    bare = getattr(net, "model", net)
    embedding = bare.patch_embed
    plain = embedding.forward
    embedding.forward = lambda images: torch.where(
        share[..., None] > 0, plain(images)[parts.plan.partner], plain(images)
    )
    logits, token_logits = net(batch.image, tokens=True)
    del embedding.forward
    class_targets, token_targets = at.sample_token_labels(batch.maps, batch.matrix, GRID, CLASSES, 0.1)
    mixed = at.blend_targets(class_targets, parts.plan.partner, parts.plan.share)
    pasted = at.blend_targets(token_targets, parts.plan.partner, share)
    weight = at.sample_token_targets(batch.maps, batch.matrix, GRID, CLASSES).weight
    weight = torch.lerp(weight, weight[parts.plan.partner], share)
    expected = 2 * at.soft_cross_entropy(logits, mixed) + 0.25 * token_loss(token_logits, pasted, weight)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts.output, logits)
    torch.testing.assert_close(parts.token_logits, token_logits)
    torch.testing.assert_close(loss, 2 * parts.loss_class + 0.25 * parts.loss_token)


@pytest.mark.parametrize("mixer", ["cutmix", "mixup", "mixtoken"])
def test_with_tl_align_every_token_blends_its_two_labels_by_its_own_share(net, mixer):
    step = at.Supervision(sharpen(net), "tokens", mixer, "tl_align")
    batch = batch_of()
    loss, parts = step(batch, seeded(2))
    own = at.sample_token_targets(batch.maps, batch.matrix, GRID, CLASSES)
    with torch.no_grad(), step.follower.follow(parts.plan):
        if mixer == "mixtoken":
            with step._embedding.mixing(parts.plan):
                net(batch.image)
        else:
            net(at.mix_images(batch.image, parts.plan))
    moved = step.follower.token_shares
    torch.testing.assert_close(parts.token_shares, moved)
    if mixer != "mixup":
        assert (moved - parts.plan.token_share(GRID).flatten(1)).abs().max() > 1e-2
    expected = own.follow(parts.plan, moved, CLASSES)
    torch.testing.assert_close(parts.token_targets.dense(CLASSES), expected.dense(CLASSES))
    torch.testing.assert_close(
        parts.loss_token, token_loss(parts.token_logits, expected.dense(CLASSES), expected.weight)
    )
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("source", "mixer", "follower"),
    list(itertools.product(SOURCES, [*MIXERS, "cutmix on patches", "mixtoken then mixup"], FOLLOWERS)),
)
@pytest.mark.parametrize("dense", [0.0, 0.5])
def test_every_combination_gives_every_parameter_a_gradient(source, mixer, follower, dense):
    net = at.TokenClassifier(vit()) if dense else vit()
    special = {
        "cutmix on patches": at.Mixer("cutmix", patch_size=8),
        "mixtoken then mixup": at.Mixer("mixtoken", then_mixup=1.0),
    }
    step = at.Supervision(net, source, special.get(mixer, mixer), follower, dense_weight=dense, smoothing=0.1)
    loss, parts = step(batch_of(), seeded())
    loss.backward()
    assert torch.isfinite(loss)
    assert (parts.loss_token is None) == (dense == 0)
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in net.parameters())


MODELS = {
    "swin_tiny_patch4_window7_224": {"img_size": 64, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
    "gmixer_12_224": {"img_size": 64},
    "pvt_v2_b0": {},
    "convnext_atto": {"dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1)},
    "resnest14d": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_other_families_are_trained_with_tokens_too(name):
    torch.manual_seed(0)
    net = at.TokenClassifier(timm.create_model(name, num_classes=CLASSES, **MODELS[name]))
    stem = name.startswith(("swin", "gmixer"))
    mixer = "mixtoken" if stem else at.Mixer("mixtoken", patch_size=32)
    if name.startswith("resnest"):
        with pytest.raises(at.UnsupportedModel, match="no patch embedding"):
            at.Supervision(net, "tokens", mixer)
        mixer = "cutmix"
    loss, parts = at.Supervision(net, "tokens", mixer)(batch_of(2, (64, 64)), seeded())
    loss.backward()
    assert torch.isfinite(loss)
    assert parts.token_targets.rest.shape == parts.token_logits.shape[:2]


def test_fine_tuned_on_larger_pictures_the_labels_follow_the_grid(tmp_path):
    """224 -> 384 px, in small: the weights of a 4 x 4 grid go on at 6 x 6, and so do the same label maps."""
    torch.save(lvvit().state_dict(), tmp_path / "small.pth")
    larger = lvvit(img_size=48)
    at.load_weights(larger, tmp_path / "small.pth")
    batch = batch_of(2, (48, 48))
    step = at.Supervision(larger, "tokens", "mixtoken")
    loss, parts = step(batch, seeded())
    loss.backward()
    assert parts.token_logits.shape == (2, 36, CLASSES)
    _, expected = at.sample_token_labels(batch.maps, batch.matrix, (6, 6), CLASSES)
    shares = parts.plan.token_share((6, 6)).flatten(1)
    expected = at.blend_targets(expected, parts.plan.partner, shares)
    torch.testing.assert_close(parts.token_targets.dense(CLASSES), expected)


def test_relabel_takes_the_crops_label(net):
    batch = batch_of()
    loss, parts = at.Supervision(vit(), "relabel")(batch)
    torch.testing.assert_close(parts.targets, at.sample_class_targets(batch.maps, batch.matrix, CLASSES))
    torch.testing.assert_close(loss, at.soft_cross_entropy(parts.output, parts.targets))
    blended = at.Supervision(vit(), at.Source("relabel", ground_truth="official"))(batch)[1].targets
    torch.testing.assert_close(blended, at.blend_ground_truth(parts.targets, batch.label, "official"))


@pytest.mark.parametrize("source", ["class", "relabel"])
def test_where_tokens_have_no_label_of_their_own_they_take_the_pictures(net, source):
    batch = batch_of()
    step = at.Supervision(net, source, at.Mixer("cutmix", per_sample=True), dense_weight=1.0, smoothing=0.1)
    _, parts = step(batch, seeded(3))
    whole = step.source.class_targets(batch, CLASSES)
    shares = parts.plan.token_share(GRID).flatten(1)
    expected = at.blend_targets(whole, parts.plan.partner, shares)
    torch.testing.assert_close(parts.token_targets.dense(CLASSES), expected)
    torch.testing.assert_close(parts.loss_token, token_loss(parts.token_logits, expected))


def test_in_evaluation_it_is_the_plain_loss_and_needs_no_maps(net):
    step = at.Supervision(net, "tokens", "mixtoken", "tl_align", smoothing=0.3).eval()
    batch = batch_of()._replace(maps=())
    loss, parts = step(batch)
    torch.testing.assert_close(loss, F.cross_entropy(net(batch.image), batch.label))
    assert parts.loss_token is None


def test_mixup_on_top_of_mixtoken_is_one_plan(net):
    mixer = at.Mixer("mixtoken", patch_size=8, then_mixup=1.0, per_sample=True)
    plan = mixer.draw(4, SIDE, seeded(5))
    box = at.Mixer("mixtoken", patch_size=8, per_sample=True).draw(4, SIDE, seeded(5))
    assert plan.place == "embedding"
    inside, outside = box.mask == 1, box.mask == 0
    for sample in range(4):
        within = plan.mask[sample][inside[sample]].unique()
        without = plan.mask[sample][outside[sample]].unique()
        assert len(without) <= 2  # where the partner's own box shows this picture, or not
        assert len(within) <= 2
    assert ((plan.mask > 0) & (plan.mask < 1)).any()
    loss, _ = at.Supervision(net, "tokens", mixer)(batch_of(), seeded())
    assert torch.isfinite(loss)
    sometimes, generator = at.Mixer("cutmix", then_mixup=0.3), seeded(7)
    masks = [sometimes.draw(2, 8, generator).mask for _ in range(300)]
    fractional = sum(bool(((mask > 0) & (mask < 1)).any()) for mask in masks) / 300
    assert abs(fractional - 0.3) < 0.1


def test_participation_draws_from_the_steps_generator(net):
    step = at.Supervision(net, "tokens", "none", participation=0.25)
    first, second = (step(batch_of(), seeded(seed))[1].loss_token.item() for seed in (1, 2))
    assert first != second
    assert first == step(batch_of(), seeded(1))[1].loss_token.item()


@pytest.mark.parametrize(
    ("mixer", "follower"),
    [
        ("mixtoken", "tl_align"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("cutmix", "tl_align"), ("mixtoken", "area"))),
    ],
)
def test_compiled_is_eager(mixer, follower):
    step = at.Supervision(sharpen(at.TokenClassifier(vit(depth=1))), "tokens", mixer, follower, smoothing=0.1)
    compiled = torch.compile(step, backend="aot_eager")
    for seed in range(2):
        torch.testing.assert_close(compiled(batch_of(), seeded(seed))[0], step(batch_of(), seeded(seed))[0])


def test_mix_embeddings_in_ones_own_loop_leaves_no_trace():
    model, batch = vit().eval(), batch_of()
    plain = model(batch.image)
    plan = at.draw_mixtoken(3, SIDE, patch_size=8, generator=seeded(4))
    with at.mix_embeddings(model, plan):
        mixed = model(batch.image)
    assert not torch.allclose(mixed, plain)
    # The embedding of a ViT is one convolution by patches: mixing before it is the same.
    pixels = at.MixPlan(plan.partner, plan.mask)
    torch.testing.assert_close(mixed, model(at.mix_images(batch.image, pixels)))
    assert torch.equal(model(batch.image), plain)
    assert not model.patch_embed._forward_hooks
    with pytest.raises(ZeroDivisionError), at.mix_embeddings(model, plan):
        raise ZeroDivisionError
    assert not model.patch_embed._forward_hooks
    with pytest.raises(at.UserError, match="mixes pictures"), at.mix_embeddings(model, pixels):
        pass


def test_supervision_detaches_whole():
    model = vit()
    step = at.Supervision(at.TokenClassifier(model), "tokens", "mixtoken", "tl_align")
    step.detach()
    assert not model.patch_embed._forward_hooks
    assert torch.equal(model.eval()(batch_of().image), vit().eval()(batch_of().image))


def test_a_picture_that_is_not_square(net):
    wide = at.TokenClassifier(vit(img_size=(32, 48)))
    loss, parts = at.Supervision(wide, "tokens", "mixtoken", "tl_align")(batch_of(2, (32, 48)), seeded())
    assert parts.token_targets.grid == (4, 6)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: at.Supervision(vit(), "tokens"), "does not answer for them.*TokenClassifier"),
        (lambda: at.Supervision(vit(), "token"), "unknown source 'token'.*Did you mean 'tokens'"),
        (lambda: at.Supervision(vit(), "tokens", dense_weight=-1.0), "dense_weight"),
        (lambda: at.Source("tokens", tail="none"), "unknown tail 'none'"),
        (lambda: at.Source("tokens", ground_truth="yes"), "unknown ground_truth 'yes'"),
        (lambda: at.Mixer("mixup", then_mixup=0.5), "then_mixup"),
        (lambda: at.Mixer("mixtoken").draw(2, 8), "patch_size"),
        (lambda: at.Supervision(vit(), "relabel")(batch_of()._replace(maps=())), "this batch has none"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(at.UserError, match=message):
        make()


def test_two_mixes_at_once_are_refused():
    mix = EmbeddingMix(vit())
    plan = at.draw_mixtoken(3, SIDE, patch_size=8, generator=seeded(4))
    with mix.mixing(plan), pytest.raises(at.UserError, match="already"), mix.mixing(plan):
        pass
