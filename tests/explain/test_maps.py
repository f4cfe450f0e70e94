"""Maps over tokens against plain re-computations, and the promise that the model stays as it was."""

import copy

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import alltokens as at
from alltokens.explain import METHODS, Explainer
from alltokens.explain import relevance as rules
from alltokens.models.token_classifier import TokenClassifier
from tests.explain import oracle
from tests.golden_rules import golden_arrays, golden_input, golden_json, golden_weights

F64 = torch.float64
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_heads": 3, "num_classes": 5}


def stirred(model, scale=0.3):
    """Weights far from their gentle start, so that attention and relevance have a shape."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def vit(**options):
    return stirred(VisionTransformer(**SMALL | {"depth": 3} | options))


def lvvit(**options):
    return stirred(timm.create_model("lvvit_t", **SMALL, depth=3, stem_channels=8, **options))


def swin():
    return stirred(
        timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=40, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(1, 2)
        ),
        0.1,
    )


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def classes():
    return torch.tensor([4, 0, 2])


def plain_attribution(model, images, classes, **options):
    """The oracle, picture by picture; it gets the tokens that enter the first block."""
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        tokens = twin.norm_pre(twin._pos_embed(twin.patch_embed(images.double())))
    eps = model.norm.eps
    rows = [
        oracle.attribution(one, model.state_dict(), model.blocks[0].attn.num_heads, eps, int(chosen), **options)
        for one, chosen in zip(tokens, classes, strict=True)
    ]
    return torch.stack(rows)[:, model.num_prefix_tokens :].reshape(len(images), 4, 4)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (vit, {}),
        (lambda: vit(reg_tokens=2, qkv_bias=False), {}),
        (lambda: vit(init_values=0.5), {"scales": True}),
        (lambda: lvvit(residual_scale=1.0), {"skip": 1.0}),
        (lambda: lvvit(residual_scale=2.0), {"skip": 2.0}),
        (lambda: lvvit(residual_scale=3.0, dense=True, readout="class+max"), {"skip": 3.0}),
    ],
    ids=["vit", "registers", "layer scale", "lvvit 1", "lvvit 2", "lvvit 3, dense"],
)
def test_attribution_is_that_of_the_oracle_for_batches_of_any_classes(make, options, images, classes):
    model = make()
    heat = Explainer(model, F64).heat(images, classes)
    expected = plain_attribution(model, images, classes, **options)
    assert expected.std() > 1e-6  # there is something to see
    torch.testing.assert_close(heat, expected, rtol=1e-7, atol=1e-12)
    alone = Explainer(model, F64).heat(images[1:2], classes[1:2])
    torch.testing.assert_close(alone, heat[1:2], rtol=1e-9, atol=1e-14)


def test_the_skip_scale_of_lvvit_matters(images, classes):
    model = lvvit(residual_scale=3.0)
    wrong = plain_attribution(model, images, classes, skip=2.0)  # as the published program has it for every size
    heat = Explainer(model, F64).heat(images, classes)
    assert ((heat - wrong).abs() / wrong.abs().amax()).max() > 0.01


def test_the_official_sizes_have_their_own_skip_scale():
    for name, scale in (("lvvit_t", 1), ("lvvit_s", 2), ("lvvit_m", 2), ("lvvit_l", 3)):
        with torch.device("meta"):
            model = timm.create_model(name)
        assert getattr(model.blocks[0].ls1, "divisor", 1) == scale


def test_attribution_tells_classes_apart(images):
    explainer = Explainer(vit(), F64)
    first, second = (explainer.heat(images, torch.full((3,), one)) for one in (0, 1))
    assert ((first - second).abs().amax((1, 2)) > 0.01 * first.amax((1, 2))).all()


def test_divided_follows_the_published_formula():
    by = torch.tensor([2.0, -2.0, 0.0, 1e-12, -1e-9], dtype=F64)
    expected = [1 / (2 + 1e-9), 1 / (-2 + 1e-9), 0, 1 / (1e-12 + 1e-9), 1e9]
    np.testing.assert_allclose(rules.divided(torch.ones(5, dtype=F64), by), expected, rtol=1e-12)


def test_rules_keep_the_sum_of_relevance():
    g = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.rand(*shape, generator=g, dtype=F64) + 0.1

    x, w, r = draw(2, 4, 6), draw(5, 6), draw(2, 4, 5)
    torch.testing.assert_close(rules.through_linear(x, w, r).sum((1, 2)), r.sum((1, 2)))
    one, other = rules.through_sum(x, 2 * x, draw(2, 4, 6) + 0 * x)
    torch.testing.assert_close(other, 2 * one)
    weights, values, r = draw(2, 3, 4, 4), draw(2, 3, 4, 5), draw(2, 3, 4, 5)
    for part in rules.through_attention(weights, values, r):
        torch.testing.assert_close(part.sum(), r.sum() / 2)
    torch.testing.assert_close(rules.through_copies(x, x, 3 * x), 4 * x, rtol=1e-7, atol=0)
    layers = [draw(2, 4, 4) for _ in range(3)]
    eye = torch.eye(4, dtype=F64)
    product = (layers[2] + eye) @ (layers[1] + eye) @ (layers[0] + eye)
    torch.testing.assert_close(rules.class_row(layers), product[:, 0])


def test_summands_of_opposite_sign_are_rescaled_for_each_sample():
    first, second = torch.tensor([[3.0, 1.0], [1.0, 1.0]]).double(), torch.tensor([[-1.0, 1.0], [2.0, 2.0]]).double()
    relevance = torch.tensor([[2.0, 4.0], [3.0, 3.0]]).double()
    one, other = rules.through_sum(first, second, relevance)
    # Sample 0: 3 + 2 = 5 and -1 + 2 = 1, of 6 in all: 5/6 and 1/6. Sample 1: a third and two thirds of each.
    np.testing.assert_allclose(one, [[3, 2], [1, 1]], rtol=1e-6)
    np.testing.assert_allclose(other, [[-1, 2], [2, 2]], rtol=1e-6)


def test_rollout_of_a_vit_is_the_product_of_its_layers(images):
    model = vit(reg_tokens=1)
    seen = []
    twin = copy.deepcopy(model).double()
    for block in twin.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, given: seen.append(given[0].mean(1)))
    with torch.no_grad():
        twin(images.double())
    joint = torch.eye(18, dtype=F64).expand(3, 18, 18)
    for layer in seen:
        joint = (layer + torch.eye(18, dtype=F64)) / 2 @ joint
    heat = Explainer(model, F64).heat(images, method="rollout")
    torch.testing.assert_close(heat, joint[:, 0, 2:].reshape(3, 4, 4))


def test_rollout_of_a_swin_is_the_share_of_each_patch_alone():
    """The oracle is the follower itself, a plan for each patch: 10 x 10 patches in windows of 4, padded and shifted."""
    model = swin()
    image = torch.randn(1, 3, 40, 40, generator=torch.Generator().manual_seed(3))
    explainer = Explainer(model)
    heat = explainer.heat(image, method="rollout")
    assert heat.shape == (1, 10, 10)
    torch.testing.assert_close(heat.sum(), torch.tensor(1.0))
    aligner = at.TLAlign(model)
    for row, column in ((0, 0), (3, 4), (9, 9), (5, 0)):
        mask = torch.zeros(1, 40, 40)
        mask[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1
        with aligner.follow(at.MixPlan(torch.tensor([0]), mask)), torch.no_grad():
            model(image)
        torch.testing.assert_close(heat[0, row, column], aligner.share[0], rtol=1e-4, atol=1e-7)


def test_class_attention_is_the_published_programs():
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    model.load_state_dict(golden_weights(golden_json("deit_tiny_state_dict.json")["deit_tiny_c10"]))
    explainer = Explainer(model)
    images = golden_input(200, (4, 3, 224, 224))[:2]
    golden = golden_arrays("transmix.npz")
    heat = explainer.heat(images, method="class_attention")
    np.testing.assert_allclose(heat.flatten(1), golden["deit_tiny_cls_attn"][:2], atol=2e-5, rtol=1e-4)
    expected = torch.as_tensor(golden["deit_tiny_logits"][:2]).softmax(-1)
    torch.testing.assert_close(explainer.probabilities(images), expected, atol=2e-5, rtol=1e-4)


def test_token_heat_is_the_dense_heads_probability(images, classes):
    model = lvvit(dense=True)
    with torch.no_grad():
        tokens = model(images, tokens=True).token_logits.softmax(-1)
    heat = Explainer(model).heat(images, classes, "token_heat")
    for index, chosen in enumerate(classes):
        torch.testing.assert_close(heat[index].flatten(), tokens[index, :, chosen])
    wrapped = TokenClassifier(swin())
    heat = Explainer(wrapped).heat(torch.zeros(1, 3, 40, 40), torch.tensor([7]), "token_heat")
    assert heat.shape == (1, 5, 5)
    assert Explainer(wrapped).methods == ("rollout", "token_heat")


def test_single_precision_comes_near(images, classes):
    model = vit()
    exact, quick = (Explainer(model, dtype).heat(images, classes).double() for dtype in (F64, torch.float32))
    assert ((exact - quick).abs() / exact.amax((1, 2), keepdim=True)).max() < 0.05


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_as_it_was_whatever_happens(method, images, classes):
    model = lvvit(dense=True).train()
    aligner = at.TLAlign(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = {name: sorted(vars(module)) for name, module in model.named_modules()}
    rng = torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        before = model(images)
    model.train()
    for dtype in (None, F64):
        explainer = Explainer(model, dtype)
        explainer.heat(images, classes, method)
        wrong = images[:, :, :12] if method not in ("attribution",) else images
        with pytest.raises(Exception):  # noqa: B017 (whatever it is)
            explainer.heat(wrong, torch.tensor([0, 99, 0]) if method == "attribution" else classes, method)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in explainer.net.modules())
        explainer.heat(images, classes, method)  # and the explainer goes on working
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == names
    for name, value in model.state_dict().items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name]), name
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(images), before)
    aligner.detach()


@pytest.mark.parametrize(
    ("make", "method", "says"),
    [
        (
            swin,
            "attribution",
            "classify one class token; this SwinTransformer is none.*Defined for this model: rollout",
        ),
        (swin, "class_attention", "no class token"),
        (lambda: vit(global_pool="avg"), "attribution", "this VisionTransformer is none"),
        (lambda: vit(num_classes=0), "attribution", "has no classifier"),
        (vit, "token_heat", "no dense head.*Defined for this model: attribution, rollout, class_attention"),
        (lambda: timm.create_model("resnet10t"), "rollout", "cannot be followed.*No method is"),
    ],
)
def test_where_a_method_is_not_defined_the_error_says_which_are(make, method, says, images):
    with pytest.raises(at.UnsupportedModel, match=f"{method} is not defined for this model: .*{says}"):
        Explainer(make()).heat(images, torch.zeros(3, dtype=torch.int64), method)


def test_mistakes_are_named(images):
    explainer = Explainer(vit())
    with pytest.raises(at.UserError, match=r"unknown method 'roll'. Did you mean 'rollout'"):
        explainer.heat(images, method="roll")
    with pytest.raises(at.UserError, match=r"wants a class for each of the 3 pictures, got none"):
        explainer.heat(images)
    with pytest.raises(at.UserError, match=r"tells 5 classes apart.*\[0, 9, 0\]"):
        explainer.heat(images, torch.tensor([0, 9, 0]))
    with pytest.raises(at.UserError, match="floating-point"):
        Explainer(vit(), torch.int64)
    with pytest.raises(at.UserError, match="compiled"):
        Explainer(torch.compile(vit(), backend="eager"))
