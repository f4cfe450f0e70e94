"""The follower that follows nothing: the label is mixed by the pasted area, as CutMix does.

Shapes: B batch, N tokens, h and w token grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from alltokens.core.plan import MixPlan
from alltokens.errors import UserError


class Area:
    """`share` is the plan's own; it needs no model, and of the model only the token `grid` if tokens are asked for."""

    def __init__(self, grid: tuple[int, int] | None = None) -> None:
        self.grid = grid
        self._plan: MixPlan | None = None
        self._following = False

    @contextmanager
    def follow(self, plan: MixPlan) -> Iterator[Area]:
        if self._following:
            raise UserError("a plan is being followed already; leave that `with` block first")
        self._following, self._plan = True, None
        try:
            yield self
            self._plan = plan
        finally:
            self._following = False

    @property
    def share(self) -> Tensor:
        """(B,): the partner's share of each picture."""
        return self._last().share

    @property
    def token_shares(self) -> Tensor:
        """(B, N): the partner's share of each patch."""
        if self.grid is None:
            raise UserError("Area knows no tokens unless told their grid, as in Area(grid=(14, 14))")
        return self._last().token_share(self.grid).flatten(1)

    def detach(self) -> None:
        """Nothing was attached; here so that all followers are alike."""

    def _last(self) -> MixPlan:
        if self._plan is None:
            raise UserError("no batch has been followed yet: run the model inside `with follower.follow(plan):`")
        return self._plan
