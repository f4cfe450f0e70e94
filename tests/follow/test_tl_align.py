"""TLAlign as a user meets it: every way of running a model, every option."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.cait import Cait

import alltokens as at
from alltokens.follow import tap
from alltokens.follow.tl_align import TLAlign
from tests.follow.test_families import CASES, mixed_batch, sharp
from tests.follow.tiny_vit import followed, tiny

# every way of running a model


@pytest.mark.parametrize("name", ["vit", "vit_map", "vit_parallel_scaling", "eva02", "swin_odd", "pvt_v2", "caformer"])
def test_attention_read_beside_the_fused_call_gives_the_same_shares(name, monkeypatch):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    for module in model.modules():
        if isinstance(module, timm.models.swin_transformer.WindowAttention):
            module.fused_attn = True
    expected = followed(model, images, plan)
    monkeypatch.setattr(tap, "can_carry", lambda *_: False)
    actual = followed(model, images, plan)
    torch.testing.assert_close(actual.share, expected.share, atol=1e-6, rtol=0)
    torch.testing.assert_close(actual.token_shares, expected.token_shares, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["vit", "eva02", "cait", "swin", "pvt"])
def test_following_changes_the_output_in_its_last_digit_at_most(name):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    expected = model(images)
    aligner = TLAlign(model)
    with aligner.follow(plan):
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["vit", "vit_registers", "vit_parallel_things", "vit_map", "vit_prr", "eva02", "cait", "swin", "pvt_v2"],
)
def test_fused_and_unfused_attention_give_the_same_shares(name):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    expected = followed(model, images, plan)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = not module.fused_attn
    actual = followed(model, images, plan)
    torch.testing.assert_close(actual.share, expected.share, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("vit", False),
        ("vit", True),
        ("swin_odd", True),
        *[
            pytest.param(name, checkpointing, marks=pytest.mark.slow)
            for name in ("vit_map", "eva02", "cait", "swin", "swin_v2", "pvt", "pvt_v2", "mixer", "convnext")
            for checkpointing in (False, True)
        ],
    ],
)
def test_compiled_is_eager_in_one_graph_with_and_without_checkpointing(name, checkpointing):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    model.train().set_grad_checkpointing(checkpointing)
    for module in model.modules():
        if isinstance(module, timm.layers.DropPath):
            module.drop_prob = 0.0
    aligner = TLAlign(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    shares, gradients = [], []
    for run in (model, compiled):
        model.zero_grad()
        with aligner.follow(plan):
            logits = run(images)
        logits.square().sum().backward()
        shares.append((aligner.share, aligner.token_shares))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(shares[1], shares[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_inductor_gives_the_same_shares_and_gradients(checkpointing, batch):
    images, plan = batch
    model, results = tiny(depth=2), []
    model.set_grad_checkpointing(checkpointing)
    aligner = TLAlign(model)
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        with aligner.follow(plan):
            logits = run(images)
        logits.square().sum().backward()
        results.append((aligner.share, model.cls_token.grad.clone()))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


def test_a_compiled_model_follows_another_plan_without_compiling_again(batch):
    images, plan = batch
    model = tiny()
    aligner = TLAlign(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with aligner.follow(plan):
        compiled(images)
    other = at.draw_mixup(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.compiler.set_stance("fail_on_recompile"), aligner.follow(other):
        compiled(images)
    torch.testing.assert_close(aligner.share, other.share)


def test_checkpointing_changes_neither_shares_nor_gradients(batch):
    images, plan = batch
    model, results = tiny(attn_drop_rate=0.1, drop_path_rate=0.2).train(), []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        torch.manual_seed(5)
        aligner = TLAlign(model, drop_path_aware=True)
        with aligner.follow(plan):
            logits = model(images)
        share = aligner.share
        logits.square().sum().backward()
        assert torch.equal(aligner.share, share)
        results.append((share, *[parameter.grad for parameter in model.parameters()]))
        aligner.detach()
    torch.testing.assert_close(results[1], results[0])


def test_shares_keep_float32_under_autocast(batch):
    images, plan = batch
    model = tiny()
    exact = followed(model, images, plan)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = followed(model, images, plan)
    assert rounded.share.dtype == torch.float32
    torch.testing.assert_close(rounded.share, exact.share, atol=2e-2, rtol=0)  # q and k themselves are rounded


def test_following_leaves_the_models_random_numbers_and_its_gradients(batch):
    images, plan = batch
    model = tiny(drop_path_rate=0.3, proj_drop_rate=0.2, attn_drop_rate=0.2).train()
    results = []
    for options in (None, {}, {"drop_path_aware": True}):
        aligner = TLAlign(model, **options) if options is not None else None
        model.zero_grad()
        torch.manual_seed(3)
        if aligner is None:
            logits = model(images)
        else:
            with aligner.follow(plan):
                logits = model(images)
            aligner.detach()
        logits.square().sum().backward()
        results.append((logits.detach(), torch.rand(1), *[parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_several_batches_are_followed_one_after_the_other(batch):
    images, plan = batch
    model = tiny()
    aligner = TLAlign(model)
    with aligner.follow(plan):
        model(images)
    first, copied = aligner.share, aligner.share.clone()
    smaller = at.MixPlan(torch.tensor([1, 0]), plan.mask[:2])
    with aligner.follow(smaller):
        model(images[:2])
    assert aligner.share.shape == (2,)
    assert torch.equal(first, copied)  # what was read belongs to the reader


def test_accumulated_batches_each_go_by_their_own_share(batch):
    images, plan = batch
    other = at.draw_cutmix(3, 32, patch_size=8, generator=torch.Generator().manual_seed(4))
    labels = torch.eye(tiny().num_classes)[:3]

    def backward(model, aligner, plan):
        with aligner.follow(plan):
            logits = model(at.mix_images(images, plan))
        at.soft_cross_entropy(logits, at.blend_targets(labels, plan.partner, aligner.share)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    model = tiny()
    aligner = TLAlign(model)
    backward(model, aligner, plan)
    together = backward(model, aligner, other)
    alone = [backward(model, TLAlign(model), each) for model, each in ((tiny(), plan), (tiny(), other))]
    torch.testing.assert_close(together, alone[0] + alone[1])
    assert not torch.allclose(alone[0], alone[1])


# limits


@pytest.mark.parametrize("name", CASES)
def test_no_mix_full_swap_and_mixup_are_fixed_points_and_shares_stay_shares(name):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    aligner = TLAlign(model)
    for constant in (0.0, 1.0, 0.3):
        with aligner.follow(at.MixPlan(plan.partner, torch.full((1, *size), constant))):
            model(images)
        torch.testing.assert_close(aligner.share, torch.full((3,), constant), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            aligner.token_shares, torch.full_like(aligner.token_shares, constant), atol=1e-6, rtol=0
        )
    with aligner.follow(plan):
        model(images)
    for shares in (aligner.share, aligner.token_shares):
        assert 0 <= shares.min() <= shares.max() <= 1


# options


def test_layers_left_out_leave_the_share(batch):
    images, plan = batch
    model = tiny(depth=3)
    kept = followed(model, images, plan, layers=[2], layer_shares=True).layer_shares
    everything = followed(model, images, plan, layer_shares=True).layer_shares
    assert len(kept) == 3
    torch.testing.assert_close(kept[0].share, plan.share)
    torch.testing.assert_close(kept[0].token_shares, plan.token_share((4, 4)).flatten(1))
    assert not torch.allclose(kept[1].token_shares, kept[0].token_shares)
    assert torch.equal(kept[2].token_shares, kept[1].token_shares)
    torch.testing.assert_close(followed(model, images, plan, layers=[1, 2, 3]).share, everything[-1].share)


def test_merging_happens_in_layers_that_are_left_out_too():
    build, size, _ = CASES["swin_odd"]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    aligner = followed(model, images, plan, layers=[1])
    assert aligner.token_shares.shape == (3, 4 * 6)


def test_ignoring_the_residual_takes_the_branch_alone(batch):
    images, plan = batch
    model = tiny(depth=1)
    start = torch.cat([plan.share[:, None], plan.token_share((4, 4)).flatten(1)], 1)
    average = followed(model, images, plan).token_shares
    branch = followed(model, images, plan, residual="ignore").token_shares
    torch.testing.assert_close(average, (start[:, 1:] + branch) / 2)


def test_a_dropped_branch_moves_nothing_when_asked(batch):
    images, plan = batch
    model = tiny(depth=1, drop_path_rate=0.5).train()
    model.blocks[0].drop_path1 = timm.layers.DropPath(0.5)
    start = plan.token_share((4, 4)).flatten(1)
    torch.manual_seed(0)
    moved = followed(model, images, plan).token_shares
    dropped = []
    for seed in range(6):
        torch.manual_seed(seed)
        shares = followed(model, images, plan, drop_path_aware=True).token_shares
        for sample in range(3):
            is_start = torch.allclose(shares[sample], start[sample])
            assert is_start or torch.allclose(shares[sample], moved[sample])
            dropped.append(is_start)
    assert 0 < sum(dropped) < len(dropped)


def test_dropped_branches_of_shared_stochastic_depth_are_refused():
    model = Cait(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, drop_path_rate=0.1)
    with pytest.raises(at.UserError, match="of its own for every branch"):
        TLAlign(model, drop_path_aware=True)
