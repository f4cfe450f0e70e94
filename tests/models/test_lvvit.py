"""LV-ViT: the official names, counts and numbers, and everything that timm's models can do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

import alltokens as at
import alltokens.models.lvvit  # registers the models
from alltokens.follow.families import follower_support
from alltokens.models.conv_stem import stem_convolutions
from alltokens.models.cost import gmacs
from alltokens.models.token_output import TokenOutput
from tests.golden_rules import golden_arrays, golden_input, golden_json, golden_weights

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "stem_channels": 8}
SIZES = ("lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l")
OFFICIAL = golden_json("lvvit_state_dicts.json")


def tiny(**options) -> Any:
    torch.manual_seed(0)
    return timm.create_model("lvvit_s", **{**TINY, "num_classes": 5, **options})


def on_meta(name: str, **options) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def pictures(count: int = 2, height: int = 32, width: int = 32) -> torch.Tensor:
    return golden_input(0, (count, 3, height, width))


def close(ours, golden) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(golden), atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def golden() -> dict:
    return golden_arrays("lvvit_t.npz")


@pytest.fixture
def official() -> Any:
    model: Any = timm.create_model("lvvit_t", dense=True, readout="class+max")
    model.load_state_dict(golden_weights(OFFICIAL["lvvit_t"]["state_dict"]))
    return model


def test_evaluation_gives_the_published_numbers(official: Any, golden):
    images = golden_input(100, (4, 3, 224, 224))[:2]
    official.eval()
    with torch.no_grad():
        embedded, features = official.patch_embed(images), official.forward_features(images)
        logits, output = official.forward_head(features), official(images, tokens=True)
    close(embedded.transpose(1, 2).reshape(2, 240, 14, 14)[:, :4], golden["eval_patch_embed_first4ch"])
    close(features[..., :8], golden["eval_tokens_first8ch"])
    close(output.logits, golden["eval_cls_logits"])
    close(output.token_logits[..., :16], golden["eval_aux_first16cls"])
    close(output.token_logits.amax(1), golden["eval_aux_max"])
    close(logits, golden["eval_logits"])


def test_training_with_mixtoken_gives_the_published_numbers(official: Any, golden):
    top, left, bottom, right = golden["train_box"]
    box = torch.zeros(14, 14, dtype=torch.bool)
    box[top:bottom, left:right] = True
    box = box.view(1, -1, 1)

    def exchanged(_module, _inputs, tokens):
        return torch.where(box, tokens.flip(0), tokens)

    official.train().patch_embed.register_forward_hook(exchanged)
    with torch.no_grad():
        output = official(golden_input(100, (4, 3, 224, 224)), tokens=True)
    close(output.logits, golden["train_cls_logits"])
    close(exchanged(None, None, output.token_logits)[..., :16], golden["train_aux_first16cls"])
    close(official.patch_embed.bn1.running_mean, golden["train_bn1_running_mean"])
    close(official.patch_embed.bn1.running_var, golden["train_bn1_running_var"])


@pytest.mark.parametrize("name", SIZES)
def test_names_and_shapes_are_the_official_ones(name):
    official, model = OFFICIAL[name], on_meta(name, dense=True)
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == official["state_dict"]
    kept, free = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    assert (kept["weight_decay"], free["weight_decay"]) == (0.0, 0.05)
    assert {names[id(parameter)] for parameter in kept["params"]} == set(official["no_weight_decay"])
    config = {**model.default_cfg, **{key: list(model.default_cfg[key]) for key in ("input_size", "mean", "std")}}
    assert {key: config[key] for key in official["default_cfg"]} == official["default_cfg"]


@pytest.mark.parametrize("name", SIZES)
def test_counts_are_the_official_ones_at_every_picture_size(name):
    for size, count in OFFICIAL[name]["param_count_by_img_size"].items():
        model = on_meta(name, dense=True, img_size=int(size))
        assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("name", "options"),
    [("lvvit", {}), ("vit", {"stem_kernels": [16], "stem_strides": [16], "residual_scale": 1.0})],
)
def test_models_without_a_dense_head_are_the_official_ones(name, options):
    model = on_meta("lvvit_s", **options)
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == OFFICIAL[name]["state_dict"]


def test_norms_attention_and_weights_start_as_published():
    torch.manual_seed(0)
    model: Any = timm.create_model("lvvit_t", dense=True, drop_path_rate=0.1)
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {1e-5}
    assert model.blocks[0].attn.qkv.bias is None
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    torch.testing.assert_close(
        torch.tensor(rates).double(), torch.tensor(golden_arrays("droppath.npz")["linear_0p1_12"])
    )
    for weight in (
        model.cls_token,
        model.pos_embed,
        model.head.weight,
        model.aux_head.weight,
        model.blocks[3].mlp.fc1.weight,
    ):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert model.head.bias.abs().sum() == model.aux_head.bias.abs().sum() == 0


@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0])
def test_both_branches_are_divided_by_the_residual_scale(scale):
    block = tiny(residual_scale=scale).eval().blocks[1]
    tokens = torch.randn(2, 17, 32)
    middle = tokens + block.attn(block.norm1(tokens)) / scale
    torch.testing.assert_close(block(tokens), middle + block.mlp(block.norm2(middle)) / scale)


STEMS = [  # the rows of the paper's table 3, in the notation of the paper
    ([16], [16], 81.1),
    ([7, 8], [2, 8], 81.4),
    ([7, 3, 8], [2, 2, 4], 81.4),
    ([7, 3, 8], [2, 1, 8], 81.9),
    ([7, 3, 3, 8], [2, 1, 1, 8], 82.2),
    ([7, 3, 3, 3, 3, 8], [2, 1, 1, 1, 1, 8], 82.2),
]


@pytest.mark.parametrize(("kernels", "strides", "_accuracy"), STEMS)
def test_every_stem_of_the_ablation_makes_one_token_per_patch(kernels, strides, _accuracy):
    stem = tiny(img_size=(64, 32), patch_size=16, stem_kernels=kernels, stem_strides=strides).patch_embed
    convolutions = [module for module in stem.modules() if isinstance(module, nn.Conv2d)]
    assert [module.kernel_size[0] for module in convolutions] == kernels
    assert [module.stride[0] for module in convolutions] == strides
    assert [module.out_channels for module in convolutions] == [8] * (len(kernels) - 1) + [32]
    images = pictures(2, 64, 32)
    embedded = stem.eval()(images)
    assert embedded.shape == (2, 4 * 2, 32)
    jumps = [math.prod(strides[:index]) for index in range(len(strides))]
    reach = sum((kernel - 1) * jump for kernel, jump in zip(kernels, jumps, strict=True))
    changed = images.clone()
    changed[:, :, 32 + reach :] += 1  # rows that no convolution of the first two rows of tokens reaches
    assert torch.equal(stem(changed)[:, :4], embedded[:, :4])


def test_without_options_the_stem_is_the_published_one():
    assert stem_convolutions(16, 384) == stem_convolutions(16, 384, 64, (7, 3, 3, 8), (2, 1, 1, 8))
    assert [row.padding for row in stem_convolutions(16, 384)] == [3, 1, 1, 0]
    assert [tuple(row) for row in stem_convolutions(8, 64, 24)] == [(24, 7, 2), (24, 3, 1), (24, 3, 1), (64, 4, 4)]


def test_a_stem_for_small_pictures_is_cheap():
    options = {"stem_kernels": [3, 3, 3, 1], "stem_strides": [2, 2, 2, 1], "stem_channels": [24, 32, 64]}
    stem = tiny(img_size=64, embed_dim=64, **options).patch_embed
    assert stem(pictures(2, 64, 64)).shape == (2, 64, 64)
    assert gmacs(stem, 64) * 1e3 < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem_kernels": [7, 8]}, "belong together"),
        ({"stem_kernels": [7, 4], "stem_strides": [2, 8]}, "multiply to the patch size 8, got \\[2, 8\\]"),
        ({"stem_kernels": [7, 3, 4], "stem_strides": [2, 4]}, "3 kernels, 2 strides"),
        ({"stem_channels": [8, 8]}, "2 channels"),
        ({"stem_kernels": [2, 4], "stem_strides": [1, 8]}, "odd where the stride is 1"),
        ({"img_size": 36}, "divide by the patch size 8"),
        ({"patch_size": (8, 4)}, "square patches"),
        ({"residual_scale": 0}, "positive"),
        ({"init_values": 1e-4}, "layer scale"),
        ({"readout": "class+max"}, "dense=True"),
        ({"dense": True, "readout": "max"}, "unknown readout 'max'"),
        ({"dense": True, "patch_drop_rate": 0.1}, "every token"),
        ({"dynamic_img_pad": True}, "pads no picture"),
    ],
)
def test_what_it_cannot_do_it_says(options, message):
    with pytest.raises(at.UserError, match=message):
        tiny(**options)


def test_tokens_are_the_dense_head_on_the_patches_and_readouts_what_they_say():
    model = tiny(dense=True).eval()
    images = pictures()
    features = model.forward_features(images)
    output = model(images, tokens=True)
    assert isinstance(output, TokenOutput)
    torch.testing.assert_close(output.logits, model.head(features[:, 0]))
    torch.testing.assert_close(output.token_logits, model.aux_head(features[:, 1:]))
    assert torch.equal(model(images), output.logits)  # a dense head that nobody asked for has no say
    model.readout = "class+max"
    torch.testing.assert_close(model(images), output.logits + 0.5 * output.token_logits.max(1).values)
    assert torch.equal(model(images, tokens=True).logits, output.logits)
    assert model.forward_head(features, pre_logits=True).shape == (2, 32)
    model.train()
    assert torch.equal(model(images), model.head(model.forward_features(images)[:, 0]))
    with pytest.raises(at.UserError, match="no dense head"):
        tiny()(images, tokens=True)


def test_a_new_classifier_renews_both_heads_and_the_readout():
    model = tiny(dense=True, readout="class+max").eval()
    model.reset_classifier(7)
    assert model.readout == "class"
    output = model(pictures(), tokens=True)
    assert (output.logits.shape, output.token_logits.shape) == ((2, 7), (2, 16, 7))
    model.reset_classifier(0)
    assert model(pictures()).shape == (2, 32)
    assert model(pictures(), tokens=True).token_logits.shape == (2, 16, 32)
    with pytest.raises(at.UserError, match="dense=True"):
        model.readout = "class+max"
    plain = tiny()
    plain.reset_classifier(7)
    assert (plain.dense, plain.get_classifier().out_features) == (False, 7)


@pytest.mark.parametrize("dense", [False, True])
def test_every_parameter_gets_a_gradient_and_checkpointing_the_same_one(dense):
    model, gradients = tiny(dense=dense).train(), []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        output = model(pictures(), tokens=True) if dense else (model(pictures()),)
        torch.stack([part.square().sum() for part in output]).sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_pictures_of_another_size():
    model = tiny().eval()
    with pytest.raises(at.UserError, match="built for pictures of"):
        model(pictures(1, 48, 32))
    before = model(pictures())
    model.set_input_size((48, 32))
    assert model.patch_embed.grid_size == (6, 4)
    assert model(pictures(1, 48, 32)).shape == (1, 5)
    with pytest.raises(at.UserError, match="build another model"):
        model.set_input_size(patch_size=16)
    free = tiny(dynamic_img_size=True, dense=True).eval()
    assert free(pictures(2, 48, 64), tokens=True).token_logits.shape == (2, 48, 5)
    torch.testing.assert_close(free(pictures()), before)
    with pytest.raises(at.UserError, match="pictures must divide"):
        free(pictures(1, 36, 32))


def test_intermediates_and_features_only_are_those_of_the_blocks():
    model = tiny().eval()
    final, maps = model.forward_intermediates(pictures(), indices=[0, 2], norm=True)
    torch.testing.assert_close(final, model.forward_features(pictures()))
    torch.testing.assert_close(maps[1], final[:, 1:].transpose(1, 2).reshape(2, 32, 4, 4))
    backbone = tiny(features_only=True, out_indices=(0, 2), dense=True).eval()
    assert (backbone.feature_info.channels(), backbone.feature_info.reduction()) == ([32, 32], [8, 8])
    features = backbone(pictures())
    assert [tuple(feature.shape) for feature in features] == [(2, 32, 4, 4)] * 2


def test_the_mean_of_the_patches_can_be_classified_without_a_class_token():
    model = tiny(class_token=False, global_pool="avg", dense=True).eval()
    features, output = model.forward_features(pictures()), model(pictures(), tokens=True)
    torch.testing.assert_close(output.logits, model.head(features.mean(1)))
    torch.testing.assert_close(output.token_logits.mean(1), model.aux_head(features.mean(1)))


def test_a_dense_head_changes_nothing_else():
    plain, dense = tiny().state_dict(), tiny(dense=True).state_dict()
    assert set(dense) - set(plain) == {"aux_head.weight", "aux_head.bias"}
    assert all(torch.equal(value, dense[name]) for name, value in plain.items())


def test_compiled_equals_eager_in_one_graph():
    model = tiny(dense=True, depth=1).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pictures(), tokens=True), model(pictures(), tokens=True))


def test_shares_can_be_followed():
    assert follower_support(tiny(dense=True)) == ("area", "transmix", "tl_align")


def test_published_weights_load_with_and_without_a_dense_head(tmp_path):
    source = tiny(dense=True).eval()
    torch.save(
        {"state_dict_ema": {f"module.{name}": value for name, value in source.state_dict().items()}}, tmp_path / "a.pth"
    )
    whole, plain, larger = tiny(dense=True), tiny(), tiny(img_size=64, num_classes=7, dense=True)
    assert at.load_weights(whole, tmp_path / "a.pth") == []
    assert at.load_weights(plain, tmp_path / "a.pth") == []
    assert torch.equal(whole.eval()(pictures()), source(pictures()))
    assert torch.equal(plain.eval()(pictures()), source(pictures()))
    heads = {f"{head}.{kind}" for head in ("head", "aux_head") for kind in ("weight", "bias")}
    assert set(at.load_weights(larger, tmp_path / "a.pth")) == heads
    torch.save(plain.state_dict(), tmp_path / "b.pth")
    assert set(at.load_weights(tiny(dense=True), tmp_path / "b.pth")) == {"aux_head.weight", "aux_head.bias"}


def test_timm_loads_a_checkpoint_into_other_sizes(tmp_path):
    source = tiny(dense=True)
    torch.save(source.state_dict(), tmp_path / "a.pth")
    for options in ({"img_size": 64}, {"img_size": 64, "dense": True}, {"num_classes": 7, "dense": True}):
        overlay = {"file": str(tmp_path / "a.pth"), "num_classes": 5}
        model = tiny(pretrained=True, pretrained_cfg_overlay=overlay, **options)
        for name in ("patch_embed.proj.weight", "blocks.2.mlp.fc1.weight", "norm.weight"):
            assert torch.equal(model.get_parameter(name), source.get_parameter(name))
        assert torch.equal(model.pos_embed[:, :1], source.pos_embed[:, :1])
        if "num_classes" not in options and model.dense:
            assert torch.equal(model.aux_head.weight, source.aux_head.weight)
