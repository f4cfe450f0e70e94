"""The rows of one followed model, and the taps that take the share from one row to the next.

Shapes: B batch, T tokens, h and w token grid. A row is (B, T) or (B, h, w), see route.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from alltokens.errors import UserError
from alltokens.follow.route import Route, Step
from alltokens.follow.tap import (
    AttentionTap,
    DropPathTap,
    PlainTap,
    Tap,
    WeightsTap,
    is_tapped,
    put,
    take_away,
)

ALREADY_FOLLOWED = (
    "this model is being followed already, by another TLAlign or TransMix; call that one's detach() before a second one"
)


class Track:
    """Puts taps on the modules of a route, of all its layers or some, and keeps the rows between them."""

    def __init__(
        self,
        model: nn.Module,
        route: Route,
        layers: Sequence[int] | None = None,
        ignore_residual: bool = False,
        drop_path_aware: bool = False,
    ) -> None:
        if any(is_tapped(module) for module in model.modules()):
            raise UserError(ALREADY_FOLLOWED)
        if drop_path_aware:
            _check_drop_paths(model, route)
        self._model = model
        self._route = route
        self._steps = [step for step in route.steps if step.layer is None or layers is None or step.layer in layers]
        if route.pooling is not None:
            self._steps.append(route.pooling)
        self._taps: list[tuple[Tap, DropPathTap | None]] = []
        self._put: list[tuple[nn.Module, Tap | WeightsTap]] = []
        self._rows: list[Tensor] = []  # what each step starts from, and the last row
        self._start = torch.empty(0)
        self._following = self._seen_whole = self._removed = False
        try:
            for step in self._steps:
                terms = step.terms - 1 if ignore_residual and step.terms else step.terms
                self._tap(step, terms, drop_path_aware)
        except UserError:
            self.remove()
            raise

    @property
    def last(self) -> Tensor:
        return self._rows[-1]

    @property
    def last_tokens(self) -> Tensor:
        """The last row that still has all tokens."""
        return self._rows[-1 if self._route.pooling is None else -2]

    def after_layers(self) -> list[Tensor]:
        """The row after every layer of the model, also after those that leave the share."""
        written = {id(step): row for step, row in zip(self._steps, self._rows[1:], strict=True)}
        row, rows = self._rows[0], {}
        for step in self._route.steps:
            row = written.get(id(step), row)
            if step.layer is not None:
                rows[step.layer] = row
        return list(rows.values())

    @contextmanager
    def follow(self, first: Tensor, start: Tensor) -> Iterator[None]:
        """Inside, the model carries the row `first`; `start` (B,) is the share of a class token that joins later."""
        if self._removed:
            raise UserError("this follower was detached from its model; make a new one")
        if self._following:
            raise UserError("a plan is being followed already; leave that `with` block first")
        self._begin(first, start)
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)
        # Looking at values would break a compiled graph for good. There a layer that was missed shows in the loss.
        if not self._seen_whole and not torch.compiler.is_compiling():
            self._check_whole()

    def remove(self) -> None:
        """Every tapped module is as it was before."""
        self._switch(False)
        for module, _ in self._put:
            take_away(module)
        self._put, self._removed = [], True

    def _tap(self, step: Step, terms: int, drop_path_aware: bool) -> None:
        tap = AttentionTap(step, terms) if step.attends else PlainTap(step, terms)
        self._attach(step.module, tap)
        weights = getattr(step.module, "attn_drop", None)
        if step.attends and isinstance(weights, nn.Module):
            self._attach(weights, WeightsTap(tap))
        drop_tap = None
        if drop_path_aware and step.drop_path is not None and not isinstance(step.drop_path, nn.Identity):
            drop_tap = DropPathTap(step, terms)
            self._attach(step.drop_path, drop_tap)
        self._taps.append((tap, drop_tap))

    def _attach(self, module: nn.Module, tap: Tap | WeightsTap) -> None:
        if is_tapped(module):
            raise UserError(f"one {type(module).__name__} is used at two places of this model: its share is ambiguous")
        put(module, tap)
        self._put.append((module, tap))

    def _switch(self, active: bool) -> None:
        self._following = active
        for _, tap in self._put:
            if isinstance(tap, Tap):
                tap.active = active

    def prepare(self, first: Tensor) -> None:
        """Make room for rows of this size. `follow` does it too; a graph compiled around it is then spared a second
        compilation."""
        parameter = next(self._model.parameters())
        if first.device.type == "cpu" != parameter.device.type:
            raise UserError(
                f"the plan is on the CPU and the model on {parameter.device}: follow plan.to(images.device)"
            )
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        fresh = not self._rows or (first.shape, first.device, dtype) != (
            self._rows[0].shape,
            self._rows[0].device,
            self._rows[0].dtype,
        )
        if fresh:
            self._allocate(torch.empty_like(first, dtype=dtype, memory_format=torch.contiguous_format))

    def _begin(self, first: Tensor, start: Tensor) -> None:
        self.prepare(first)
        with torch.no_grad():
            self._rows[0].copy_(first)
            self._start.copy_(start)
            # Stays so if the model is not run: then the loss is not a number either, instead of silently old.
            self._rows[-1].fill_(float("nan"))

    def _allocate(self, first: Tensor) -> None:
        self._start = first.new_empty(len(first))
        self._rows, self._seen_whole = [first], False
        for step, (tap, drop_tap) in zip(self._steps, self._taps, strict=True):
            base = self._rows[-1]
            source = self._rows[-1 - step.parallel]
            out = first.new_full(step.shape(tuple(base.shape)), float("nan"))
            if drop_tap is None:
                tap.aim(source, base, out, self._start)
            else:
                between = torch.full_like(out, float("nan"))
                tap.aim(source, base, between, self._start)
                drop_tap.aim(between, base, out, self._start)
            self._rows.append(out)

    def _check_whole(self) -> None:
        """After the first batch of a size, look once whether every step was taken (it makes a GPU wait)."""
        for step, row in zip(self._steps, self._rows[1:], strict=True):
            if row.isnan().any():
                place = f"layer {step.layer}" if step.layer is not None else type(step.module).__name__
                raise UserError(
                    f"the share of {place} is not a number: the model was not run inside `follow`, its forward leaves "
                    "that layer out, or its activations are not finite"
                )
        self._seen_whole = True


def _check_drop_paths(model: nn.Module, route: Route) -> None:
    known = {id(step.drop_path) for step in route.steps}
    for name, module in model.named_modules():
        after_mlp = name.endswith("drop_path2") or ".ffns." in name  # moves no share
        if isinstance(module, DropPath) and id(module) not in known and not after_mlp:
            raise UserError(
                "drop_path_aware needs a stochastic depth of its own for every branch that mixes tokens; "
                f"{type(model).__name__} shares one ({name}) among branches"
            )
