"""Intervals hold what they say, and drift is told from noise."""

import math
import random

import pytest

from probe.stats import is_settled, is_steady, median_interval


def test_too_few_values_have_no_interval():
    assert median_interval([1, 2, 3, 4, 5]) == (-math.inf, math.inf)
    assert not is_settled([1.0] * 5, 0.01)
    assert is_settled([1.0] * 6, 0.01)


@pytest.mark.parametrize("n", [6, 9, 20, 51])
def test_the_interval_holds_the_median_nineteen_times_in_twenty(n):
    """Of a skewed distribution, whose median is known: exponential, ln 2."""
    draw = random.Random(n)
    held = 0
    for _ in range(2000):
        low, high = median_interval([draw.expovariate(1) for _ in range(n)])
        held += low <= math.log(2) <= high
    assert held / 2000 >= 0.94


def test_drift_is_not_steady():
    assert is_steady([1.0, 1.01, 0.99, 1.0, 1.0, 1.01], 0.02)
    assert not is_steady([11.2, 10.5, 10.0, 9.4, 9.0, 8.8], 0.02)
    assert not is_steady([1.0] * 5, 0.02)
    assert is_steady([9.0] * 5 + [1.0] * 6, 0.02)  # what was before the last six is over
