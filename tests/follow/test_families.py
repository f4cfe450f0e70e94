"""Each family against brute force (oracle.py): shares on the fused path, labels K wide through dense matrices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from timm.layers import LayerNorm, LayerNorm2d
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.metaformer import Attention, MetaFormer, Pooling, SepConv
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)

import alltokens as at
from alltokens.follow.tl_align import TLAlign
from alltokens.models.lvvit import LVViT
from alltokens.models.pvt import PyramidVisionTransformer
from tests.follow import oracle

PLAIN = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": oracle.CLASSES}
VIT = partial(VisionTransformer, **PLAIN)
EVA = partial(Eva, **PLAIN)
CAIT = partial(Cait, img_size=32, depth_token_only=2, init_values=0.5, **PLAIN)
STAGES = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "num_classes": oracle.CLASSES, "window_size": 4}
PYRAMID = {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 2), "num_heads": (1, 2, 2, 2), "num_classes": 5}
MIXER = partial(MlpMixer, img_size=32, patch_size=8, num_blocks=2, embed_dim=32, num_classes=oracle.CLASSES)
META = partial(MetaFormer, depths=(1, 1), dims=(16, 32), num_classes=oracle.CLASSES)
PVT = partial(
    PyramidVisionTransformer,
    depths=(1, 1, 1, 2),
    dims=(16, 16, 16, 16),
    heads=(1, 2, 2, 2),
    num_classes=oracle.CLASSES,
)

# name: (model, (height, width), oracle)
CASES = {
    "vit": (partial(VIT, img_size=32), (32, 32), oracle.vit),
    "vit_wide_picture": (partial(VIT, img_size=(24, 48)), (24, 48), oracle.vit),
    "vit_any_size": (partial(VIT, img_size=32, dynamic_img_size=True), (40, 24), oracle.vit),
    "vit_any_size_padded": (
        partial(VIT, img_size=32, dynamic_img_size=True, dynamic_img_pad=True),
        (30, 44),
        oracle.vit,
    ),
    "vit_average": (partial(VIT, img_size=32, class_token=False, global_pool="avg"), (32, 32), oracle.vit),
    "vit_average_beside_class": (partial(VIT, img_size=32, global_pool="avg"), (32, 32), oracle.vit),
    "vit_map": (partial(VIT, img_size=32, class_token=False, global_pool="map"), (32, 32), oracle.vit),
    "vit_map_beside_class": (partial(VIT, img_size=32, global_pool="map"), (32, 32), oracle.vit),
    "vit_prr": (partial(VIT, img_size=32, global_pool="prr"), (32, 32), oracle.vit),
    "vit_prr_average": (partial(VIT, img_size=32, class_token=False, global_pool="prr"), (32, 32), oracle.vit),
    "vit_registers": (partial(VIT, img_size=32, reg_tokens=3, qk_norm=True, init_values=0.5), (32, 32), oracle.vit),
    "deit3": (partial(VIT, img_size=32, no_embed_class=True, init_values=1e-6), (32, 32), oracle.vit),
    "deit_distilled": (partial(VisionTransformerDistilled, img_size=32, **PLAIN), (32, 32), oracle.vit),
    "vit_res_post": (partial(VIT, img_size=32, block_fn=ResPostBlock), (32, 32), oracle.vit),
    "vit_parallel_scaling": (partial(VIT, img_size=32, block_fn=ParallelScalingBlock), (32, 32), oracle.vit),
    "vit_parallel_things": (partial(VIT, img_size=32, block_fn=ParallelThingsBlock), (32, 32), oracle.vit),
    "lvvit": (partial(LVViT, img_size=32, stem_channels=8, **PLAIN), (32, 32), oracle.vit),
    "eva": (partial(EVA, img_size=32, global_pool="token"), (32, 32), oracle.vit),
    "eva02": (
        partial(EVA, img_size=32, use_rot_pos_emb=True, qkv_fused=False, swiglu_mlp=True, scale_mlp=True),
        (32, 32),
        oracle.vit,
    ),
    "eva_rope_registers": (
        partial(EVA, img_size=32, attn_type="rope", use_rot_pos_emb=True, num_reg_tokens=2, init_values=0.1),
        (32, 32),
        oracle.vit,
    ),
    "eva_post_norm": (partial(EVA, img_size=32, use_post_norm=True, global_pool="token"), (32, 32), oracle.vit),
    "eva_map": (partial(EVA, img_size=32, global_pool="map"), (32, 32), oracle.vit),
    "cait": (CAIT, (32, 32), oracle.cait),
    "swin": (partial(SwinTransformer, img_size=32, patch_size=4, **STAGES), (32, 32), oracle.swin),
    "swin_odd": (partial(SwinTransformer, img_size=(28, 44), patch_size=4, **STAGES), (28, 44), oracle.swin),
    "swin_v2": (partial(SwinTransformerV2, img_size=32, patch_size=4, **STAGES), (32, 32), oracle.swin),
    "swin_v2_odd": (partial(SwinTransformerV2, img_size=(28, 44), patch_size=4, **STAGES), (28, 44), oracle.swin),
    "pvt_v2": (partial(PyramidVisionTransformerV2, **PYRAMID), (64, 32), oracle.pvt),
    "pvt_v2_linear": (partial(PyramidVisionTransformerV2, linear=True, **PYRAMID), (32, 64), oracle.pvt),
    "pvt": (partial(PVT, img_size=(32, 64)), (32, 64), oracle.pvt),
    "mixer": (MIXER, (32, 32), oracle.mixer),
    "resmlp": (partial(MIXER, block_layer=ResBlock, mlp_ratio=4, norm_layer=Affine), (32, 32), oracle.mixer),
    "convnext": (
        partial(ConvNeXt, depths=(1, 1, 2, 1), dims=(8, 16, 16, 16), num_classes=oracle.CLASSES),
        (64, 32),
        oracle.convnext,
    ),
    "poolformer": (partial(META, token_mixers=Pooling), (32, 40), oracle.metaformer),
    "caformer": (
        partial(META, token_mixers=[SepConv, Attention], norm_layers=[LayerNorm2d, LayerNorm], head_dim=8),
        (32, 40),
        oracle.metaformer,
    ),
}


def sharp(build, dtype: torch.dtype) -> torch.nn.Module:
    """A model in evaluation mode, its weights large enough that no attention is near uniform."""
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(
                part in name for part in ("qkv", "in_proj", "q.", "k.", "kv", "q_proj", "k_proj")
            ):
                parameter.normal_(std=0.6)
            elif "pos_embed" in name or "proj_l" in name or "proj_w" in name:
                parameter.normal_(std=0.5)
    return model


def mixed_batch(size: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, at.MixPlan]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, *size, generator=generator).to(dtype)
    edges = torch.tensor([[3, 21, 5, 19], [0, 9, 2, 31], [10, 24, 0, 13]])  # none on the patch grid
    plan = at.MixPlan.from_box(torch.tensor([2, 0, 1]), edges, size)
    return at.mix_images(images, plan), plan


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", CASES)
def test_shares_equal_wide_labels_through_dense_matrices(name, dtype, tolerance):
    build, size, by_brute_force = CASES[name]
    model = sharp(build, dtype)
    images, plan = mixed_batch(size, dtype)
    labels = torch.tensor([0, 3, 1])
    expected, expected_patches = by_brute_force(
        model, images, lambda grid, prefix: oracle.start_labels(plan, labels, grid, prefix)
    )
    aligner = TLAlign(model)
    with torch.no_grad(), aligner.follow(plan):
        model(images)
    one_hot = torch.eye(oracle.CLASSES, dtype=torch.float64)[labels]
    targets = at.blend_targets(one_hot, plan.partner, aligner.share)
    patches = at.blend_targets(one_hot, plan.partner, aligner.token_shares)
    torch.testing.assert_close(targets, expected.reshape_as(targets), atol=tolerance, rtol=0)
    torch.testing.assert_close(patches, expected_patches, atol=tolerance, rtol=0)
    assert aligner.share.dtype == dtype
    assert (aligner.share - plan.share).abs().max() > 1e-3  # it did move
