"""A dense head on any timm model: its tokens are the places that the model's own head pools."""

import pytest
import timm
import torch

from alltokens.errors import UnsupportedModel, UserError
from alltokens.models.token_classifier import TokenClassifier
from alltokens.models.token_output import answers_for_tokens

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
MODELS = {
    "ViT": ("vit_tiny_patch16_224", VIT, (4, 4)),
    "ViT, mean of patches": ("vit_tiny_patch16_224", {**VIT, "global_pool": "avg", "class_token": False}, (4, 4)),
    "distilled DeiT": ("deit_tiny_distilled_patch16_224", VIT, (4, 4)),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
        (4, 4),
    ),
    "Mixer": ("mixer_s16_224", {"img_size": 32}, (2, 2)),
    "ResNet": ("resnet10t", {}, (1, 1)),
    "ConvNeXt": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 16)}, (1, 1)),
    "CaiT": ("cait_xxs24_224", {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2, "patch_size": 8}, (4, 4)),
    "PVT v2": ("pvt_v2_b0", {}, (1, 1)),
}


@pytest.mark.parametrize(("name", "options", "grid"), MODELS.values(), ids=MODELS)
def test_tokens_are_classified_and_the_model_answers_as_before(name, options, grid):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).eval()
    net = TokenClassifier(model)
    images = torch.randn(3, 3, 32, 32)
    answer = net(images, tokens=True)
    assert torch.equal(answer.logits, model(images))
    assert torch.equal(net(images), model(images))
    assert net.token_grid((32, 32)) == grid
    assert answer.token_logits.shape == (3, grid[0] * grid[1], 5)
    assert net.num_classes == 5


@pytest.mark.parametrize("key", ["ViT, mean of patches", "ResNet", "ConvNeXt", "Swin", "PVT v2"])
def test_with_the_models_own_weights_the_dense_head_says_what_the_model_says_on_the_mean(key):
    """Where the head is linear on the mean of places, the mean of dense logits is the model's answer."""
    name, options, _ = MODELS[key]
    model = timm.create_model(name, num_classes=5, **options).eval()
    net = TokenClassifier(model)
    net.aux_head.load_state_dict(model.get_classifier().state_dict())
    answer = net(torch.randn(2, 3, 64, 64) if key in ("ResNet", "PVT v2") else torch.randn(2, 3, 32, 32), tokens=True)
    if key in ("ViT, mean of patches", "ConvNeXt"):  # their norm comes after the pooling: compare one place alone
        features = model.forward_features(torch.randn(2, 3, 32, 32))
        place = features[:, :1] if features.ndim == 3 else features[:, :, :1, :1]
        torch.testing.assert_close(net.aux_head(net._tokens(place))[:, 0], model.forward_head(place))
    else:
        torch.testing.assert_close(answer.token_logits.mean(1), answer.logits)


def test_places_are_in_rows():
    """A change in the picture's top right corner reaches the token of that corner alone (no attention, depth 0)."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**VIT, "depth": 0}).eval()
    net = TokenClassifier(model)
    images = torch.zeros(1, 3, 32, 32)
    changed = images.clone()
    changed[..., :8, 24:] = 1
    different = (net(images, tokens=True).token_logits - net(changed, tokens=True).token_logits).abs().sum(-1) > 0
    assert different.nonzero().tolist() == [[0, 3]]


def test_every_parameter_gets_a_gradient_and_compiled_is_eager():
    net = TokenClassifier(timm.create_model("vit_tiny_patch16_224", num_classes=5, **VIT))
    images = torch.randn(2, 3, 32, 32)
    answer = net(images, tokens=True)
    (answer.logits.square().mean() + answer.token_logits.square().mean()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in net.parameters())
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)(images, tokens=True)
    torch.testing.assert_close(compiled.token_logits, answer.token_logits)


def test_what_has_a_dense_head_or_is_no_classifier_is_refused():
    with pytest.raises(UserError, match="dense head of its own"):
        TokenClassifier(timm.create_model("lvvit_t", dense=True, **VIT))
    with pytest.raises(UnsupportedModel, match="forward_features"):
        TokenClassifier(torch.nn.Linear(2, 3))
    with pytest.raises(UserError, match=r"VOLO has a dense head that it does not let one ask.*use_aux_head=False"):
        TokenClassifier(timm.create_model("volo_d1_224", img_size=32))
    several = TokenClassifier(timm.create_model("coat_tiny", img_size=32))
    with pytest.raises(UnsupportedModel, match="CoaT gives no single feature map"):
        several(torch.zeros(1, 3, 32, 32), tokens=True)


def test_who_answers_for_tokens():
    vit = timm.create_model("vit_tiny_patch16_224", **VIT)
    wrapped, volo = TokenClassifier(vit), timm.create_model("volo_d1_224", img_size=32)
    assert [answers_for_tokens(net) for net in (vit, volo)] == [False, False]
    assert answers_for_tokens(wrapped)
    assert answers_for_tokens(torch.compile(wrapped, backend="eager"))
    assert answers_for_tokens(timm.create_model("lvvit_t", dense=True, **VIT))
    assert not answers_for_tokens(timm.create_model("lvvit_t", **VIT))
