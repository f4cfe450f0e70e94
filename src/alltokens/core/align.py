"""How the partner's share of every token moves through a network: the rules of TL-Align.

Shapes: B batch, H heads, T query tokens, S key tokens, C channels, h and w token grid.

The paper takes networks apart into five operations (supplement, table 2) and says for each what becomes of the labels
Y. A label here is one number per token, the partner's share; as every rule is a row-stochastic matrix, that is exact.

| operation                     | labels                 | here                                                     |
|-------------------------------|------------------------|----------------------------------------------------------|
| spatial mixing, Z <- W Z      | Y <- Norm(W) Y         | `spatial_mixing`, `attention_share`, `convolution`, ...  |
| residual, Z <- Z + g(Z)       | Y <- Norm(Y + g(Y))    | `residual`                                               |
| aggregation of tokens         | Y <- Norm(sum of Y)    | `aggregation`                                            |
| channel mixing, Z <- Z W      | Y <- Y                 | nothing to do                                            |
| point-wise, Z <- f(Z)         | Y <- Y                 | nothing to do                                            |

Norm divides every row by its sum. Weights that can be negative enter by their absolute value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.core.kernels.attention_share import attention_share, mean_over_heads

__all__ = [
    "additive_bias",
    "aggregation",
    "attention_share",
    "convolution",
    "mean_over_heads",
    "pooling_minus_identity",
    "residual",
    "spatial_mixing",
]


def spatial_mixing(weights: Tensor, share: Tensor, valid: Tensor | None = None) -> Tensor:
    """(..., T): share (..., S) through Norm(|weights|), weights (..., T, S), without columns that are not `valid`."""
    weights = weights.to(share.dtype).abs()
    if valid is not None:
        weights = weights * valid.to(share.dtype).unsqueeze(-2)
    mixed = (weights @ share.unsqueeze(-1)).squeeze(-1)
    return mixed / weights.sum(-1)


def residual(share: Tensor, branch: Tensor, terms: int = 1) -> Tensor:
    """The share after `share + branch` on tokens, where `share` is already the mean of `terms` summands.

    One ordinary residual is the mean of the two (FACTS 3.1); a second parallel branch finds terms=2; terms=0 forgets
    the stream.
    """
    return (share * terms + branch) / (terms + 1) if terms else branch


def aggregation(
    share: Tensor,
    size: int | tuple[int, int],
    stride: int | tuple[int, int],
    padding: int | tuple[int, int] = 0,
    ceil: bool = False,
) -> Tensor:
    """(B, h, w) -> (B, h', w'): the plain mean of the tokens that are merged, of those inside the picture.

    `ceil` keeps a window that lies only partly inside.
    """
    return F.avg_pool2d(share.unsqueeze(1), size, stride, padding, ceil, count_include_pad=False).squeeze(1)


def convolution(share: Tensor, kernel: Tensor, padding: tuple[int, int], dilation: tuple[int, int] = (1, 1)) -> Tensor:
    """(B, h, w): a depth-wise convolution of stride 1, kernel (C, 1, y, x).

    The weights are the mean over channels of the absolute kernel; each row is normalised over what lies in the picture.
    """
    weights = kernel.to(share.dtype).abs().mean(0, keepdim=True)  # (1, 1, y, x)
    with_ones = torch.cat([share, torch.ones_like(share[:1])]).unsqueeze(1)  # (B + 1, 1, h, w)
    mixed = F.conv2d(with_ones, weights, padding=padding, dilation=dilation).squeeze(1)
    return mixed[:-1] / mixed[-1]


def pooling_minus_identity(share: Tensor, size: int) -> Tensor:
    """(B, h, w): the mixer of PoolFormer, the mean of the n tokens of a neighbourhood minus the token itself.

    As a matrix: 1/n beside the diagonal and 1/n - 1 on it, so absolute rows sum to 2 (n - 1) / n.
    """

    def mean(values: Tensor) -> Tensor:
        return F.avg_pool2d(values.unsqueeze(1), size, 1, size // 2, count_include_pad=False).squeeze(1)

    inside = F.avg_pool2d(torch.ones_like(share[:1]).unsqueeze(1), size, 1, size // 2).squeeze(1)
    count = inside * size * size  # (1, h, w): n, smaller at the edges
    others = mean(share) * count - share
    return (others + (count - 1) * share) / (2 * (count - 1)).clamp(min=1)


def additive_bias(bias: Tensor | None, valid: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """An attention mask (boolean or additive, (..., T, S)) and the keys that count (B, S) as one additive bias."""
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill(~bias, float("-inf"))
    if valid is None:
        return bias
    left_out = torch.zeros(valid.shape, dtype=dtype, device=valid.device).masked_fill(~valid, float("-inf"))
    left_out = left_out[:, None, None, :]  # (B, 1, 1, S)
    return left_out if bias is None else bias + left_out
