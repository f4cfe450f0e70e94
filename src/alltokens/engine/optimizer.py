"""The optimizer: timm's factory, with timm's rule of what decays, and layer-wise rates."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import nn

from alltokens.engine.config import OptimizerConfig
from alltokens.errors import UserError

# torch's own that have one kernel for all weights; on a GPU the others keep the host busy for as long as a small step.
_FUSED = ("adam", "adamw", "sgd")


def build_optimizer(
    net: nn.Module, config: OptimizerConfig, peak: float, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a network that is, or will be, on `device`."""
    if config.layer_decay is not None and not hasattr(net, "group_matcher"):
        raise UserError(f"optimizer.layer_decay needs a model that names its layers; {type(net).__name__} does not")
    info = get_optimizer_info(config.name.lower())
    further: dict[str, Any] = {}
    for name, value, taken in (("betas", config.betas, info.has_betas), ("eps", config.eps, info.has_eps)):
        if value is not None and not taken:  # timm would drop it without a word
            raise UserError(f"the optimizer {config.name!r} does not take these settings: optimizer.{name}")
        if value is not None:
            further[name] = value
    if device is not None and device.type == "cuda" and config.name.lower() in _FUSED:
        further["fused"] = True
    try:
        return create_optimizer_v2(
            net,
            opt=config.name.lower(),
            lr=peak,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            **further,
        )
    except TypeError as error:
        raise UserError(f"the optimizer {config.name!r} does not take these settings: {error}") from None


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)  # lr_scale: timm's layer decay
