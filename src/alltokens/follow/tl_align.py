"""TL-Align: the label of a mixed picture follows the tokens, layer by layer (Xiao et al., ICCV 2023).

Shapes: B batch, N patches, h and w token grid.

Usage, around any forward of the model, training or not:

    aligner = TLAlign(model)
    with aligner.follow(plan):
        logits = model(mix_images(images, plan))
    targets = blend_targets(one_hot, plan.partner, aligner.share)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor, nn

from alltokens.core.plan import MixPlan
from alltokens.errors import UserError, unknown
from alltokens.follow.families import find_route
from alltokens.follow.route import Route
from alltokens.follow.track import Track


class LayerShare(NamedTuple):
    """The shares after one layer."""

    share: Tensor  # (B,): what the classifier would be given if the network ended here
    token_shares: Tensor  # (B, N): of the patches


class TLAlign:
    """Carries the partner's share of every token through `model`, without gradient, parameter or buffer.

    layers: the attention layers that move the share, counted from 1 through all stages; None for all (the paper's
    ablation; the others leave it). residual: "average" as published, or "ignore", a branch's share replaces the
    stream's. drop_path_aware: a branch that stochastic depth drops does not move the share. layer_shares: keep the
    shares after every layer.

    Attach to the bare model, then compile it, then wrap it for distributed training. Copies of the model (EMA) are not
    followed. Activation checkpointing is fine as long as backward runs outside `follow`, as usual.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int] | None = None,
        residual: Literal["average", "ignore"] = "average",
        drop_path_aware: bool = False,
        layer_shares: bool = False,
    ) -> None:
        if residual not in ("average", "ignore"):
            raise unknown("residual rule", residual, ["average", "ignore"])
        self.route = find_route(model, "tl_align")
        self.layers = _checked_layers(layers, self.route)
        self._track = Track(model, self.route, self.layers, residual == "ignore", drop_path_aware)
        self._keep_layers = layer_shares
        self._share: Tensor | None = None
        self._token_shares: Tensor | None = None
        self._layer_shares: tuple[LayerShare, ...] = ()

    def prepare(self, plan: MixPlan) -> None:
        """Make room for a batch of this size, before a compiled graph that has `follow` in it is entered."""
        self._track.prepare(self.route.first_row(plan))

    @contextmanager
    def follow(self, plan: MixPlan) -> Iterator[TLAlign]:
        """Run the model, once, on the batch that `plan` mixed; afterwards `share` and `token_shares` belong to it."""
        self._share = self._token_shares = None
        self._layer_shares = ()
        with self._track.follow(self.route.first_row(plan), plan.share):
            yield self
        self._share = self.route.classified(self._track.last).clamp(0, 1)
        self._token_shares = self.route.patches(self._track.last_tokens).clamp(0, 1)
        if self._keep_layers:
            self._layer_shares = tuple(self._of_layer(row) for row in self._track.after_layers())

    @property
    def share(self) -> Tensor:
        """(B,): the partner's share of what is classified: the class token, or the mean of the pooled tokens."""
        return _followed(self._share)

    @property
    def token_shares(self) -> Tensor:
        """(B, N): the partner's share of each patch after the last layer, row by row (of the last stage's grid)."""
        return _followed(self._token_shares)

    @property
    def layer_shares(self) -> tuple[LayerShare, ...]:
        """The shares after every layer; needs `layer_shares=True`."""
        if not self._keep_layers:
            raise UserError("the shares of single layers are kept only by TLAlign(model, layer_shares=True)")
        _followed(self._share)
        return self._layer_shares

    def detach(self) -> None:
        """Leave the model as it was before."""
        self._track.remove()

    def _of_layer(self, row: Tensor) -> LayerShare:
        patches = self.route.patches(row).clone()
        as_last = self.route.pooling is None and row.ndim == self._track.last.ndim  # PVT has its class token at the end
        return LayerShare(self.route.classified(row).clone() if as_last else patches.mean(1), patches)


def _checked_layers(layers: Sequence[int] | None, route: Route) -> tuple[int, ...]:
    count = route.layers
    if layers is None:
        return tuple(range(1, count + 1))
    wrong = [layer for layer in layers if not (isinstance(layer, int) and 1 <= layer <= count)]
    if wrong or not layers:
        raise UserError(f"layers must be numbers from 1 to {count} (this model's attention layers), got {list(layers)}")
    return tuple(sorted(set(layers)))


def _followed(value: Tensor | None) -> Tensor:
    if value is None:
        raise UserError("no batch has been followed yet: run the model inside `with aligner.follow(plan):`")
    return value
