"""Student's t against printed tables and against direct integration."""

import math

import pytest

from alltokens.study.student import cdf, paired, quantile


# The two-sided 95 % column (and the 80 % quantile) of any printed table of the distribution.
@pytest.mark.parametrize(
    ("freedom", "at_975", "at_80"),
    [(1, 12.7062, 1.3764), (2, 4.3027, 1.0607), (4, 2.7764, 0.9410), (9, 2.2622, 0.8834), (19, 2.0930, 0.8610)],
)
def test_quantiles_are_those_of_the_tables(freedom, at_975, at_80):
    assert quantile(0.975, freedom) == pytest.approx(at_975, abs=5e-5)
    assert quantile(0.80, freedom) == pytest.approx(at_80, abs=5e-5)
    assert quantile(0.025, freedom) == -quantile(0.975, freedom)


def test_the_distribution_is_the_integral_of_its_density():
    freedom, t = 6, 1.7
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    steps = 20_000
    area = sum(
        scale * (1 + ((i + 0.5) * t / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) * t / steps for i in range(steps)
    )
    assert cdf(t, freedom) == pytest.approx(0.5 + area, abs=1e-8)
    assert cdf(-t, freedom) == pytest.approx(0.5 - area, abs=1e-8)


def test_a_paired_comparison_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, standard error 1 / sqrt(3), t = 2 sqrt(3) with 2 degrees.
    test = paired([71.0, 72.0, 73.0], [70.0, 70.0, 70.0])
    error = 1 / math.sqrt(3)
    assert (test.n, test.difference) == (3, 2.0)
    assert (test.low, test.high) == pytest.approx((2 - 4.3027 * error, 2 + 4.3027 * error), abs=1e-4)
    assert test.p == pytest.approx(0.0742, abs=1e-4)
    assert test.detectable == pytest.approx((4.3027 + 1.0607) * error, abs=1e-4)


def test_too_few_pairs_and_equal_pairs():
    assert paired([1.0], [2.0]) is None
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0.0
