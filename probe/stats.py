"""Medians and their intervals, from raw times."""

import math
from collections.abc import Sequence
from statistics import median


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median by order statistics, which assumes no shape of the distribution (binomial; e.g.
    Conover, Practical Nonparametric Statistics, 3.2). Below 6 values no interval reaches 95%: (-inf, inf)."""
    ordered, n = sorted(values), len(values)
    # the widest tail k whose two sides together hold at most 5%
    tail, k = 0.5**n, 0
    while k < n // 2 and 2 * tail <= 0.05:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return (ordered[k - 1], ordered[n - k]) if k else (-math.inf, math.inf)


def is_settled(values: Sequence[float], within: float) -> bool:
    """Whether the 95% interval of the median lies within `within` of it, to either side."""
    low, high = median_interval(values)
    middle = median(values)
    return middle - low <= within * middle and high - middle <= within * middle


def is_steady(values: Sequence[float], within: float) -> bool:
    """Whether the last six values show no drift: the medians of their two halves differ by at most `within`."""
    if len(values) < 6:
        return False
    before, after = median(values[-6:-3]), median(values[-3:])
    return abs(before - after) <= within * after
