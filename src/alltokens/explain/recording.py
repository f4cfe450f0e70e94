"""A copy of a model to look into, and what its modules got and gave in a forward.

Shapes: B' batch as attention sees it, H heads, T queries, S keys, d channels of a head; a row is (B, T) or (B, h, w),
see follow/route.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alltokens.core.align import additive_bias, residual, spatial_mixing
from alltokens.core.plan import MixPlan
from alltokens.errors import UnsupportedModel, UserError
from alltokens.follow.route import Attend, Moment, Route, Step
from alltokens.follow.tap import AttentionTap, put, take_away


class Seen(NamedTuple):
    """One call of a module."""

    entered: Any  # its first argument
    came: Any  # its result


def working_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """The same network in evaluation mode, in `dtype`, its parameters without gradients.

    All looking into a model happens in such a copy, so there is nothing to put back, whatever goes wrong.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise UserError("this model is compiled already: look into the bare model")
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"dtype must be a floating-point type, got {dtype}")
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for module in twin.modules():
        # One way of attention to read, and no part of a forward that is run twice.
        for name, value in (("fused_attn", True), ("grad_checkpointing", False)):
            if hasattr(module, name):
                setattr(module, name, value)
    return twin if dtype is None else twin.to(dtype)


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Seen]]:
    """Inside, what each module gets and gives in its last call is kept under its name."""
    seen: dict[str, Seen] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, entered: tuple[Any, ...], came: Any) -> None:
            seen[name] = Seen(entered[0], came)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class Attended(NamedTuple):
    """One call of an attention; the last three are not known of code that only hands over its weights."""

    weights: Tensor  # (B', H, T, S)
    query: Tensor | None = None  # (B', H, T, d), as it is multiplied
    key: Tensor | None = None
    value: Tensor | None = None


class Reader(AttentionTap):
    """Stands where a follower's tap would, and keeps the attention, which it computes explicitly."""

    def __init__(self, step: Step) -> None:
        super().__init__(step, step.terms)
        self.active = True
        self.last: Attended | None = None

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert not (is_causal or enable_gqa), "no module of a family asks for either"
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        bias = additive_bias(attn_mask, None, scores.dtype)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        self.last = Attended(weights, query, key, value)
        return weights @ value


class WeightsReader:
    """Sits on the `attn_drop` of code that never calls fused attention."""

    active = True

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def run(self, module: nn.Module, weights: Tensor) -> Tensor:
        self.reader.last = Attended(weights)
        return type(module).forward(module, weights)


@contextmanager
def reading(route: Route) -> Iterator[dict[Step, Reader]]:
    """Inside, every step of a working copy that attends keeps its attention, gradients included."""
    steps = [*route.steps, *([route.pooling] if route.pooling is not None else [])]
    readers = {step: Reader(step) for step in steps if step.attends}
    put_on: list[nn.Module] = []
    try:
        for step, reader in readers.items():
            drop = getattr(step.module, "attn_drop", None)
            taps: list[tuple[nn.Module, Any]] = [(step.module, reader)]
            taps += [(drop, WeightsReader(reader))] if isinstance(drop, nn.Module) else []
            for module, tap in taps:
                put(module, tap)
                put_on.append(module)
        yield readers
    finally:
        for module in put_on:
            take_away(module)


def read_attention(model: nn.Module, route: Route, images: Tensor) -> dict[Step, Tensor]:
    """The attention weights (B', H, T, S) of every step of a working copy that attends."""
    with reading(route) as readers, torch.no_grad():
        model(images)
    return {step: last_of(reader).weights for step, reader in readers.items()}


def last_of(reader: Reader) -> Attended:
    if reader.last is None:
        raise UnsupportedModel(f"the attention of {type(reader.step.module).__name__} cannot be read")
    return reader.last


def attend_by(weights: Tensor) -> Attend:
    """What a rule needs, by weights that were read; unlike the followers' own it has a gradient to the shares."""

    def attend(share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor:
        some = weights if queries is None else weights[:, :, :queries]
        counted = None if valid is None else valid.unsqueeze(1)
        return spatial_mixing(some, share.unsqueeze(1), counted).mean(1)

    return attend


def first_row(route: Route, images: Tensor) -> Tensor:
    """A row of zeros, as the model's first one."""
    plan = MixPlan.identity(len(images), (images.shape[-2], images.shape[-1]))
    return torch.zeros_like(route.first_row(plan), dtype=images.dtype, device=images.device).contiguous()


def move(step: Step, row: Tensor, attention: Mapping[Step, Tensor]) -> Tensor:
    """What one step makes of a row, before the residual."""
    attend = attend_by(attention[step]) if step.attends else _no_attention
    return step.rule(Moment(row, attend, row.new_zeros(len(row))))


def walk(route: Route, row: Tensor, attention: Mapping[Step, Tensor]) -> Tensor:
    """The row that is classified: `row` moved through all steps as TL-Align moves a share."""
    rows = [row]
    for step in route.steps:
        rows.append(residual(rows[-1], move(step, rows[-1 - step.parallel], attention), step.terms))
    return rows[-1] if route.pooling is None else move(route.pooling, rows[-1], attention)


def _no_attention(share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor:
    raise AssertionError("this step has attends=False")
