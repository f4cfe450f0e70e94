"""The loss of token labeling: the picture's label and every token's own.

Shapes: B batch, N tokens, K classes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alltokens.core.kernels.sparse_cross_entropy import sparse_cross_entropy
from alltokens.core.losses import smooth_one_hot, soft_cross_entropy
from alltokens.core.token_targets import TokenTargets
from alltokens.errors import UserError, unknown

Rule = Literal["official", "sensible"]

# How far the ground truth is left to the label map where both name the same class, and where they do not. The
# published program's comment says it trusts the ground truth more where the map is wrong, but its numbers do the
# reverse (FACTS 2.1).
_MAP_SHARE: dict[str, tuple[float, float]] = {"official": (0.5, 0.9), "sensible": (0.9, 0.5)}


class LossParts(NamedTuple):
    """What a token label loss is the weighted sum of."""

    loss_class: Tensor
    loss_token: Tensor


class TokenLabelLoss(nn.Module):
    """class_weight * cross-entropy of the picture + dense_weight * mean cross-entropy of its tokens.

    The paper's dense weight is 0.5, the published program's default 1.0. `participation` is the share of each picture's
    tokens that take part in training, drawn anew every time (paper, figure 4).
    """

    def __init__(self, dense_weight: float = 0.5, class_weight: float = 1.0, participation: float = 1.0) -> None:
        super().__init__()
        for name, weight in (("dense_weight", dense_weight), ("class_weight", class_weight)):
            if not weight >= 0:
                raise UserError(f"{name} must be 0 or more, got {weight}")
        if not 0 < participation <= 1:
            raise UserError(f"participation is a share above 0 and up to 1, got {participation}")
        self.dense_weight = dense_weight
        self.class_weight = class_weight
        self.participation = participation

    def forward(
        self,
        output: tuple[Tensor, Tensor],
        class_targets: Tensor,
        targets: TokenTargets | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`output` is (logits (B, K), token logits (B, N, K)), `class_targets` (B, K), `targets` as in `token_loss`."""
        parts = self.parts(output, class_targets, targets, generator)
        return self.class_weight * parts.loss_class + self.dense_weight * parts.loss_token

    def parts(
        self,
        output: tuple[Tensor, Tensor],
        class_targets: Tensor,
        targets: TokenTargets | Tensor,
        generator: torch.Generator | None = None,
    ) -> LossParts:
        """The two losses, without their weights."""
        logits, token_logits = output
        taking_part = None
        if self.training and self.participation < 1:
            taking_part = draw_participants(token_logits, self.participation, generator)
        return LossParts(soft_cross_entropy(logits, class_targets), token_loss(token_logits, targets, taking_part))

    def extra_repr(self) -> str:
        return f"dense_weight={self.dense_weight}, class_weight={self.class_weight}, participation={self.participation}"


def token_loss(logits: Tensor, targets: TokenTargets | Tensor, weight: Tensor | None = None) -> Tensor:
    """The soft cross-entropy of token logits (B, N, K), in float32 or what is more exact.

    Targets are sparse, dense (B, N, K), or (B, K): the picture's label for all its tokens. It is the mean over tokens
    by their weight, which is that of sparse targets times `weight` (B, N); 0 where no token has any.
    """
    batch, tokens, classes = logits.shape
    if isinstance(targets, TokenTargets):
        if targets.rest.shape != (batch, tokens):
            raise UserError(f"targets for {tuple(targets.rest.shape)} tokens, but logits are {tuple(logits.shape)}")
        losses = sparse_cross_entropy(logits, targets.ids, targets.probabilities, targets.rest, targets.common)
        weight = targets.weight if weight is None else weight * targets.weight
    else:
        if targets.ndim == 2:
            targets = targets[:, None]  # (B, 1, K)
        if targets.shape not in ((batch, tokens, classes), (batch, 1, classes)):
            raise UserError(
                f"dense targets must be (B, N, K) = {(batch, tokens, classes)} or (B, K), got {tuple(targets.shape)}"
            )
        dtype = torch.promote_types(logits.dtype, torch.float32)
        losses = -(targets.to(dtype) * F.log_softmax(logits, dim=-1, dtype=dtype)).sum(-1)  # (B, N)
    if weight is None:
        return losses.mean()
    weight = weight.to(losses.dtype)
    total = weight.sum()
    return (losses * weight).sum() / torch.where(total > 0, total, 1)


def _outside_the_graph(function: Any) -> Any:
    """torch.compiler.disable, whose own types say nothing: no graph takes a generator."""
    return cast(Any, torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]


@_outside_the_graph
def draw_participants(logits: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    """(B, N): 1 for the tokens of each picture that take part, the same number in each; 0 for the others."""
    batch, tokens = logits.shape[:2]
    count = max(1, round(share * tokens))
    device = generator.device if generator is not None else torch.device("cpu")
    chosen = torch.rand(batch, tokens, generator=generator, device=device).topk(count).indices
    return torch.zeros(batch, tokens, device=device).scatter(-1, chosen, 1).to(logits.device)


def blend_ground_truth(class_targets: Tensor, labels: Tensor, rule: Rule = "sensible") -> Tensor:
    """(B, K): targets from label maps blended with the ground truth, before anything is mixed.

    `labels` are classes (B,) or targets (B, K), smoothed or not. `sensible` keeps 0.9 of the map's label where it names
    the right class and 0.5 where it does not; `official` the other way round, as the published program does.
    """
    if rule not in _MAP_SHARE:
        raise unknown("rule", rule, _MAP_SHARE)
    if labels.ndim not in (1, 2) or (labels.ndim == 2 and labels.shape != class_targets.shape):
        raise UserError(f"labels must be (B,) or {tuple(class_targets.shape)}, got {tuple(labels.shape)}")
    truth = smooth_one_hot(labels, class_targets.shape[-1]) if labels.ndim == 1 else labels
    truth = truth.to(class_targets.dtype)
    agree = truth.argmax(-1, keepdim=True) == class_targets.argmax(-1, keepdim=True)  # (B, 1)
    where_agreed, elsewhere = _MAP_SHARE[rule]
    map_share = torch.where(agree, where_agreed, elsewhere).to(class_targets.dtype)
    return torch.lerp(truth, class_targets, map_share)
