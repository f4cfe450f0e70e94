"""LV-ViT (Jiang et al., NeurIPS 2021): a ViT with a convolutional stem, scaled residuals and a dense head.

Shapes: B batch, c channels, H and W picture, N patch tokens, T = 1 + N tokens, C width, K classes.

Everything but these three is timm's VisionTransformer, so its features, checkpointing and our followers work as they
do there. Names of parameters are the official ones, so published weights load (`alltokens.load_weights`). Created
through timm: `timm.create_model("lvvit_s", num_classes=100)`; for small pictures, for example
`timm.create_model("lvvit_t", img_size=64, patch_size=8, embed_dim=64, depth=4, num_heads=2, stem_channels=24)`.
MixToken mixes what `patch_embed` gives out: no class token and no positions are in it yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD  # pyright: ignore[reportPrivateImportUsage]
from timm.layers.weight_init import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from alltokens.errors import UserError, unknown
from alltokens.models.conv_stem import ConvStem
from alltokens.models.token_output import TokenOutput
from alltokens.models.weights import resize_positions

READOUTS = ("class", "class+max")
DENSE_SHARE = 0.5  # of the best token's logits in "class+max" (FACTS section 1)


class Divide(nn.Module):
    """The scale of a residual branch: X + F(X) / divisor (paper, supplement, table 4)."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, branch: Tensor) -> Tensor:
        return branch / self.divisor

    def extra_repr(self) -> str:
        return f"divisor={self.divisor:g}"


def scaled_block(residual_scale: float, **options: Any) -> Block:
    """timm's block with both branches divided, in the place of layer scale.

    Published is the division after stochastic depth, which scales whole branches: the order makes no difference.
    """
    block: Any = Block(**options)
    if residual_scale != 1:
        block.ls1, block.ls2 = Divide(residual_scale), Divide(residual_scale)
    return block


class LVViT(VisionTransformer):
    """`net(images) -> (B, K)`; with a dense head also `net(images, tokens=True) -> TokenOutput`.

    dense: build the dense head `aux_head`, which classifies every patch token and is there to be trained with token
        labels.
    readout: what `net(images)` answers in evaluation. "class" is the class token alone; "class+max" adds half of each
        class's best token, as the published program does. That asks for a dense head that has been trained, so it is
        never the default, and a new classifier takes it back to "class".
    residual_scale: what both branches of each block are divided by. stem_*: see `conv_stem`.
    options: the others of timm's VisionTransformer.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 16,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        residual_scale: float = 2.0,
        stem_channels: int | Sequence[int] = 64,
        stem_kernels: Sequence[int] | None = None,
        stem_strides: Sequence[int] | None = None,
        dense: bool = False,
        readout: str = "class",
        **options: Any,
    ) -> None:
        if residual_scale <= 0:
            raise UserError(f"residual_scale must be positive (the paper compares 1, 2 and 3), got {residual_scale}")
        if options.get("init_values") is not None:
            raise UserError("LV-ViT scales its residuals by residual_scale: init_values (layer scale) has no place")
        if dense and options.get("patch_drop_rate"):
            raise UserError("a dense head needs every token: build the model with patch_drop_rate=0")
        super().__init__(
            **{
                "qkv_bias": False,
                "norm_layer": partial(nn.LayerNorm, eps=1e-5),  # timm's own default is 1e-6
                "fc_norm": False,  # one norm for the class token and the patches, also where their mean is classified
                **options,
            },
            img_size=img_size,
            patch_size=patch_size,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            embed_layer=partial(ConvStem, channels=stem_channels, kernels=stem_kernels, strides=stem_strides),
            block_fn=partial(scaled_block, residual_scale),  # pyright: ignore[reportArgumentType]
        )
        self.aux_head = self._new_dense_head() if dense else None
        if isinstance(self.aux_head, nn.Linear):
            trunc_normal_(self.aux_head.weight, std=0.02)
            nn.init.zeros_(self.aux_head.bias)
        self._readout = "class"
        self.readout = readout

    @property
    def dense(self) -> bool:
        return self.aux_head is not None

    @property
    def readout(self) -> str:
        return self._readout

    @readout.setter
    def readout(self, readout: str) -> None:
        if readout not in READOUTS:
            raise unknown("readout", readout, READOUTS)
        if readout != "class" and not (self.dense and self.num_classes and self.global_pool):
            raise UserError(
                f"readout={readout!r} reads the dense head beside one pooled token: build the model with dense=True, "
                "classes and a global_pool, or take readout='class'"
            )
        self._readout = readout

    def init_weights(self, *arguments: Any, **options: Any) -> None:
        super().init_weights(*arguments, **options)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward(self, images: Tensor, tokens: bool = False) -> Tensor | TokenOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(B, c, H, W) -> (B, K), or with `tokens` the logits of the class token and of every patch."""
        features = self.forward_features(images)  # (B, T, C)
        if not tokens:
            return self.forward_head(features)
        if self.aux_head is None:
            raise UserError("this model has no dense head: build it with dense=True to ask for tokens")
        return TokenOutput(self._class_logits(features), self._token_logits(features))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, T, C) -> (B, K), by the read-out in evaluation and from the class token alone in training."""
        if pre_logits or self.training or self.readout == "class":
            return super().forward_head(x, pre_logits)
        return self._class_logits(x) + DENSE_SHARE * self._token_logits(x).amax(1)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New heads, both of them; an untrained dense head is not read out."""
        super().reset_classifier(num_classes, global_pool)
        if self.dense:
            self.aux_head = self._new_dense_head()
        self.readout = "class"

    def _class_logits(self, features: Tensor) -> Tensor:
        return super().forward_head(features)

    def _token_logits(self, features: Tensor) -> Tensor:
        assert self.aux_head is not None
        return self.aux_head(features[:, self.num_prefix_tokens :])  # (B, N, K)

    def _new_dense_head(self) -> nn.Module:
        if self.num_classes == 0:
            return nn.Identity()
        weight = self.patch_embed.proj.weight
        return nn.Linear(self.embed_dim, self.num_classes, device=weight.device, dtype=weight.dtype)


def fit_checkpoint(state: Mapping[str, Tensor], model: LVViT) -> dict[str, Tensor]:
    """Weights for timm's own loading: positions on the model's grid, the dense head only where it is the model's."""
    dense = model.state_dict().get("aux_head.weight")
    given = state.get("aux_head.weight")
    same_head = dense is not None and given is not None and dense.shape == given.shape
    fitted = {name: value for name, value in state.items() if same_head or not name.startswith("aux_head.")}
    positions, own = fitted.get("pos_embed"), model.pos_embed
    if positions is not None and own is not None and positions.shape != own.shape:
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        fitted["pos_embed"] = resize_positions(positions, model.patch_embed.grid_size, prefix)
    return fitted


def _cfg(crop_pct: float) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.conv1",
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs(
    {"lvvit_t": _cfg(0.9), "lvvit_s": _cfg(0.9), "lvvit_m": _cfg(1.0), "lvvit_l": _cfg(1.0)}
)


def _create(name: str, pretrained: bool, options: dict[str, Any], **sizes: Any) -> LVViT:
    options = {**sizes, **options}
    return build_model_with_cfg(
        LVViT,
        name,
        pretrained,
        pretrained_filter_fn=fit_checkpoint,
        feature_cfg={"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"},
        **options,
    )


@register_model
def lvvit_t(pretrained: bool = False, **kwargs: Any) -> LVViT:
    return _create("lvvit_t", pretrained, kwargs, embed_dim=240, depth=12, num_heads=4, residual_scale=1.0)


@register_model
def lvvit_s(pretrained: bool = False, **kwargs: Any) -> LVViT:
    return _create("lvvit_s", pretrained, kwargs, embed_dim=384, depth=16, num_heads=6)


@register_model
def lvvit_m(pretrained: bool = False, **kwargs: Any) -> LVViT:
    return _create("lvvit_m", pretrained, kwargs, embed_dim=512, depth=20, num_heads=8)


@register_model
def lvvit_l(pretrained: bool = False, **kwargs: Any) -> LVViT:
    sizes = {"embed_dim": 768, "depth": 24, "num_heads": 12, "residual_scale": 3.0, "stem_channels": 128}
    return _create("lvvit_l", pretrained, kwargs, **sizes)
