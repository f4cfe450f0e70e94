"""One label for every token, kept sparse: the few classes that stand out, and what all classes have alike.

Shapes: B batch, N = h * w tokens, M entries of a token, K classes, P pictures' whole labels.

The label of a token is y = rest * (1, ..., 1) + sum over its entries of probability * one_hot(id): K numbers told by
2 M + 1. In this form smoothing, averaging and mixing are all linear: entries are scaled and put side by side, and
nothing has to know which classes are kept where. A token may also take a share of a whole label that many tokens have
in common: P of them, K wide, are far fewer than B x N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltokens.core.plan import MixPlan
from alltokens.errors import UserError


class Common(NamedTuple):
    """Whole labels, and how much each token takes of one of them."""

    labels: Tensor  # (P, K)
    index: Tensor  # (B, N) int64: which of them the token takes
    share: Tensor  # (B, N): how much of it


class TokenTargets(NamedTuple):
    """The labels of all tokens of a batch."""

    ids: Tensor  # (B, N, M) int64: the classes that stand out; one class may come more than once, its entries add up
    probabilities: Tensor  # (B, N, M): what each entry's class has above `rest`; it can be below too
    rest: Tensor  # (B, N): the probability of every class that has no entry
    weight: Tensor  # (B, N) in [0, 1]: how much of the token has a label at all, 0 outside the picture
    grid: tuple[int, int]  # h and w
    common: Common | None = None  # what tokens take of whole labels, on top of the above

    @classmethod
    def of_classes(
        cls, labels: Tensor, grid: tuple[int, int], num_classes: int, smoothing: float = 0.0
    ) -> TokenTargets:
        """Every token has its picture's class (B,): all that is known where no label map is."""
        if not 0 <= smoothing < 1:
            raise UserError(f"smoothing must lie in [0, 1), got {smoothing}")
        tokens = grid[0] * grid[1]
        ids = labels[:, None, None].expand(-1, tokens, 1)
        ones = torch.ones(len(labels), tokens, device=labels.device)
        return cls(ids, ones.unsqueeze(-1) * (1 - smoothing), ones * (smoothing / num_classes), ones, grid)

    def to(self, device: torch.device | str) -> TokenTargets:
        ids, probabilities, rest, weight = (tensor.to(device, non_blocking=True) for tensor in self[:4])
        common = None
        if self.common is not None:
            common = Common(*(tensor.to(device, non_blocking=True) for tensor in self.common))
        return TokenTargets(ids, probabilities, rest, weight, self.grid, common)

    def dense(self, num_classes: int) -> Tensor:
        """(B, N, K): the same labels in full, the reference form."""
        everywhere = self.rest.unsqueeze(-1).expand(*self.rest.shape, num_classes)
        # From zero, not onto `rest`: then two entries of one class (as a mix makes) add up alike in either order.
        dense = torch.zeros_like(everywhere).scatter_add(-1, self.ids, self.probabilities) + everywhere
        if self.common is not None:
            dense = dense + self.common.labels[self.common.index] * self.common.share.unsqueeze(-1)
        return dense

    def mix(self, plan: MixPlan) -> TokenTargets:
        """Paste labels where the plan pastes pixels or embeddings: (B, N, 2 M), by the partner's share of each token.

        Where only one of the two pictures has a label, the label is that one's, and the weight its visible share.
        """
        self._check(plan)
        partner_share = plan.token_share(self.grid).flatten(1).to(self.rest.dtype)  # (B, N)
        share, weight = _blend(partner_share, self.weight, self.weight[plan.partner])
        return self._blended(plan, 1 - share, share, weight)

    def follow(self, plan: MixPlan, token_shares: Tensor, num_classes: int) -> TokenTargets:
        """The labels of tokens whose content moved: `token_shares` (B, N) is the partner's share of each now.

        A picture that is visible at a token's place gives the label of that place. The other one's content came from
        elsewhere: it gives the mean of its labels over the places where it is visible. So (B, N, 2 M) entries, and the
        means as 2 B labels in common.
        """
        self._check(plan)
        if token_shares.shape != self.rest.shape:
            raise UserError(
                f"labels for {tuple(self.rest.shape)} tokens cannot follow the shares of {tuple(token_shares.shape)}"
            )
        visible = plan.token_share(self.grid).flatten(1).to(self.rest.dtype)  # (B, N): of the partner
        token_shares = token_shares.to(self.rest.dtype)
        partner_weight = self.weight[plan.partner]
        own_mean, has_own = self._mean((1 - visible) * self.weight, slice(None), num_classes)
        partner_mean, has_partner = self._mean(visible * partner_weight, plan.partner, num_classes)
        own_here, partner_here = visible < 1, visible > 0
        share, weight = _blend(
            token_shares,
            torch.where(own_here, self.weight, has_own),
            torch.where(partner_here, partner_weight, has_partner),
        )
        nothing = torch.zeros_like(share)
        place = torch.arange(len(self.ids), device=self.ids.device)[:, None].expand_as(share)
        blended = self._blended(
            plan, torch.where(own_here, 1 - share, nothing), torch.where(partner_here, share, nothing), weight
        )
        # At every place one of the two is visible at least, so a token takes of one mean at the most.
        of_mean = torch.where(own_here, torch.where(partner_here, nothing, share), 1 - share)
        index = torch.where(own_here, place + len(self.ids), place)
        return blended._replace(common=Common(torch.cat([own_mean, partner_mean]), index, of_mean))

    def _check(self, plan: MixPlan) -> None:
        if len(plan.partner) != len(self.ids):
            raise UserError(f"a plan for {len(plan.partner)} pictures cannot mix the labels of {len(self.ids)}")
        assert self.common is None, "labels are mixed once; plans compose by plan.then"

    def _blended(self, plan: MixPlan, own: Tensor, partners: Tensor, weight: Tensor) -> TokenTargets:
        """own (B, N) of each token's label beside partners (B, N) of that of the partner at its place."""
        probabilities = [
            self.probabilities * own.unsqueeze(-1),
            self.probabilities[plan.partner] * partners.unsqueeze(-1),
        ]
        return TokenTargets(
            torch.cat([self.ids, self.ids[plan.partner]], -1),
            torch.cat(probabilities, -1),
            self.rest * own + self.rest[plan.partner] * partners,
            weight,
            self.grid,
        )

    def _mean(self, weight: Tensor, pictures: Tensor | slice, num_classes: int) -> tuple[Tensor, Tensor]:
        """The mean labels (B, K) of some pictures by these weights (B, N), and (B, 1): 1 where there is any weight."""
        total = weight.sum(1, keepdim=True)
        weight = weight / torch.where(total > 0, total, 1)
        entries = self.probabilities[pictures] * weight.unsqueeze(-1)
        everywhere = (self.rest[pictures] * weight).sum(1, keepdim=True)  # (B, 1)
        mean = everywhere.new_zeros(len(weight), num_classes)
        mean = mean.scatter_add(1, self.ids[pictures].flatten(1), entries.flatten(1)) + everywhere
        return mean, (total > 0).to(mean.dtype)


def _blend(partner_share: Tensor, own_weight: Tensor, partner_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(share, weight): the partner's share of what has a label at all, and how much has one."""
    own, pasted = (1 - partner_share) * own_weight, partner_share * partner_weight
    weight = own + pasted
    labelled = weight > 0
    return torch.where(labelled, pasted / torch.where(labelled, weight, 1), partner_share), weight
