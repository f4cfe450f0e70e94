"""A training step against the same step written out by hand, for every mixer."""

import pytest
import timm
import torch
import torch.nn.functional as F

import alltokens as at
from alltokens.supervision.mixer import MIXERS


@pytest.fixture
def net():
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **small)


def batch_of(count=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 32, 32, generator=generator, dtype=dtype)
    return at.Sample(images, torch.arange(count) % 5, ["k"] * count, torch.zeros(count, 2, 3))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_the_loss_is_that_of_the_mixed_pictures_and_the_mixed_labels(net, name, per_sample):
    batch = batch_of()
    step = at.Supervision(net, mixer=at.Mixer(name, patch_size=8, per_sample=per_sample), smoothing=0.1)
    before = batch.image.clone()
    loss, parts = step(batch, seeded(2))
    assert torch.equal(batch.image, before)
    share = parts.plan.mask.mean((1, 2)).expand(5)
    mask = parts.plan.mask[:, None]
    mixed = batch.image * (1 - mask) + batch.image.flip(0) * mask
    expected = torch.zeros(())
    for sample in range(5):
        logits = net(mixed)[sample : sample + 1]
        own, partner = batch.label[sample : sample + 1], batch.label[4 - sample : 5 - sample]
        expected = expected + (1 - share[sample]) * F.cross_entropy(logits, own, label_smoothing=0.1)
        expected = expected + share[sample] * F.cross_entropy(logits, partner, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected / 5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts.share, share)
    torch.testing.assert_close(parts.token_shares.mean(1), share)
    assert (name == "none") == bool((share == 0).all())


def test_every_parameter_gets_a_gradient_and_none_is_added(net):
    step = at.Supervision(net, mixer="cutmix")
    assert [name for name, _ in step.named_parameters()] == [f"net.{name}" for name, _ in net.named_parameters()]
    step(batch_of(), seeded())[0].backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def test_the_same_generator_gives_the_same_step(net):
    step = at.Supervision(net, mixer=at.Mixer("mixup+cutmix", probability=0.7))
    losses = [[step(batch_of(), generator)[0].item() for _ in range(4)] for generator in (seeded(3), seeded(3))]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 1


def test_in_evaluation_nothing_is_mixed_or_smoothed(net):
    step = at.Supervision(net, mixer="cutmix", smoothing=0.3).eval()
    loss, parts = step(batch_of())
    torch.testing.assert_close(loss, F.cross_entropy(net(batch_of().image), batch_of().label))
    assert parts.share.tolist() == [0] * 5


@pytest.mark.parametrize("per_sample", [False, True])
def test_mixing_happens_as_often_as_stated(per_sample):
    mixer = at.Mixer("mixup", probability=0.3, per_sample=per_sample)
    generator, mixed, drawn = seeded(), 0, 0
    for _ in range(500):
        share = mixer.draw(4, 8, generator).share
        mixed += int((share > 0).sum())
        drawn += 4
    assert abs(mixed / drawn - 0.3) < (0.05 if per_sample else 0.08)


def test_mixup_and_cutmix_switch_as_often_as_stated():
    mixer = at.Mixer("mixup+cutmix", switch_probability=0.8, per_sample=True)
    masks = mixer.draw(2000, 16, seeded()).mask.flatten(1)
    boxes = ((masks == 0) | (masks == 1)).all(1).float().mean()
    assert abs(boxes - 0.8) < 0.04


def test_batches_of_one_work(net):
    loss, parts = at.Supervision(net, mixer="cutmix")(batch_of(1), seeded())
    assert torch.isfinite(loss)
    assert parts.plan.partner.tolist() == [0]


def test_bfloat16_logits_give_a_float32_loss_near_the_exact_one(net):
    step = at.Supervision(net, mixer="cutmix")
    exact, _ = step(batch_of(), seeded())
    with torch.autocast("cpu", torch.bfloat16):
        rounded, parts = step(batch_of(), seeded())
    assert parts.output.dtype == torch.bfloat16
    assert rounded.dtype == torch.float32
    assert abs(rounded - exact) < 0.02


def test_compiled_is_eager(net):
    step = at.Supervision(net, mixer="mixup+cutmix", smoothing=0.1)
    compiled = torch.compile(step, backend="aot_eager")
    for seed in range(3):
        torch.testing.assert_close(compiled(batch_of(), seeded(seed))[0], step(batch_of(), seeded(seed))[0])


@pytest.mark.parametrize("follower", ["transmix", "tl_align"])
@pytest.mark.parametrize("compiled", [False, True])
def test_with_a_follower_the_label_goes_by_its_share(net, follower, compiled):
    """The step's share is that of the follower alone around the same pictures, and blends the targets."""
    for block in net.blocks:
        block.attn.qkv.weight.data *= 20  # fresh attention is nearly uniform: its share is the area
    step = at.Supervision(net, mixer=at.Mixer("cutmix", patch_size=8, per_sample=True), follower=follower)
    run = torch.compile(step, backend="aot_eager") if compiled else step
    loss, parts = run(batch_of(), seeded(2))
    with torch.no_grad(), step.follower.follow(parts.plan):
        logits = net(at.mix_images(batch_of().image, parts.plan))
    torch.testing.assert_close(parts.share, step.follower.share, atol=1e-6, rtol=1e-6)
    assert (parts.share - parts.plan.share).abs().max() > 1e-3  # it is not the area
    labels = at.smooth_one_hot(batch_of().label, 5)
    targets = at.blend_targets(labels, parts.plan.partner, step.follower.share)
    torch.testing.assert_close(loss, at.soft_cross_entropy(logits, targets), atol=1e-5, rtol=1e-5)
    assert parts.token_shares.shape == (5, 16)
    assert not parts.share.requires_grad
    evaluated = step.eval()(batch_of())[1]
    assert torch.equal(evaluated.share, torch.zeros(5))  # nothing is mixed, so nothing is followed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "clas"}, "unknown source 'clas'.*'class'"),
        ({"mixer": "cutmx"}, "unknown mixer 'cutmx'.*'cutmix'"),
        ({"follower": "aera"}, "unknown follower 'aera'.*'area'"),
        ({"smoothing": 1.0}, "smoothing"),
    ],
)
def test_unknown_words_are_refused_with_the_nearest(net, options, message):
    with pytest.raises(at.UserError, match=message):
        at.Supervision(net, **options)
    with pytest.raises(at.UserError, match="num_classes"):
        at.Supervision(torch.nn.Linear(3, 2))


@pytest.mark.parametrize("follower", ["area", "transmix", "tl_align"])
@pytest.mark.parametrize("mixer", ["cutmix", "mixtoken"])
def test_the_compiled_step_is_one_graph(net, mixer, follower):
    """All but the drawing of the plan; a broken graph would be several times slower, and nothing would say so."""
    ran = []

    def counting(graph, examples):
        return lambda *arguments: ran.append(len(examples)) or graph(*arguments)

    compiled = torch.compile(at.Supervision(net, mixer=mixer, follower=follower), backend=counting)
    compiled(batch_of(), seeded(0))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (1, 2):
            ran.clear()
            compiled(batch_of(), seeded(seed))
            assert len(ran) == 1
