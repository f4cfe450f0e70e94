"""TransMix: the label of a mixed picture is weighed by the class token's last attention (Chen et al., CVPR 2022).

Shapes: B batch, N patches, h and w token grid.

share = (area + sum of attention * patch share / sum of attention) / 2, the attention being the class token's to the
patches in the last layer, mean over heads (FACTS section 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alltokens.core.plan import MixPlan
from alltokens.errors import UserError
from alltokens.follow.families import find_route
from alltokens.follow.route import Moment, Rule
from alltokens.follow.track import Track


class TransMix:
    """Reads the class token's attention of `model`'s last layer; for models that classify a class token.

    A patch that the box splits counts by its pasted ratio; `official=True` takes the mask at its top-left pixel, as the
    published program does. The same rules for attaching hold as for TLAlign.
    """

    def __init__(self, model: nn.Module, official: bool = False) -> None:
        route = find_route(model, "transmix")
        assert route.class_attention is not None
        # That one step alone, straight from the patches' own shares, writing one number per picture.
        step = replace(
            route.class_attention,
            rule=_class_attention(route.prefix),
            terms=0,
            parallel=0,
            signed=False,
            shape=lambda row: (row[0], 1),
        )
        self.route = route
        self._official = official
        self._track = Track(model, replace(route, steps=(step,), pooling=None))
        self._plan: MixPlan | None = None

    def prepare(self, plan: MixPlan) -> None:
        """Make room for a batch of this size, before a compiled graph that has `follow` in it is entered."""
        self._track.prepare(self._first_row(plan))

    @contextmanager
    def follow(self, plan: MixPlan) -> Iterator[TransMix]:
        """Run the model, once, on the batch that `plan` mixed; afterwards `share` belongs to it."""
        self._plan = None
        with self._track.follow(self._first_row(plan), plan.share):
            yield self
        self._plan = plan

    @property
    def share(self) -> Tensor:
        """(B,): the partner's share of each picture."""
        return ((self._last().share + self._track.last[:, 0]) / 2).clamp(0, 1)

    @property
    def token_shares(self) -> Tensor:
        """(B, N): the partner's share of each patch by area; TransMix itself says nothing about single patches."""
        return self._token_shares(self._last())

    def detach(self) -> None:
        """Leave the model as it was before."""
        self._track.remove()

    def _first_row(self, plan: MixPlan) -> Tensor:
        shares = self._token_shares(plan)
        if self._official:
            grid = self.route.class_grid(plan.image_size)
            nearest = F.interpolate(plan.mask.unsqueeze(1), size=grid, mode="nearest").flatten(1)
            shares = nearest.expand_as(shares)
        return F.pad(shares, (self.route.prefix, 0))

    def _token_shares(self, plan: MixPlan) -> Tensor:
        return plan.token_share(self.route.class_grid(plan.image_size)).flatten(1)

    def _last(self) -> MixPlan:
        if self._plan is None:
            raise UserError("no batch has been followed yet: run the model inside `with follower.follow(plan):`")
        return self._plan


def _class_attention(prefix: int) -> Rule:
    def rule(moment: Moment) -> Tensor:
        patches = F.pad(torch.ones_like(moment.row[:, prefix:]), (prefix, 0))
        weighed = moment.attend(moment.row * patches, queries=1)
        return weighed / moment.attend(patches, queries=1)

    return rule
