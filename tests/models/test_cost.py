import pytest
import timm
import torch
from torch import nn

from alltokens.models.cost import gmacs, model_cost, parameter_count, weightless


# Millions of parameters and GMACs as published: Touvron et al. 2021, He et al. 2016, Liu et al. 2021.
@pytest.mark.parametrize(
    ("name", "millions", "published"),
    [
        ("deit_small_patch16_224", 22.05, 4.6),
        ("resnet50", 25.56, 4.1),
        ("swin_tiny_patch4_window7_224", 28.29, 4.5),
        ("cait_xxs24_224", 11.96, 2.5),
    ],
)
def test_costs_are_those_of_the_papers(name, millions, published):
    cost = model_cost(weightless(name))
    assert cost.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert cost.gmacs == pytest.approx(published, rel=0.03)
    assert cost.image_size == (224, 224)


def test_a_small_network_is_counted_exactly():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 8, 5))
    assert parameter_count(net) == (3 * 9 * 4 + 4) + (4 * 48 * 5 + 5)
    assert gmacs(net, (6, 8)) * 1e9 == pytest.approx(48 * 27 * 4 + 4 * 48 * 5)


def test_attention_counts_the_same_fused_or_not(monkeypatch):
    fused = timm.create_model("vit_tiny_patch16_224", depth=2)
    plain = timm.create_model("vit_tiny_patch16_224", depth=2)
    for block in plain.blocks:
        monkeypatch.setattr(block.attn, "fused_attn", False)
    assert gmacs(fused, 224) == gmacs(plain, 224)


def test_counting_leaves_the_model_as_it_was():
    model = timm.create_model("resnet18", num_classes=3)
    model.layer1.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert gmacs(model, 64) > 0
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_cost_of_pictures_grows_with_their_area():
    model = timm.create_model("resnet18")
    features = gmacs(model, 64) - 512 * 1000 / 1e9
    assert gmacs(model, 128) - 512 * 1000 / 1e9 == pytest.approx(4 * features)
