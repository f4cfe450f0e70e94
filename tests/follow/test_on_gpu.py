"""TLAlign as it trains on a GPU: bfloat16, compiled, checkpointed; through fused attention with and without bias."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import alltokens as at
from alltokens.follow import tap
from alltokens.follow.tl_align import TLAlign

pytestmark = pytest.mark.gpu
MODELS = {  # cut short: what is compiled here is compiled four times
    "deit_tiny_patch16_224": {"depth": 2},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2), "num_heads": (3, 6)},
    "lvvit_t": {"depth": 2},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
}


def trained(
    net: nn.Module, images: Tensor, plan: at.Plan, *, follow: bool = True, compiled: bool = False, exact: bool = False
) -> tuple[Tensor | None, Tensor]:
    """(The share or None, all gradients in a row) of one step in bfloat16, or in float32."""
    net.zero_grad()
    aligner = TLAlign(net) if follow else None
    run = torch.compile(net, fullgraph=True) if compiled else net
    with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
        if aligner is None:
            logits = run(images)
        else:
            with aligner.follow(plan):
                logits = run(images)
        loss = logits.float().square().mean()
    loss.backward()
    share = None
    if aligner is not None:
        share = aligner.share
        aligner.detach()
    torch._dynamo.reset()
    return share, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_following_changes_no_gradient_and_every_way_gives_one_share(name, compiled, checkpointing, monkeypatch):
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=10, **MODELS[name]).cuda().train()
    for module in net.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    if checkpointing:
        net.set_grad_checkpointing()
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0)).cuda()
    plan = at.draw_cutmix(8, 224, patch_size=16, generator=torch.Generator().manual_seed(1)).to("cuda")
    images = at.mix_images(images, plan)
    share, gradients = trained(net, images, plan, compiled=compiled)
    _, alone = trained(net, images, plan, follow=False, compiled=compiled)
    exact_share, exact = trained(net, images, plan, exact=True)
    torch.testing.assert_close(share, exact_share, atol=2e-2, rtol=0)  # query and key are rounded
    assert (gradients - exact).norm() <= 1.2 * (alone - exact).norm()  # no further from the truth than without
    monkeypatch.setattr(tap, "can_carry", lambda *_: False)
    separate, _ = trained(net, images, plan)
    torch.testing.assert_close(share, separate, atol=1e-2, rtol=0)
