"""Followed token labels against the K-wide transport through a network: what our rule keeps, and where it differs."""

from __future__ import annotations

import csv

import pytest
import timm
import torch
from benchmarks.transport import FILE, PAGE, carried, distances, filled, transport

import alltokens as at
from alltokens.core.token_targets import TokenTargets

CLASSES, SIDE, GRID = 4, 32, (4, 4)


@pytest.fixture(params=["cutmix", "mixtoken"])
def mixed(request):
    """Net, pictures, plan and aligner in float64, with attention that is far from uniform."""
    torch.manual_seed(0)
    net = timm.create_model(
        "lvvit_t", img_size=SIDE, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=CLASSES, stem_channels=8
    )
    for block in net.blocks:
        block.attn.qkv.weight.data *= 15
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    draw = at.draw_cutmix if request.param == "cutmix" else at.draw_mixtoken
    plan = draw(3, SIDE, patch_size=8, generator=torch.Generator().manual_seed(4))
    plan = at.MixPlan(plan.partner, plan.mask.double(), plan.place)
    assert 0.1 < float(plan.share[0]) < 0.9
    net = net.double().eval()
    return net, images, plan, at.TLAlign(net)


def random_targets(per_token: bool) -> TokenTargets:
    generator = torch.Generator().manual_seed(2)
    shares = torch.rand(3, 16 if per_token else 1, CLASSES, generator=generator, dtype=torch.float64)
    shares = (6 * shares).softmax(-1).expand(3, 16, CLASSES)
    ids = torch.arange(CLASSES).expand(3, 16, CLASSES)
    nothing, whole = torch.zeros(3, 16, dtype=torch.float64), torch.ones(3, 16, dtype=torch.float64)
    return TokenTargets(ids, shares, nothing, whole, GRID)


def test_the_matrix_carries_shares_as_the_follower_does(mixed):
    net, images, plan, aligner = mixed
    matrix = transport(net, images, plan, aligner, GRID)
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    visible = plan.token_share(GRID).flatten(1)
    moved = carried(net, images, plan, aligner)
    torch.testing.assert_close((matrix @ visible.unsqueeze(-1)).squeeze(-1), moved)
    assert (moved - visible).abs().max() > 0.2


def test_one_label_per_picture_is_carried_exactly(mixed):
    net, images, plan, aligner = mixed
    ours, pasted = distances(net, images, plan, aligner, random_targets(per_token=False), CLASSES)
    assert ours.max() < 1e-12
    assert pasted.max() > 0.02


def test_one_label_per_token_is_near_and_not_equal(mixed):
    net, images, plan, aligner = mixed
    ours, pasted = distances(net, images, plan, aligner, random_targets(per_token=True), CLASSES)
    assert ((ours > 1e-3) & (ours < 1)).all()
    assert not torch.allclose(ours, pasted)


def test_the_page_says_what_was_measured():
    page = PAGE.read_text(encoding="utf-8")
    if not FILE.is_file():
        assert "<!-- benchmarks/transport -->\nNot measured yet.\n" in page
        return
    with FILE.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert filled(page, row) == page
