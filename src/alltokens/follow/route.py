"""What a family of models says about itself, so that a share can follow its tokens.

Shapes: B batch, P prefix tokens (class, distillation, register), N patches, T = P + N tokens, h and w token grid.

A *row* is the share of every token at one depth of the network: (B, T), or (B, h, w) where the family thinks in
pictures. A Route is the list of Steps that take the first row to the last one; each Step belongs to one module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from alltokens.core.plan import MixPlan

Grid = tuple[int, int]


class Attend(Protocol):
    """The attention of the module in whose forward we are: shares of its keys (B', S) -> shares of its queries (B', T).

    B' is the batch as the attention sees it (windows, say). Keys that are not `valid` (B', S) are left out and the rows
    normalised; `queries` asks for the first few queries only.
    """

    def __call__(self, share: Tensor, valid: Tensor | None = None, queries: int | None = None) -> Tensor: ...


class Moment(NamedTuple):
    """What a rule may look at."""

    row: Tensor  # the share of every token that enters the module
    attend: Attend
    start: Tensor  # (B,) the partner's share of the whole picture: where a class token starts


Rule = Callable[[Moment], Tensor]


def all_tokens(moment: Moment) -> Tensor:
    """The rule of ordinary self-attention."""
    return moment.attend(moment.row)


def same_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


@dataclass(frozen=True)
class Step:
    """One module that moves the share."""

    module: nn.Module  # the rule is applied inside this module's forward
    rule: Rule
    layer: int | None = None  # counted from 1 through all stages; None: not a layer (merging, attention pooling)
    attends: bool = True  # the rule calls `moment.attend`; otherwise it needs the module's weights at the most
    terms: int = 1  # summands that the stream holds before this branch joins it; 0: the module replaces the stream
    parallel: int = 0  # this is the (parallel + 1)th of several branches that read the same row
    signed: bool = False  # attention weights that can be negative (talking heads): absolute values, normalised
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = same_shape  # of the row it writes
    drop_path: nn.Module | None = None  # the module that may drop this branch; None: none, or not for this branch alone


@dataclass(frozen=True)
class Route:
    """The whole way of the share through one model."""

    steps: tuple[Step, ...]
    grid: Callable[[Grid], Grid]  # picture (height, width) -> token grid of the first row
    classified: Callable[[Tensor], Tensor]  # last row -> (B,): the share of what the head reads
    prefix: int = 0
    picture: bool = False  # rows are (B, h, w) instead of (B, P + N)
    pooling: Step | None = None  # attention pooling after the last row; `classified` then reads what it writes
    class_attention: Step | None = None  # the last attention whose first query is the class token that is classified
    last_grid: Callable[[Grid], Grid] | None = None  # picture -> token grid of the last row, if not the first's

    @property
    def layers(self) -> int:
        return max((step.layer or 0 for step in self.steps), default=0)

    def class_grid(self, image_size: Grid) -> Grid:
        """The grid of the patches that the class token attends to."""
        return (self.last_grid or self.grid)(image_size)

    def first_row(self, plan: MixPlan) -> Tensor:
        """Each patch starts with its own share, every other token with the picture's (FACTS 3.1)."""
        shares = plan.token_share(self.grid(plan.image_size))  # (B, h, w)
        if self.picture:
            return shares
        prefix = plan.share.unsqueeze(1).expand(-1, self.prefix)  # (B, P)
        return torch.cat([prefix, shares.flatten(1)], dim=1)

    def patches(self, row: Tensor) -> Tensor:
        """(B, N): the share of the patches."""
        return row.flatten(1) if row.ndim == 3 else row[:, self.prefix :]


def first_token(row: Tensor) -> Tensor:
    return row[:, 0]


def mean_of_tokens(prefix: int = 0) -> Callable[[Tensor], Tensor]:
    """The mean over all tokens but the first `prefix`, whichever pooling the model uses (mean, max, both)."""

    def mean(row: Tensor) -> Tensor:
        return row.flatten(1)[:, prefix:].mean(1)

    return mean
