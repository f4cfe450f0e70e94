"""One label for every token, kept sparse: the few classes that stand out, and what all classes have alike.

Shapes: B batch, N = h * w tokens, M entries of a token, K classes.

The label of a token is y = rest * (1, ..., 1) + sum over its entries of probability * one_hot(id): K numbers told by
2 M + 1. In this form smoothing, averaging and mixing are all linear: entries are scaled and put side by side, and
nothing has to know which classes are kept where.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltokens.core.plan import MixPlan
from alltokens.errors import UserError


class TokenTargets(NamedTuple):
    """The labels of all tokens of a batch."""

    ids: Tensor  # (B, N, M) int64: the classes that stand out; one class may come more than once, its entries add up
    probabilities: Tensor  # (B, N, M): what each entry's class has above `rest`; it can be below too
    rest: Tensor  # (B, N): the probability of every class that has no entry
    weight: Tensor  # (B, N) in [0, 1]: how much of the token has a label at all, 0 outside the picture
    grid: tuple[int, int]  # h and w

    def to(self, device: torch.device | str) -> TokenTargets:
        ids, probabilities, rest, weight = (tensor.to(device, non_blocking=True) for tensor in self[:4])
        return TokenTargets(ids, probabilities, rest, weight, self.grid)

    def dense(self, num_classes: int) -> Tensor:
        """(B, N, K): the same labels in full, the reference form."""
        everywhere = self.rest.unsqueeze(-1).expand(*self.rest.shape, num_classes)
        # From zero, not onto `rest`: then two entries of one class (as a mix makes) add up alike in either order.
        return torch.zeros_like(everywhere).scatter_add(-1, self.ids, self.probabilities) + everywhere

    def mix(self, plan: MixPlan) -> TokenTargets:
        """Paste labels where the plan pastes pixels or embeddings: (B, N, 2 M), by the partner's share of each token.

        Where only one of the two pictures has a label, the label is that one's, and the weight its visible share.
        """
        if len(plan.partner) != len(self.ids):
            raise UserError(f"a plan for {len(plan.partner)} pictures cannot mix the labels of {len(self.ids)}")
        partner_share = plan.token_share(self.grid).flatten(1).to(self.rest.dtype)  # (B, N)
        own = (1 - partner_share) * self.weight
        pasted = partner_share * self.weight[plan.partner]
        weight = own + pasted
        labelled = weight > 0
        share = torch.where(labelled, pasted / torch.where(labelled, weight, 1), partner_share)
        partners = self.probabilities[plan.partner] * share.unsqueeze(-1)
        return TokenTargets(
            torch.cat([self.ids, self.ids[plan.partner]], -1),
            torch.cat([self.probabilities * (1 - share).unsqueeze(-1), partners], -1),
            torch.lerp(self.rest, self.rest[plan.partner], share),
            weight,
            self.grid,
        )
