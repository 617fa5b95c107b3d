"""Where the marks of an axis go, as (value, text): pure."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from planner.report.text import bytes_text, count_text

C = TypeVar("C")

Ticks = list[tuple[float, str]]

_CLOCK = tuple(step * unit for unit in (1, 60) for step in (1, 2, 5, 10, 20, 30))
"""Seconds below an hour that are round on a clock."""


def linear(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round values from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    return _multiples(low, high, next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9)))


def sizes(low: float, high: float, most: int) -> Ticks:
    return [(v, bytes_text(v) if v else "0") for v in linear(low, high, most)]


def counts(low: float, high: float, most: int) -> Ticks:
    """At most `most` counts on a logarithmic axis: 1, 2 and 5 times powers of ten, else 1 and 3 times, else every power,
    else every second, third ... of those."""
    values = _fewest(lambda steps: _powers(low, high, steps), ((1, 2, 5), (1, 3), (1,)), most)
    return [(v, count_text(v)) for v in values]


def durations(low_s: float, high_s: float, most: int) -> Ticks:
    """The same for seconds: those of a clock up to an hour, then hours."""
    def of(steps: Sequence[int], clock: Sequence[int]) -> list[float]:
        return [*_powers(low_s, min(high_s, 0.99), (1,)), *(float(t) for t in clock if low_s <= t <= high_s),
                *(3600 * h for h in _powers(max(low_s / 3600, 1), high_s / 3600, steps))]

    choices = (((1, 2, 5), _CLOCK), ((1, 5), (1, 5, 20, 60, 300, 1200)), ((1,), (1, 10, 60, 600)))
    return [(v, duration_label(v)) for v in _fewest(lambda choice: of(*choice), choices, most)]


def clock(low_s: float, high_s: float, most: int) -> Ticks:
    """At most `most` + 1 times in equal steps that are round on a clock, or in hours."""
    raw_s = (high_s - low_s) / most
    step_s = next((t for t in _CLOCK if t >= raw_s), None)
    if raw_s <= 0.5:
        values = linear(low_s, high_s, most)
    elif step_s is None:
        values = [3600 * v for v in linear(low_s / 3600, high_s / 3600, most)]
    else:
        values = _multiples(low_s, high_s, step_s)
    return [(v, duration_label(v) if v else "0") for v in values]


def differences(low: float, high: float, most: int) -> Ticks:
    """Ratios from `low` below 1 to `high` above it, and how they read as differences: `"+5%"`."""
    values = [1 + v for v in linear(low - 1, high - 1, most)] if high < 3 else [
        1.0, *_fewest(lambda steps: _powers(low, high, steps), ((1, 2, 5), (1, 3), (1,)), most)]
    values = sorted({round(v, 12) for v in values if v > 0})
    return [(v, "as planned" if v == 1 else f"{(v - 1) * 100:+,.4g}%") for v in values]


def _fewest(values_of: Callable[[C], list[float]], choices: Sequence[C], most: int) -> list[float]:
    """The values of the first choice that gives at most `most`; of the last one every second, third ... if need be."""
    values: list[float] = []
    for choice in choices:
        values = values_of(choice)
        if len(values) <= most:
            break
    return values[::math.ceil(len(values) / most) or 1]


def _multiples(low: float, high: float, step: float) -> list[float]:
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float, steps: Sequence[int]) -> list[float]:
    """`steps` times the powers of ten, from `low` to `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for p in powers for m in steps if low * (1 - 1e-9) <= (v := float(f"{m}e{p}")) <= high * (1 + 1e-9)]


def duration_label(seconds: float) -> str:
    """36000 to `"10 h"`, 600 to `"10 min"`, 0.1 to `"0.1 s"`."""
    unit, scale = ("h", 3600) if seconds >= 3600 else ("min", 60) if seconds >= 60 else ("s", 1)
    value = seconds / scale
    return f"{value:,.10g} {unit}" if 1e-4 < value < 1e7 else f"{value:.3g} {unit}"
