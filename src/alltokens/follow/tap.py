"""How a share is moved in the middle of a module of timm's, without a copy of its code.

Shapes: B' batch as attention sees it, H heads, T queries, S keys, D channels of a head.

While a follower is attached, some modules have two attributes of their own: `share_tap`, with all the state, and
`forward`, one and the same function for all of them. Unless a batch is being followed it calls the class's forward.
Otherwise the tap decides, in one of four ways:

- AttentionTap runs the class's own forward code over globals in which `scaled_dot_product_attention` is the tap's
  method. So the tap sees the very query, key and mask of the module, whatever timm does before and after.
- WeightsTap sits on the `attn_drop` of the same module. Code that is not fused hands it the softmaxed attention.
  Attention pooling without the fused call hands its attention to nobody: while it is followed, it takes that call.
- PlainTap moves the share by the module's weights, or by nothing but geometry, and then runs the class's forward.
- DropPathTap takes back the share of samples whose branch was dropped.

Each tap reads one tensor and writes another, and never itself: doing it twice, as activation checkpointing may, is
doing it once. The tensors hang on the tap, so torch.compile reads them anew at each call and sees one graph.
A copied or pickled model has None for its taps: it runs as if never touched (so an EMA copy is safe).
"""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alltokens.core.align import additive_bias, attention_share, mean_over_heads, residual, spatial_mixing
from alltokens.core.kernels.attention_with_share import aligned_bias, attention_with_share, can_carry
from alltokens.errors import UserError
from alltokens.follow.route import Attend, Moment, Step


class Tap(ABC):
    """What one module needs to know to move the share."""

    def __init__(self, step: Step, terms: int) -> None:
        self.step = step
        self.terms = terms  # summands in the stream so far, see `residual`
        self.active = False
        # Set by `aim` before a batch is followed.
        self.source = self.base = self.out = self.start = torch.empty(0)

    def aim(self, source: Tensor, base: Tensor, out: Tensor, start: Tensor) -> None:
        self.source, self.base, self.out, self.start = source, base, out, start

    def move(self, attend: Attend) -> None:
        # Shares are kept in float32 at least: autocast would round them to 3 digits.
        with torch.no_grad(), torch.autocast(self.out.device.type, enabled=False):
            mixed = self.step.rule(Moment(self.source, attend, self.start))
            self.out.copy_(residual(self.base, mixed, self.terms))

    @abstractmethod
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, the share being moved on the way."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return types.NoneType, ()


class PlainTap(Tap):
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.move(_no_attention)
        return type(module).forward(module, *args, **kwargs)


class AttentionTap(Tap):
    def __init__(self, step: Step, terms: int) -> None:
        super().__init__(step, terms)
        self.forward = _rebound(type(step.module).forward, self.attention)
        unread = hasattr(step.module, "fused_attn") and not hasattr(step.module, "attn_drop")
        self.fused = _fused(step.module) if unread else None

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(module if self.fused is None else self.fused, *args, **kwargs)

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
        """What the module finds under the name `scaled_dot_product_attention`."""
        if is_causal or enable_gqa:  # no module of a supported family asks for either
            raise UserError("a share cannot follow causal or grouped-query attention calls")
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        separate = _from_query_and_key(query.detach(), key.detach(), factor, attn_mask)
        if dropout_p == 0 and can_carry(query, key, value, attn_mask):
            along = _Along(query, key, value, attn_mask, factor, separate)
            self.move(along)
            if along.output is not None:
                return along.output
        else:
            self.move(separate)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale, is_causal=is_causal
        )


class WeightsTap:
    """Reads explicit attention for another tap: `attn_drop` gets what the softmax (or talking heads) made."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    @property
    def active(self) -> bool:
        return self.tap.active

    def run(self, module: nn.Module, weights: Tensor) -> Tensor:
        self.tap.move(_from_weights(weights.detach(), self.tap.step.signed))
        return type(module).forward(module, weights)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return types.NoneType, ()


class DropPathTap(Tap):
    """Reads the row that the branch wrote (source) and the row before it (base); a dropped branch moves nothing."""

    def run(self, module: nn.Module, branch: Tensor) -> Tensor:
        # Dropping ones draws the same random numbers and tells what is dropped, in one value per sample.
        ones = branch.new_ones(len(branch), *[1] * (branch.ndim - 1))
        scale = type(module).forward(module, ones)
        with torch.no_grad():
            kept = scale.view(-1, *[1] * (self.source.ndim - 1)) != 0
            self.out.copy_(torch.where(kept, self.source, self.base))
        return branch * scale


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of every tapped module. Its name matters: a pickled bound method is looked up by it."""
    tap: Any = self.share_tap
    if tap is None or not tap.active:
        return type(self).forward(self, *args, **kwargs)
    return tap.run(self, *args, **kwargs)


def is_tapped(module: nn.Module) -> bool:
    return module.__dict__.get("share_tap") is not None


def put(module: nn.Module, tap: Tap | WeightsTap) -> None:
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is not forward:
        raise UserError(
            f"a {type(module).__name__} of this model has a forward of its own (patched by other code), "
            "which a follower would bypass; attach the follower first"
        )
    module.share_tap = tap  # pyright: ignore[reportArgumentType]
    module.forward = types.MethodType(forward, module)


def take_away(module: nn.Module) -> None:
    del module.share_tap, module.forward


def _fused(module: nn.Module) -> nn.Module:
    """The same module, parameters and all, which takes the fused call whatever the original does."""
    view = copy.copy(module)
    view.fused_attn = True  # pyright: ignore[reportArgumentType]
    return view


def _rebound(function: Callable[..., Any], attention: Callable[..., Tensor]) -> Callable[..., Any]:
    """The same code, defaults and closure over globals in which scaled_dot_product_attention is `attention`.

    timm spells it F.…, nn.functional.… and torch.nn.functional.….
    """
    functional = _changed(F, scaled_dot_product_attention=attention)
    layers = _changed(nn, functional=functional)
    names = {
        "F": functional,
        "nn": layers,
        "torch": _changed(torch, nn=layers),
        "scaled_dot_product_attention": attention,
    }
    known = function.__globals__
    changed = {**known, **{name: new for name, new in names.items() if name in known}}
    changed.pop("__name__", None)  # or dynamo (torch 2.11) would look the names up in timm's own module
    twin = types.FunctionType(
        function.__code__, changed, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _changed(module: types.ModuleType, **names: Any) -> types.ModuleType:
    """A module like the given one but for some names."""
    twin = types.ModuleType(module.__name__)
    twin.__dict__.update({**vars(module), **names})
    return twin


def _from_query_and_key(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Attend:
    def attend(share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor:
        _check(share, len(query), key.shape[2])
        added = additive_bias(bias.detach() if bias is not None else None, valid, share.dtype)
        some = query
        if queries is not None:
            some = query[:, :, :queries]
            added = added[..., :queries, :] if added is not None and added.shape[-2] > 1 else added
        return attention_share(some, key, share, scale, added)

    return attend


class _Along:
    """Attention that carries the share along; its output is kept, if the rule asked for all queries and keys."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, separate: Attend
    ) -> None:
        self.inputs = query, key, value
        self.bias = bias
        self.scale = scale
        self.separate = separate
        self.gradient = torch.is_grad_enabled()
        self.output: Tensor | None = None

    def __call__(self, share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor:
        query, key, value = self.inputs
        exact = torch.promote_types(query.dtype, torch.float32)
        if valid is not None or queries is not None or share.dtype != exact:
            return self.separate(share, valid, queries)
        _check(share, len(query), key.shape[2])
        with torch.set_grad_enabled(self.gradient):
            bias = None if self.bias is None else aligned_bias(self.bias, query)
            self.output, mixed, _ = attention_with_share(query, key, value, share, self.scale, bias)
        return mixed


def _from_weights(weights: Tensor, signed: bool) -> Attend:
    def attend(share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor:
        _check(share, len(weights), weights.shape[-1])
        some = weights if queries is None else weights[:, :, :queries]
        if signed or valid is not None:  # every head by itself: each mixes channels of its own
            counted = None if valid is None else valid.unsqueeze(1)
            return spatial_mixing(some, share.unsqueeze(1), counted).mean(1)
        return mean_over_heads(some.to(share.dtype), share)

    return attend


def _no_attention(share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor:
    raise AssertionError("this step has attends=False")


def _check(share: Tensor, batch: int, keys: int) -> None:
    if share.shape != (batch, keys):
        raise UserError(
            f"the plan that is followed gives shares for {share.shape[0]} x {share.shape[1]} tokens, but the model "
            f"attends to {batch} x {keys}: follow the plan of the very batch that the model is run on"
        )
