"""The public contract: code that users write against these names, run as they would write it.

The three ways in: the whole step, TL-Align alone in a loop that someone has, token labels alone. Sizes are small, and
the names, orders of arguments and words are those that must not change.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import alltokens as at

SMALL = {"num_classes": 100, "depth": 2, "embed_dim": 48, "num_heads": 3}
device = "cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """pictures/train with two classes, and labels/, what an annotator of 100 classes makes of them."""
    folder = tmp_path_factory.mktemp("contract")
    noise = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "pictures" / "train" / name).mkdir(parents=True)
        for index in range(3):
            picture = Image.fromarray(noise.integers(0, 255, (40, 48, 3), dtype=np.uint8))
            picture.save(folder / "pictures" / "train" / name / f"{index}.jpg")
    torch.manual_seed(0)
    annotator = timm.create_model("vit_tiny_patch16_224", num_classes=100, depth=1, embed_dim=24, num_heads=2)
    at.annotate(annotator, folder / "pictures" / "train", folder / "labels", class_map="own", workers=0)
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)
    torch.manual_seed(0)


def assert_every_parameter_has_a_gradient(net):
    assert not [name for name, weight in net.named_parameters() if weight.grad is None or not weight.grad.any()]


def test_the_whole_step():
    generator = torch.Generator().manual_seed(0)
    net = at.TokenClassifier(timm.create_model("vit_small_patch16_224", **SMALL))
    step = at.Supervision(net, source="tokens", mixer="mixtoken", follower="tl_align", dense_weight=0.5, smoothing=0.1)
    transform = at.TrainTransform(224)
    data = at.PictureDataset("pictures/train", transform, labels=at.LabelStore.open("labels/"))
    seen = 0
    for batch in torch.utils.data.DataLoader(data, 4, shuffle=True):
        loss, parts = step(batch.to(device), generator)
        loss.backward()
        seen += len(batch.key)
        assert loss.item() == pytest.approx(parts.loss_class.item() + 0.5 * parts.loss_token.item(), rel=1e-6)
        own = at.sample_token_labels(batch.maps, batch.matrix, (14, 14), 100, 0.1)[0]
        assert torch.equal(parts.targets, at.blend_targets(own, parts.plan.partner, parts.share))
        assert parts.plan.place == "embedding"
        assert parts.output.shape == parts.targets.shape == (len(batch.key), 100)
        assert parts.token_shares.shape == (len(batch.key), 196)
    assert seen == len(data) == 6
    assert_every_parameter_has_a_gradient(net)


def test_a_sample_says_what_the_loop_needs_to_know():
    data = at.PictureDataset("pictures/train", at.TrainTransform(224), labels=at.LabelStore.open("labels/"))
    image, label, key, matrix, maps = data[5][:5]
    assert image.shape == (3, 224, 224)
    assert (label, key) == (1, "dog/2.jpg")
    assert matrix.shape == (2, 3)
    store = at.LabelStore.open("labels/")
    ids, scores, _ = store["dog/2.jpg"]
    assert torch.equal(maps.ids, ids)
    assert torch.equal(store.read(["cat/0.jpg", "dog/2.jpg"]).scores[1], scores)


def test_a_model_that_comes_with_alltokens():
    net = timm.create_model("lvvit_s", num_classes=5, img_size=32).eval()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("patch_size", [16, None])
def test_tl_align_alone_around_a_model_that_is_left_as_it_was(patch_size):
    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(4, 3, 224, 224, generator=g), torch.tensor([3, 99, 0, 41])
    model = timm.create_model("vit_small_patch16_224", **SMALL).eval()
    before, plain = dict(model.__dict__), model(images)

    aligner = at.TLAlign(model)
    plan = at.draw_cutmix(len(images), image_size=224, alpha=1.0, patch_size=patch_size, generator=g)
    with aligner.follow(plan):
        logits = model(at.mix_images(images, plan))
    targets = at.blend_targets(at.smooth_one_hot(labels, 100, 0.1), plan.partner, aligner.share)
    loss = at.soft_cross_entropy(logits, targets)
    loss.backward()
    token_targets = at.blend_targets(torch.rand(4, 196, 100, generator=g), plan.partner, aligner.token_shares)
    aligner.detach()

    assert token_targets.shape == (4, 196, 100)
    assert 0 < plan.share[0] < 1
    assert not torch.equal(aligner.share, plan.share)
    torch.testing.assert_close(targets.sum(1), torch.ones(4))
    own = targets[torch.arange(4), labels]  # neither picture has the other's class
    torch.testing.assert_close(own, 0.001 + 0.9 * (1 - aligner.share))
    assert_every_parameter_has_a_gradient(model)
    assert torch.equal(model(images), plain)
    assert dict(model.__dict__) == before
    assert not [
        hook for module in model.modules() for hook in (module._forward_hooks, module._forward_pre_hooks) if hook
    ]


def test_a_model_that_cannot_be_followed_is_told_which_can():
    with pytest.raises(at.UnsupportedModel, match=r"ViT, DeiT, LV-ViT.*Swin"):
        at.TLAlign(timm.create_model("resnet18"))


def test_token_labels_alone():
    net = at.TokenClassifier(timm.create_model("vit_small_patch16_224", **SMALL))
    data = at.PictureDataset("pictures/train", at.TrainTransform(224), labels=at.LabelStore.open("labels/"))
    images, labels, _, matrix, maps = next(iter(torch.utils.data.DataLoader(data, 4)))[:5]
    class_targets = at.smooth_one_hot(labels, 100, 0.1)

    targets = at.sample_token_targets(maps, matrix, grid=(14, 14))
    loss = at.TokenLabelLoss(dense_weight=0.5)(net(images, tokens=True), class_targets, targets)

    loss.backward()
    assert_every_parameter_has_a_gradient(net)
    assert targets.rest.shape == targets.weight.shape == (4, 196)
    assert targets.ids.shape == targets.probabilities.shape
    full = at.sample_token_targets(maps, matrix, grid=(14, 14), num_classes=100)
    dense = at.sample_token_labels(maps, matrix, (14, 14), 100)[1]
    torch.testing.assert_close(full.dense(100), dense)
    inside = full.weight == 1
    for told in (targets, full):
        torch.testing.assert_close(told.dense(100).sum(-1)[inside], torch.ones(int(inside.sum())))
    output = net(images, tokens=True)
    assert isinstance(output, at.TokenOutput)
    assert torch.equal(output.logits, net(images))
    sparse = at.TokenLabelLoss(dense_weight=0.5)(output, class_targets, full)
    written_out = at.soft_cross_entropy(output.logits, class_targets)
    losses = -(dense * output.token_logits.log_softmax(-1)).sum(-1)
    written_out = written_out + 0.5 * (losses * full.weight).sum() / full.weight.sum()
    torch.testing.assert_close(sparse, written_out)


def test_plans_do_what_they_say():
    plan = at.MixPlan.from_box(torch.tensor([1, 0]), box=(0, 2, 0, 3), image_size=(4, 4))
    assert plan.share.tolist() == [6 / 16, 6 / 16]
    assert plan.to(device).token_share((2, 2))[0].tolist() == [[1.0, 0.5], [0.0, 0.0]]
    assert plan.then(plan).share.tolist() == [0.0, 0.0]  # what was pasted is pasted back
    images = torch.arange(2.0)[:, None, None, None].expand(2, 3, 4, 4)
    assert torch.equal(at.mix_images(images, plan)[0, 0], plan.mask[0])
    in_tokens = at.draw_mixtoken(2, 32, patch_size=16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(at.UserError, match="after the patch embedding"):
        at.mix_images(torch.zeros(2, 3, 32, 32), in_tokens)
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, **SMALL)
    with pytest.raises(at.UserError, match="mixes pictures"), at.mix_embeddings(net, plan):
        pass
    with at.mix_embeddings(net, in_tokens):
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", ["cutmix", "mixup", "random_mix", "block_mix", "mixtoken"])
def test_every_draw_takes_a_generator_and_draws_by_batch_or_by_sample(name, per_sample):
    patches = {"patch_size": 16} if name in ("random_mix", "block_mix", "mixtoken") else {}
    draw = getattr(at, f"draw_{name}")
    first, again, other = (
        draw(5, 64, 1.0, per_sample=per_sample, generator=torch.Generator().manual_seed(seed), **patches)
        for seed in (0, 0, 1)
    )
    assert torch.equal(first.mask, again.mask)
    assert not torch.equal(first.mask, other.mask)
    assert (len(first.share.unique()) > 1) == per_sample
    assert first.mask.shape == (5 if per_sample else 1, 64, 64)
    assert first.share.shape == (5,)


WORDS = {  # of each public name, the arguments that users write, in their order
    "TLAlign": "model layers residual drop_path_aware",
    "TransMix": "model",
    "Area": "grid",
    "Supervision": "net source mixer follower smoothing dense_weight participation num_classes",
    "TokenClassifier": "model",
    "TokenLabelLoss": "dense_weight",
    "TrainTransform": "size",
    "EvalTransform": "size",
    "PictureDataset": "pictures transform labels",
    "MixPlan": "partner mask place",
    "MixPlan.from_box": "partner box image_size",
    "MixPlan.token_share": "grid",
    "MixPlan.then": "other",
    "MixPlan.to": "device",
    "LabelMap": "ids scores tail",
    "LabelStore.open": "path",
    "LabelStore.read": "keys",
    "TokenTargets.mix": "plan",
    "TokenTargets.dense": "num_classes",
    "annotate": "model pictures out",
    "draw_cutmix": "batch image_size alpha patch_size per_sample generator",
    "draw_mixup": "batch image_size alpha per_sample generator",
    "draw_random_mix": "batch image_size alpha patch_size per_sample generator",
    "draw_block_mix": "batch image_size alpha patch_size per_sample generator",
    "draw_mixtoken": "batch image_size alpha patch_size per_sample generator",
    "mix_images": "images plan",
    "mix_embeddings": "model plan",
    "smooth_one_hot": "labels num_classes smoothing",
    "blend_targets": "targets partner partner_share",
    "blend_ground_truth": "class_targets labels rule",
    "soft_cross_entropy": "logits targets",
    "sample_token_labels": "maps matrix grid num_classes smoothing tail axes",
    "sample_token_targets": "maps matrix grid num_classes",
    "load_weights": "model path",
    "show": "value",
}


@pytest.mark.parametrize("name", WORDS)
def test_the_words_that_users_write_stay(name):
    holder = at
    for part in name.split("."):
        holder = getattr(holder, part)
    wanted = WORDS[name].split()
    given = [word for word in inspect.signature(holder).parameters if word != "self"]
    assert [word for word in given if word in wanted] == wanted
    assert given[:1] == wanted[:1]


@pytest.mark.parametrize("name", sorted(set(at.__all__) - {"__version__"}))
def test_every_public_name_says_what_it_is(name):
    said = inspect.getdoc(getattr(at, name)) or ""
    assert len(said) > 25
    assert not said.startswith(f"{name}("), "the signature that dataclasses and records write is no docstring"
