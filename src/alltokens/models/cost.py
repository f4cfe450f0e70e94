"""What a model costs: its parameters, and the multiply-accumulates of one picture.

Counted on the meta device: nothing is computed and no weight is copied, so a giant takes as long as a dwarf. Only
matrix products, convolutions and attention count, as in the tables of the papers; two FLOPs are one MAC.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import timm
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


class ModelCost(NamedTuple):
    parameters: int
    gmacs: float | None
    """None when the model cannot run without real weights."""
    image_size: tuple[int, int]


def weightless(name: str, **options: Any) -> nn.Module:
    """One of timm's models without its weights: to be looked at, not to be run."""
    try:
        with torch.device("meta"):
            return timm.create_model(name, **options)
    except (RuntimeError, NotImplementedError):  # a few constructors read values of tensors, which meta tensors lack
        return timm.create_model(name, **options)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def gmacs(model: nn.Module, image_size: int | tuple[int, int], channels: int = 3) -> float:
    """Billions of multiply-accumulates for one picture, as the model runs in evaluation."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    weights = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    picture = torch.empty(1, channels, height, width, device="meta")
    with _in_evaluation(model), FlopCounterMode(display=False) as counter:
        functional_call(model, weights, (picture,))
    return counter.get_total_flops() / 2e9


def in_words(parameters: int, gmacs: float) -> str:
    """5.72 M parameters, 1.25 GMACs"""
    return f"{short(parameters / 1e6)} M parameters, {short(gmacs)} GMACs"


def short(value: float) -> str:
    """5.72, 0.057, 0.0011"""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def model_cost(model: nn.Module) -> ModelCost:
    """The cost of one of timm's models at the input size that it was made for."""
    channels, height, width = _input_size(model)
    try:
        cost = gmacs(model, (height, width), channels)
    except (RuntimeError, NotImplementedError):  # a few forwards read values of tensors, which meta tensors lack
        cost = None
    return ModelCost(parameter_count(model), cost, (height, width))


def _input_size(model: nn.Module) -> tuple[int, int, int]:
    settings: Any = getattr(model, "pretrained_cfg", None) or {}
    return settings.get("input_size", (3, 224, 224))


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Dropout and batch statistics off; every module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
