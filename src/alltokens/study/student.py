"""Student's t: what a paired comparison of a few seeds can tell.

The distribution is computed from the regularised incomplete beta function by its continued fraction (Abramowitz and
Stegun, 26.5.8 and 26.7.1); its tests hold it against printed tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
POWER = 0.80  # of the difference that a comparison could have detected


class Comparison(NamedTuple):
    """Two arms over the seeds that both have."""

    n: int
    difference: float
    low: float  # the 95 % interval of the difference
    high: float
    p: float  # of the two-sided paired t test
    detectable: float  # the true difference that such a test would have found with a chance of 80 %


def paired(ours: Sequence[float], baseline: Sequence[float]) -> Comparison | None:
    """Compare run by run, seed by seed; None with fewer than two pairs, of which nothing can be said."""
    differences = [a - b for a, b in zip(ours, baseline, strict=True)]
    n = len(differences)
    if n < 2:
        return None
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(n)
    half = quantile((1 + CONFIDENCE) / 2, n - 1) * error
    p = 2 * (1 - cdf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    detectable = (quantile((1 + CONFIDENCE) / 2, n - 1) + quantile(POWER, n - 1)) * error
    return Comparison(n, mean, mean - half, mean + half, p, detectable)


def cdf(t: float, freedom: float) -> float:
    """P(T <= t) with so many degrees of freedom."""
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


def quantile(probability: float, freedom: float) -> float:
    """The t below which T lies with this probability."""
    if not 0 < probability < 1:
        raise ValueError(f"a quantile's probability must lie in (0, 1), got {probability}")
    if probability < 0.5:
        return -quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # there the fraction converges slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    above, below, value = 1.0, 0.0, 1.0  # Lentz's way of evaluating a continued fraction
    for index in range(1000):
        half = index // 2
        if index == 0:
            term = 1.0
        elif index % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        below = 1 / (1 + term * below or 1e-300)
        above = 1 + term / (above or 1e-300)
        value *= below * above
        if abs(below * above - 1) < 1e-15:
            break
    return front * (value - 1)
