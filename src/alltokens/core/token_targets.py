"""One label for every token, kept sparse: the few classes that stand out, and what all classes have alike.

Shapes: B batch, N = h * w tokens, M entries of a token, K classes, P whole labels of a picture.

The label of a token is y = rest * (1, ..., 1) + sum over its entries of probability * one_hot(id): K numbers told by
2 M + 1. In this form smoothing, averaging and mixing are all linear: entries are scaled and put side by side, and
nothing has to know which classes are kept where. A token may also take shares of whole labels that all tokens of its
picture have in common: P x K numbers a picture, far fewer than N x K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltokens.core.plan import MixPlan
from alltokens.core.transfer import sent
from alltokens.errors import UserError


class Common(NamedTuple):
    """Whole labels that the tokens of a picture have in common, and how much of each a token takes."""

    labels: Tensor  # (B, P, K)
    share: Tensor  # (B, N, P)


class TokenTargets(NamedTuple):
    """The labels of all tokens of a batch."""

    ids: Tensor  # (B, N, M) int64
    probabilities: Tensor  # (B, N, M): what a class has above `rest`; an id may be listed more than once
    rest: Tensor  # (B, N): the probability of every class that has no entry
    weight: Tensor  # (B, N) in [0, 1]: how much of the token has a label at all, 0 outside the picture
    grid: tuple[int, int]  # h and w
    common: Common | None = None  # what tokens take of whole labels, on top of the above

    @classmethod
    def of_pictures(cls, labels: Tensor, grid: tuple[int, int]) -> TokenTargets:
        """Every token has its picture's label (B, K): all that is known where no label map is."""
        batch, tokens = len(labels), grid[0] * grid[1]
        ones = labels.new_ones(batch, tokens)
        nothing = labels.new_zeros(batch, tokens, 0)
        return cls(nothing.long(), nothing, 0 * ones, ones, grid, Common(labels[:, None], ones.unsqueeze(-1)))

    def to(self, device: torch.device | str) -> TokenTargets:
        ids, probabilities, rest, weight = (sent(tensor, device) for tensor in self[:4])
        common = None
        if self.common is not None:
            common = Common(*(sent(tensor, device) for tensor in self.common))
        return TokenTargets(ids, probabilities, rest, weight, self.grid, common)

    def dense(self, num_classes: int) -> Tensor:
        """(B, N, K): the same labels in full, the reference form."""
        everywhere = self.rest.unsqueeze(-1).expand(*self.rest.shape, num_classes)
        # From zero, not onto `rest`: then two entries of one class (as a mix makes) add up alike in either order.
        dense = torch.zeros_like(everywhere).scatter_add(-1, self.ids, self.probabilities) + everywhere
        return dense if self.common is None else dense + self.common.share @ self.common.labels

    def mix(self, plan: MixPlan) -> TokenTargets:
        """Paste labels where the plan pastes pixels or embeddings: (B, N, 2 M), by the partner's share of each token.

        Where only one of the two pictures has a label, the label is that one's, and the weight its visible share.
        """
        self._check(plan)
        visible = self._visible(plan)
        share, weight = _blend(visible, self.weight, self.weight[plan.partner])
        return self._blended(plan, 1 - share, share, weight)

    def follow(self, plan: MixPlan, token_shares: Tensor, num_classes: int) -> TokenTargets:
        """The labels of tokens whose content moved: `token_shares` (B, N) is the partner's share of each now.

        A picture that is visible at a token's place gives the label of that place. The other one's content came from
        elsewhere: it gives the mean of its labels over the places where it is visible. So (B, N, 2 M) entries, and the
        two means as labels in common.
        """
        self._check(plan)
        if token_shares.shape != self.rest.shape:
            raise UserError(
                f"labels for {tuple(self.rest.shape)} tokens cannot follow the shares of {tuple(token_shares.shape)}; "
                "the token labels and the tokens that are followed must lie on one grid"
            )
        visible, token_shares = self._visible(plan), token_shares.to(self.rest.dtype)
        partner_weight = self.weight[plan.partner]
        own_mean, own_any = self._mean((1 - visible) * self.weight, slice(None), num_classes)
        partner_mean, partner_any = self._mean(visible * partner_weight, plan.partner, num_classes)
        own_here, partner_here = visible < 1, visible > 0
        share, weight = _blend(
            token_shares,
            torch.where(own_here, self.weight, own_any),
            torch.where(partner_here, partner_weight, partner_any),
        )
        followed = self._blended(plan, (1 - share) * own_here, share * partner_here, weight)
        means = torch.stack([own_mean, partner_mean], 1)  # (B, 2, K)
        of_means = torch.stack([(1 - share) * ~own_here, share * ~partner_here], -1)  # (B, N, 2)
        own = followed.common
        if own is not None:
            means, of_means = torch.cat([own.labels, means], 1), torch.cat([own.share, of_means], -1)
        # Not _replace, which torch 2.11 compiles into something that it cannot give out.
        return TokenTargets(*followed[:5], Common(means, of_means))

    def _check(self, plan: MixPlan) -> None:
        if len(plan.partner) != len(self.ids):
            raise UserError(f"a plan for {len(plan.partner)} pictures cannot mix the labels of {len(self.ids)}")

    def _visible(self, plan: MixPlan) -> Tensor:
        """(B, N): how much of each token's place shows the partner."""
        return plan.token_share(self.grid).flatten(1).to(self.rest.dtype)

    def _blended(self, plan: MixPlan, own: Tensor, partners: Tensor, weight: Tensor) -> TokenTargets:
        """own (B, N) of each token's label beside partners (B, N) of that of the partner at its place."""
        partner = plan.partner
        probabilities = [self.probabilities * own.unsqueeze(-1), self.probabilities[partner] * partners.unsqueeze(-1)]
        common = self.common
        if common is not None:
            shares = [common.share * own.unsqueeze(-1), common.share[partner] * partners.unsqueeze(-1)]
            common = Common(torch.cat([common.labels, common.labels[partner]], 1), torch.cat(shares, -1))
        return TokenTargets(
            torch.cat([self.ids, self.ids[partner]], -1),
            torch.cat(probabilities, -1),
            self.rest * own + self.rest[partner] * partners,
            weight,
            self.grid,
            common,
        )

    def _mean(self, weight: Tensor, pictures: Tensor | slice, num_classes: int) -> tuple[Tensor, Tensor]:
        """The mean labels (B, K) of some pictures by these weights (B, N), and (B, 1): 1 where there is any weight."""
        total = weight.sum(1, keepdim=True)
        weight = weight / torch.where(total > 0, total, 1)
        entries = self.probabilities[pictures] * weight.unsqueeze(-1)
        everywhere = (self.rest[pictures] * weight).sum(1, keepdim=True)  # (B, 1)
        mean = everywhere.new_zeros(len(weight), num_classes)
        mean = mean.scatter_add(1, self.ids[pictures].flatten(1), entries.flatten(1)) + everywhere
        if self.common is not None:
            taken = (self.common.share[pictures] * weight.unsqueeze(-1)).sum(1, keepdim=True)  # (B, 1, P)
            mean = mean + (taken @ self.common.labels[pictures]).squeeze(1)
        return mean, (total > 0).to(mean.dtype)


def _blend(partner_share: Tensor, own_weight: Tensor, partner_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(share, weight): the partner's share of what has a label at all, and how much has one."""
    own, pasted = (1 - partner_share) * own_weight, partner_share * partner_weight
    weight = own + pasted
    labelled = weight > 0
    return torch.where(labelled, pasted / torch.where(labelled, weight, 1), partner_share), weight
