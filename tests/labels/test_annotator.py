"""What annotators see at every place, over many kinds of model: heads, norms, prefix tokens and channel orders."""

from collections import Counter

import pytest
import timm
import torch
from PIL import Image
from timm.models.volo import VOLO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from alltokens.errors import UnsupportedModel, UserError
from alltokens.labels.annotate import annotate
from alltokens.labels.annotator import PlaceScores, Preprocessing, create_annotator, weights_hash
from alltokens.models.token_classifier import TokenClassifier
from tests.labels.tiny_annotator import OPTIONS, Brittle

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)}
AVERAGE = {"global_pool": "avg", "fc_norm": False}
# Kind -> name, options, grid at 32 px; these read their classes linearly from the mean of the places.
LINEAR = {
    "ResNet": ("resnet10t", {}, (1, 1)),
    "ResNet, stride 8": ("resnet18", {"output_stride": 8}, (4, 4)),
    "channels last (Swin)": ("swin_tiny_patch4_window7_224", SWIN, (8, 8)),
    "channels first, convolutional head (MobileNet)": ("mobilenetv2_035", {"output_stride": 8}, (4, 4)),
    "mean of patches": ("vit_tiny_patch16_224", {**VIT, **AVERAGE, "class_token": False}, (4, 4)),
    "mean beside a class token": ("vit_tiny_patch16_224", {**VIT, **AVERAGE}, (4, 4)),
    "mean beside registers": ("vit_tiny_patch16_224", {**VIT, **AVERAGE, "reg_tokens": 3}, (4, 4)),
    "mixer": ("mixer_s16_224", {"img_size": 32}, (2, 2)),
    "pyramid (PVT)": ("pvt_v2_b0", {}, (1, 1)),
    "1x1 convolution as the classifier (DLA)": ("dla46_c", {}, (1, 1)),
}
# Those whose heads norm or bend what is pooled, or read a class token: nothing to add up, but places all the same.
OTHERS = {
    "norm after pooling (ConvNeXt)": (
        "convnext_atto",
        {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 16), "output_stride": 16},
        (2, 2),
    ),
    "hidden layer in the head (MobileNetV3)": ("mobilenetv3_small_050", {}, (1, 1)),
    "norm of the mean": ("vit_tiny_patch16_224", {**VIT, "global_pool": "avg"}, (4, 4)),
    "class token": ("vit_tiny_patch16_224", VIT, (4, 4)),
    "two prefix tokens (distilled DeiT)": ("deit_tiny_distilled_patch16_224", VIT, (4, 4)),
    "attention pooling": ("vit_tiny_patch16_224", {**VIT, "global_pool": "map", "class_token": False}, (4, 4)),
    "class attention (CaiT)": ("cait_xxs24_224", VIT, (4, 4)),
    "LV-ViT without a dense head": ("lvvit_t", {**VIT, "stem_channels": 8}, (4, 4)),
    "MaxViT": ("maxvit_rmlp_pico_rw_256", {"img_size": 32}, (1, 1)),
}


def built(name, options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options).eval()
    for parameter in model.parameters():  # far from zero heads and uniform attention
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=1.2 / parameter[0].numel() ** 0.5)
    return model


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "options", "grid"), LINEAR.values(), ids=LINEAR)
def test_where_the_head_is_linear_the_mean_of_the_places_is_the_models_answer(name, options, grid, images):
    model = built(name, options)
    scores = PlaceScores(model)(images)
    assert scores.shape == (3, 7, *grid)
    answer = model(images)
    assert answer.std() > 1e-3
    torch.testing.assert_close(scores.mean((2, 3)), answer, atol=1e-4, rtol=1e-4)
    assert grid == (1, 1) or scores.flatten(2).std(2).max() > 1e-3


@pytest.mark.parametrize(("name", "options", "grid"), OTHERS.values(), ids=OTHERS)
def test_other_heads_are_applied_to_every_place_as_they_are(name, options, grid, images):
    """A place's scores are what the model's head says of a picture that is that place all over."""
    model = built(name, options)
    scores = PlaceScores(model)(images)
    assert scores.shape == (3, 7, *grid)
    features = model.forward_features(images)
    if features.ndim == 4:
        place = features[1:2, :, -1:, :1].expand(-1, -1, 3, 3)
    else:
        prefix = getattr(model, "num_prefix_tokens", 1)
        at = prefix + (grid[0] - 1) * grid[1]
        place = features[1:2, at : at + 1].expand(-1, prefix + 9, -1)
    torch.testing.assert_close(scores[1, :, -1, 0], model.forward_head(place)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["lvvit_t", "volo_d1_224", "TokenClassifier"])
def test_a_dense_head_answers_for_the_patches(name, images):
    if name == "TokenClassifier":
        net = TokenClassifier(built("vit_tiny_patch16_224", {**VIT, "reg_tokens": 2})).eval()
        expected = net(images, tokens=True).token_logits
    elif name == "lvvit_t":
        net = built(name, {**VIT, "stem_channels": 8, "dense": True})
        net.readout = "class+max"
        expected = net(images, tokens=True).token_logits
    else:
        torch.manual_seed(0)
        small = {"layers": (1, 1, 1, 1), "embed_dims": (12, 24, 24, 24), "num_heads": (2, 2, 2, 2), "num_classes": 7}
        net = VOLO(img_size=32, stem_hidden_dim=8, **small).eval()
        expected = net.aux_head(net.forward_features(images)[:, 1:])
    scores = PlaceScores(net)(images)
    side = scores.shape[2]
    assert side > 1
    torch.testing.assert_close(scores, expected.transpose(1, 2).unflatten(2, (side, side)), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_place_looks_where_it_lies(name, images):
    """Rows and columns are not confused: what a place answers hangs most on the pixels around it."""
    options = {"resnet18": {"output_stride": 8}, "vit_tiny_patch16_224": VIT}.get(name, SWIN)
    model = built(name, options)
    scores = PlaceScores(model)(images.requires_grad_())
    rows, columns = scores.shape[2:]
    row, column = 0, columns - 1
    (gradient,) = torch.autograd.grad(scores[0, 0, row, column], images)
    energy = nn.functional.adaptive_avg_pool2d(gradient[0].square().sum(0)[None], (rows, columns))[0]
    assert int(energy.argmax()) == row * columns + column


def test_what_cannot_annotate_is_refused(images):
    for name in ("pit_ti_224", "crossvit_tiny_240"):
        model = timm.create_model(name, img_size=224) if name.startswith("pit") else timm.create_model(name)
        size = model.pretrained_cfg["input_size"][-1]
        with pytest.raises(UnsupportedModel):
            PlaceScores(model.eval())(torch.zeros(1, 3, size, size))
    with pytest.raises(UserError, match="no classifier"):
        PlaceScores(timm.create_model("resnet10t", num_classes=0))
    with pytest.raises(UnsupportedModel, match="forward_features"):
        PlaceScores(nn.Linear(3, 3))


def test_models_by_name_and_their_preprocessing(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **VIT)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    same = create_annotator("vit_tiny_patch16_224", weights=tmp_path / "own.pth", options={**VIT, "num_classes": 7})
    assert weights_hash(same) == weights_hash(model.eval())
    with torch.no_grad():
        model.head.bias[3] += 1e-6
    assert weights_hash(same) != weights_hash(model)
    with pytest.raises(UserError, match="num_classes: 10"):
        create_annotator("vit_tiny_patch16_224", weights=tmp_path / "own.pth", options=VIT)
    with pytest.raises(UserError, match="Did you mean 'efficientnet_lite2'"):
        create_annotator("efficientnet_lite22")
    with pytest.raises(UserError, match="options"):
        create_annotator("resnet10t", weights=tmp_path / "own.pth", options={"no_such_thing": 1})
    assert Preprocessing.of(timm.create_model("tf_efficientnet_lite0", num_classes=2)) == (
        224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic",
    )  # fmt: skip


def test_weights_are_cast_once_for_all_batches(tmp_path):
    model = Brittle()
    pictures = [(Image.new("RGB", (32, 32), (at, 90, 0)), f"{at}") for at in range(9)]
    weights = {weight.data_ptr() for weight in model.parameters()}
    cast = Counter()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in weights:
                cast[args[0].data_ptr()] += 1
            return func(*args, **(kwargs or {}))

    with Casts(), torch.inference_mode():
        annotate(model, pictures, tmp_path / "s", precision="bf16", **OPTIONS)
    assert set(cast.values()) == {1}
    assert len(cast) == sum(isinstance(layer, torch.nn.Conv2d) for layer in model.modules()) + 2  # fc: weight, bias
