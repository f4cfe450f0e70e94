import pytest
import timm
import torch

from alltokens.engine.config import OptimizerConfig
from alltokens.engine.optimizer import build_optimizer

NET = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=1)


@pytest.mark.parametrize(
    ("name", "device", "fused"),
    [
        ("adamw", "cuda", True),
        ("adam", "cuda", True),
        ("sgd", "cuda", True),
        ("lamb", "cuda", None),
        ("adamw", "cpu", None),
    ],
)
def test_torch_s_own_optimizers_have_one_kernel_on_a_gpu(name, device, fused):
    optimizer = build_optimizer(NET, OptimizerConfig(name=name), 0.1, torch.device(device))
    assert optimizer.defaults.get("fused") is fused
