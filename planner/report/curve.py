"""Hours between the points of a curve over the tokens seen: pure, and what the page's script does too."""

import math
from collections.abc import Sequence

from trainer.plan import Span

Point = tuple[float, float, float, float]
"""Tokens seen, then low, mid and high hours."""


def usable(points: Sequence[Point]) -> list[Point]:
    """The points that a logarithm can be taken of, by tokens."""
    return sorted(p for p in points if all(1e-30 < v < 1e30 for v in p))


def hours_at(points: Sequence[Point], tokens: float) -> Span:
    """Hours for `tokens` seen, of at least two points: straight lines between logarithms, and past either end the line of
    the two nearest points."""
    i = next((i for i in range(1, len(points) - 1) if points[i][0] >= tokens), len(points) - 1)
    a, b = points[i - 1], points[i]
    part = math.log(tokens / a[0]) / math.log(b[0] / a[0])
    hours = [math.exp(math.log(low) + part * math.log(high / low)) for low, high in zip(a[1:], b[1:], strict=True)]
    return Span(*sorted(hours))  # past the ends the lines may cross
