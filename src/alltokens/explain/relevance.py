"""The rules by which relevance goes back through a transformer (Chefer et al., CVPR 2021), as pure functions.

Shapes: B batch, H heads, T tokens, S keys, C channels in, D channels out, d channels of a head.

Relevance is what of a logit is owed to each number. Every rule takes what entered an operation and the relevance of
what came out, and gives the relevance of what entered (FACTS section 6). What works on single numbers (norms, GELU,
softmax, scales) hands relevance on as it is. The published program takes sums over the batch, which it only runs with
one picture; here every sample has its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-9


def divided(value: Tensor, by: Tensor) -> Tensor:
    """value / by, where `by` is moved off zero a little and dividing by exactly 0 gives 0."""
    moved = by.clamp(min=EPSILON) + by.clamp(max=EPSILON)
    moved = torch.where(moved == 0, EPSILON, moved)
    return torch.where(by != 0, value / moved, 0)


def through_linear(entered: Tensor, weight: Tensor, relevance: Tensor) -> Tensor:
    """(..., C) of entered (..., C), weight (D, C), relevance (..., D), by positive products; the bias is left out."""
    high, low = entered.clamp(min=0), entered.clamp(max=0)
    raising, lowering = weight.clamp(min=0), weight.clamp(max=0)
    per_product = divided(relevance, F.linear(high, raising) + F.linear(low, lowering))
    return high * (per_product @ raising) + low * (per_product @ lowering)


def through_sum(first: Tensor, second: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Of the two summands, in proportion; then each sample's totals keep the sign and the sum of its relevance."""
    ratio = divided(relevance, first + second)
    parts = first * ratio, second * ratio
    totals = [_total(part) for part in parts]
    whole = totals[0].abs() + totals[1].abs()
    wanted = [divided(total.abs(), whole) * _total(relevance) for total in totals]
    one, other = (part * divided(want, total) for part, want, total in zip(parts, wanted, totals, strict=True))
    return one, other


def through_copies(value: Tensor, *relevances: Tensor) -> Tensor:
    """Of a value that was used several times."""
    return value * sum(divided(relevance, value) for relevance in relevances)


def through_attention(weights: Tensor, values: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Of weights (B, H, T, S) and values (B, H, S, d), from that of weights @ values: half for each."""
    ratio = divided(relevance, weights @ values)  # (B, H, T, d)
    return weights * (ratio @ values.mT) / 2, values * (weights.mT @ ratio) / 2


def through_scores(query: Tensor, key: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Of query (B, H, T, d) and key (B, H, S, d), from that of their products (B, H, T, S): half for each."""
    ratio = divided(relevance, query @ key.mT)
    return query * (ratio @ key) / 2, key * (ratio.mT @ query) / 2


def attention_relevance(gradient: Tensor, relevance: Tensor) -> Tensor:
    """(B, T, S) of one layer: the positive part of gradient times relevance, both (B, H, T, S), mean over heads."""
    return (gradient * relevance).clamp(min=0).mean(1)


def class_row(layers: list[Tensor]) -> Tensor:
    """(B, T): the first row of the product, last layer first, of each layer (B, T, T) plus the identity."""
    row = torch.zeros_like(layers[0][:, :1])  # (B, 1, T)
    row[:, :, 0] = 1
    for layer in reversed(layers):
        row = row + row @ layer
    return row.squeeze(1)


def _total(value: Tensor) -> Tensor:
    """The sum over a sample, of a shape that multiplies (B, ...)."""
    return value.sum(tuple(range(1, value.ndim)), keepdim=True)
