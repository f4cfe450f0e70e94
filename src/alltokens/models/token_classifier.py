"""A dense head for any timm model: every token of its last features is classified too.

Shapes: B batch, c channels, H and W picture, h and w token grid, N = h * w tokens, T tokens with prefix ones, C
channels, K classes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from alltokens.errors import UnsupportedModel, UserError
from alltokens.models.token_output import TokenOutput, answers_for_tokens


class TokenClassifier(nn.Module):
    """`net(images) -> (B, K)` is the model's own answer; `net(images, tokens=True) -> TokenOutput` adds the tokens'.

    A linear layer, `aux_head`, classifies what the model's own head would pool: patch tokens after the last norm, or
    the places of the last feature map. The model's weights stay its own, under `model`; what stock timm is to load is
    `net.model`. Models with a dense head of their own (LV-ViT built with dense=True) need no wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if answers_for_tokens(model):
            raise UserError(f"{type(model).__name__} has a dense head of its own; use it as it is")
        if getattr(model, "aux_head", None) is not None:
            raise UserError(
                f"{type(model).__name__} has a dense head that it does not let one ask; build it without, by "
                "use_aux_head=False (in a recipe model.options: {use_aux_head: false})"
            )
        for name in ("forward_features", "forward_head", "num_features", "num_classes"):
            if not hasattr(model, name):
                raise UnsupportedModel(f"{type(model).__name__} is no timm classifier: it has no {name}")
        self.model = model
        self.aux_head = nn.Linear(cast(int, model.num_features), self.num_classes)
        trunc_normal_(self.aux_head.weight, std=0.02)
        nn.init.zeros_(self.aux_head.bias)

    @property
    def num_classes(self) -> int:
        return cast(int, self.model.num_classes)

    # What optimizers and trainers of timm models ask for, with the names that the weights have in here.

    def no_weight_decay(self) -> set[str]:
        names = getattr(self.model, "no_weight_decay", None)
        return {f"model.{name}" for name in names()} if names is not None else set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's regular expressions for layer-wise rates; the dense head belongs to no layer: it comes last."""

        def inside(pattern: Any) -> Any:
            if isinstance(pattern, str):
                return rf"^model\.(?:{pattern.replace('^', '')})"
            return type(pattern)(inside(part) if isinstance(part, str | list | tuple) else part for part in pattern)

        return {name: inside(pattern) for name, pattern in cast(Any, self.model).group_matcher(coarse).items()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        cast(Any, self.model).set_grad_checkpointing(enable)

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.model.pretrained_cfg)

    def forward(self, images: Tensor, tokens: bool = False) -> Tensor | TokenOutput:
        """(B, c, H, W) -> (B, K), or with `tokens` the logits of the picture and of every token."""
        if not tokens:
            return self.model(images)
        features = cast(Any, self.model).forward_features(images)
        logits = cast(Any, self.model).forward_head(features)
        return TokenOutput(logits, self.aux_head(self._tokens(features)))

    def token_grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the tokens of a picture of this size."""
        like = next(self.model.parameters())
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            features = cast(Any, self.model).forward_features(like.new_zeros(1, 3, *image_size))
        self.model.train(was_training)
        if features.ndim == 4:
            rows, columns = features.shape[1:3] if self._channels_last else features.shape[2:4]
            return int(rows), int(columns)
        embedding = getattr(self.model, "patch_embed", None)
        if hasattr(embedding, "dynamic_feat_size"):
            rows, columns = cast(Any, embedding).dynamic_feat_size(image_size)
        else:  # mixers and pyramids that end in a sequence: square parts of the picture
            count = features.shape[1] - self._prefix
            rows = round((count * image_size[0] / image_size[1]) ** 0.5)
            columns = count // rows
        assert rows * columns == features.shape[1] - self._prefix, "the tokens are no grid"
        return int(rows), int(columns)

    @property
    def _prefix(self) -> int:
        """Class tokens, registers: tokens that stand for no place."""
        if hasattr(self.model, "num_prefix_tokens"):
            return cast(int, self.model.num_prefix_tokens)
        return int(getattr(self.model, "cls_token", None) is not None)

    @property
    def _channels_last(self) -> bool:
        return getattr(self.model, "output_fmt", "NCHW") == "NHWC"

    def _tokens(self, features: Tensor) -> Tensor:
        """(B, N, C): what is classified at every place, after the norm that the model's own head applies."""
        if not isinstance(features, Tensor):
            raise UnsupportedModel(f"{type(self.model).__name__} gives no single feature map, so it has no tokens")
        if features.ndim == 4:
            norm = getattr(getattr(self.model, "head", None), "norm", None)  # ConvNeXt's comes after its pooling
            if isinstance(norm, nn.Module):
                features = norm(features)
            return features.flatten(1, 2) if self._channels_last else features.flatten(2).transpose(1, 2)
        tokens = features[:, self._prefix :]
        norm = getattr(self.model, "fc_norm", None)  # ViTs that pool the mean norm it afterwards
        return norm(tokens) if isinstance(norm, nn.Module) else tokens
