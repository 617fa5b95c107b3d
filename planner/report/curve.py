"""Hours between the points of a curve over the tokens seen: pure, and what the page's script does too."""

import math
from collections.abc import Sequence

Point = tuple[float, float, float, float]
"""Tokens seen, then low, mid and high hours."""


def usable(curve: Sequence[Sequence[float | None]]) -> list[Point]:
    """The points that a logarithm can be taken of, by tokens, none twice."""
    found = {p[0]: tuple(map(float, p)) for p in curve
             if len(p) == 4 and all(v is not None and 1e-30 < v < 1e30 for v in p)}
    return [found[tokens] for tokens in sorted(found)]


def hours_at(points: Sequence[Point], tokens: float) -> tuple[float, float, float]:
    """Low, mid and high hours for `tokens` seen: straight lines between logarithms, and past either end the line of the two
    nearest points. One point alone stands for a constant speed."""
    if len(points) == 1:
        return tuple(h * tokens / points[0][0] for h in points[0][1:])
    i = 1
    while i < len(points) - 1 and points[i][0] < tokens:
        i += 1
    a, b = points[i - 1], points[i]
    part = math.log(tokens / a[0]) / math.log(b[0] / a[0])
    return tuple(math.exp(math.log(low) + part * math.log(high / low)) for low, high in zip(a[1:], b[1:], strict=True))
