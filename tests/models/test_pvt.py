"""PVT: the official sizes, names and forward."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F

import alltokens as at
from alltokens.models.pvt import PyramidVisionTransformer

TINY = {"depths": (1, 1, 1, 2), "dims": (16, 16, 32, 32), "heads": (1, 2, 2, 2), "num_classes": 3}


def tiny(**options) -> PyramidVisionTransformer:
    torch.manual_seed(0)
    return PyramidVisionTransformer(**{**TINY, "img_size": 64, **options})


@pytest.mark.parametrize(
    ("name", "millions"), [("pvt_tiny", 13.2), ("pvt_small", 24.5), ("pvt_medium", 44.2), ("pvt_large", 61.4)]
)
def test_sizes_are_those_of_the_paper(name, millions):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


def test_names_are_the_official_ones():
    names = set(tiny().state_dict())
    block = {f"block1.0.{part}" for part in ("norm1.weight", "attn.q.bias", "attn.kv.weight", "attn.sr.weight")}
    block |= {f"block1.0.{part}" for part in ("attn.norm.bias", "attn.proj.weight", "norm2.bias", "mlp.fc1.weight")}
    rest = {"patch_embed4.proj.weight", "patch_embed1.norm.bias", "pos_embed1", "pos_embed4", "cls_token", "head.bias"}
    assert block | rest | {"norm.weight"} <= names
    assert "block4.0.attn.sr.weight" not in names  # the last stage reduces nothing
    assert tiny().pos_embed4.shape == (1, 1 + 4, 32)


def test_attention_reads_keys_from_the_reduced_grid():
    attention = tiny().block1[0].attn
    tokens, grid = torch.randn(2, 16 * 16, 16), (16, 16)
    reduced = F.conv2d(tokens.transpose(1, 2).reshape(2, 16, 16, 16), attention.sr.weight, attention.sr.bias, 8)
    source = attention.norm(reduced.flatten(2).transpose(1, 2))
    key, value = attention.kv(source).chunk(2, -1)
    weights = (attention.q(tokens) @ key.transpose(1, 2) / 4).softmax(-1)
    torch.testing.assert_close(attention(tokens, grid), attention.proj(weights @ value))


def test_every_parameter_gets_a_gradient_and_checkpointing_the_same_one():
    model, images, gradients = tiny(drop_path_rate=0.0).train(), torch.randn(2, 3, 64, 64), []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(images).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_other_picture_sizes_and_class_counts_work():
    model = tiny().eval()
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 3)
    model.reset_classifier(7)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 32)
    assert model.forward_features(torch.randn(2, 3, 64, 64)).shape == (2, 5, 32)


@pytest.mark.parametrize("options", [{"img_size": 48}, {"global_pool": "avg"}])
def test_what_it_cannot_do_it_says(options):
    with pytest.raises(at.UserError, match="must"):
        tiny(**options)
