"""PVT, the Pyramid Vision Transformer (Wang et al., ICCV 2021), which timm has only in its second version.

Shapes: B batch, C channels, h and w token grid, N = h * w tokens, H heads.

Names of parameters are the official ones, so official checkpoints load. Created through timm:
`timm.create_model("pvt_tiny", num_classes=100)`, any picture size that divides by 32 through `img_size`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD  # pyright: ignore[reportPrivateImportUsage]
from timm.layers.drop import DropPath, calculate_drop_path_rates
from timm.layers.mlp import Mlp
from timm.layers.weight_init import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alltokens.errors import UserError

Grid = tuple[int, int]
DIMS, HEADS, MLP_RATIOS, REDUCTIONS = (64, 128, 320, 512), (1, 2, 5, 8), (8, 8, 4, 4), (8, 4, 2, 1)


class ReducedAttention(nn.Module):
    """Self-attention whose keys and values come from a grid made coarser `reduction` times by a strided convolution."""

    def __init__(self, dim: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads, self.reduction = heads, reduction
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        batch, count, dim = tokens.shape
        source = tokens
        if self.reduction > 1:
            picture = tokens.transpose(1, 2).reshape(batch, dim, *grid)
            source = self.norm(self.sr(picture).flatten(2).transpose(1, 2))  # (B, N / reduction^2, C)
        query = self.q(tokens).view(batch, count, self.heads, -1).transpose(1, 2)  # (B, H, N, C / H)
        key, value = self.kv(source).view(batch, source.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, count, dim))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, dim: int, heads: int, reduction: int, mlp_ratio: int, drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = ReducedAttention(dim, heads, reduction)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, dim * mlp_ratio, drop=drop)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        tokens = tokens + self.drop_path1(self.attn(self.norm1(tokens), grid))
        return tokens + self.drop_path2(self.mlp(self.norm2(tokens)))


class PatchMerging(nn.Module):
    """Patches that do not overlap, of the picture or of the stage before: (B, C, h, w) -> (B, N, C')."""

    def __init__(self, channels: int, dim: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(channels, dim, size, size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, picture: Tensor) -> tuple[Tensor, Grid]:
        merged = self.proj(picture)
        return self.norm(merged.flatten(2).transpose(1, 2)), (merged.shape[2], merged.shape[3])


class PyramidVisionTransformer(nn.Module):
    """Four stages, each on a coarser grid; the class token joins in the last one."""

    def __init__(
        self,
        depths: tuple[int, ...],
        dims: tuple[int, ...] = DIMS,
        heads: tuple[int, ...] = HEADS,
        mlp_ratios: tuple[int, ...] = MLP_RATIOS,
        reductions: tuple[int, ...] = REDUCTIONS,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 224,
        global_pool: str = "token",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if global_pool != "token":
            raise UserError(f"PVT classifies its class token: global_pool must be 'token', got {global_pool!r}")
        size = (img_size, img_size) if isinstance(img_size, int) else img_size
        if size[0] % 32 or size[1] % 32:
            raise UserError(f"PVT merges patches down to 1/32 of the picture: img_size must divide by 32, got {size}")
        self.num_classes, self.global_pool, self.depths = num_classes, global_pool, depths
        self.num_features = self.head_hidden_size = self.embed_dim = dims[-1]
        self.grid_sizes = [(size[0] // (4 << stage), size[1] // (4 << stage)) for stage in range(len(depths))]
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 << stage, "module": f"block{stage + 1}"} for stage, dim in enumerate(dims)
        ]
        self.grad_checkpointing = False
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        for stage, (depth, dim, grid) in enumerate(zip(depths, dims, self.grid_sizes, strict=True)):
            last = stage == len(depths) - 1
            channels = in_chans if stage == 0 else dims[stage - 1]
            blocks = [
                Block(dim, heads[stage], reductions[stage], mlp_ratios[stage], drop_rate, drop_paths[stage][index])
                for index in range(depth)
            ]
            number = stage + 1  # the official names count from 1
            setattr(self, f"patch_embed{number}", PatchMerging(channels, dim, 4 if stage == 0 else 2))
            setattr(self, f"pos_embed{number}", nn.Parameter(torch.zeros(1, grid[0] * grid[1] + last, dim)))
            setattr(self, f"pos_drop{number}", nn.Dropout(drop_rate))
            setattr(self, f"block{number}", nn.ModuleList(blocks))
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims[-1]))
        self.head = nn.Linear(dims[-1], num_classes) if num_classes else nn.Identity()
        for name, parameter in self.named_parameters():
            if "pos_embed" in name or name == "cls_token":
                trunc_normal_(parameter, std=0.02)
        self.apply(_init)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, 1 + N, C): the class token and the patches of the last grid."""
        tokens = images
        for stage, trained_grid in enumerate(self.grid_sizes):
            number = stage + 1
            tokens, grid = getattr(self, f"patch_embed{number}")(tokens)
            position = getattr(self, f"pos_embed{number}")
            last = number == len(self.grid_sizes)
            if last:
                tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
            tokens = getattr(self, f"pos_drop{number}")(tokens + _resized(position, trained_grid, grid, int(last)))
            for block in getattr(self, f"block{number}"):
                if self.grad_checkpointing and self.training:
                    tokens = checkpoint(block, tokens, grid, use_reentrant=False)
                else:
                    tokens = block(tokens, grid)
            if not last:
                tokens = tokens.transpose(1, 2).reshape(len(tokens), -1, *grid)
        return self.norm(tokens)

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        return tokens[:, 0] if pre_logits else self.head(tokens[:, 0])

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", *(f"pos_embed{number + 1}" for number in range(len(self.grid_sizes)))}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool not in (None, "token"):
            raise UserError(f"PVT classifies its class token: global_pool must be 'token', got {global_pool!r}")
        self.num_classes = num_classes
        weight = self.cls_token
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head = head.to(weight.device, weight.dtype)


def _resized(position: Tensor, trained: Grid, grid: Grid, prefix: int) -> Tensor:
    """The position embedding on another grid than it was made for; the class token's entry stays."""
    if trained == grid:
        return position
    picture = position[:, prefix:].transpose(1, 2).reshape(1, -1, *trained)
    resized = F.interpolate(picture, size=grid, mode="bilinear").flatten(2).transpose(1, 2)
    return torch.cat([position[:, :prefix], resized], dim=1)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _cfg() -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed1.proj",
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs({f"pvt_{size}": _cfg() for size in ("tiny", "small", "medium", "large")})


def _create(name: str, pretrained: bool, depths: tuple[int, ...], **kwargs: Any) -> PyramidVisionTransformer:
    return build_model_with_cfg(PyramidVisionTransformer, name, pretrained, depths=depths, **kwargs)


@register_model
def pvt_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    return _create("pvt_tiny", pretrained, (2, 2, 2, 2), **kwargs)


@register_model
def pvt_small(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    return _create("pvt_small", pretrained, (3, 4, 6, 3), **kwargs)


@register_model
def pvt_medium(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    return _create("pvt_medium", pretrained, (3, 4, 18, 3), **kwargs)


@register_model
def pvt_large(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    return _create("pvt_large", pretrained, (3, 8, 27, 3), **kwargs)
