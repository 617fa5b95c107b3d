"""Where the marks of an axis go, for the page's charts and the pictures alike: pure."""

import math

_CLOCK = tuple(step * unit for unit in (1, 60) for step in (1, 2, 5, 10, 20, 30))
"""Seconds below an hour that are round on a clock."""


def linear(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round values from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def logarithmic(low: float, high: float, most: int) -> list[float]:
    """At most `most` values from `low` to `high`: 1, 2 and 5 times powers of ten, else 1 and 3 times, else every power, else
    every second, third ... of those."""
    found = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = _powers(low, high, steps)
        if len(found) <= most:
            break
    return _thinned(found, most)


def durations(low: float, high: float, most: int) -> list[float]:
    """The same for seconds: those of a clock up to an hour, then hours."""
    found = []
    for below_hour, steps in ((_CLOCK, (1, 2, 5)), ((1, 5, 20, 60, 300, 1200), (1, 5)), ((1, 10, 60, 600), (1,))):
        found = [*_powers(low, min(high, 0.99), (1,)), *(t for t in below_hour if low <= t <= high),
                 *(3600 * h for h in _powers(max(low / 3600, 1), high / 3600, steps))]
        if len(found) <= most:
            break
    return _thinned(found, most)


def differences(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Ratios from `low` below 1 to `high` above it, and how they read as differences: `"+5%"`."""
    found = [1 + v for v in linear(low - 1, high - 1, most)] if high < 3 else [1.0, *logarithmic(low, high, most)]
    values = sorted({round(v, 12) for v in found if v > 0})
    return [(v, "as planned" if v == 1 else f"{(v - 1) * 100:+,.4g}%") for v in values]


def clock(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 seconds from `low` to `high` in equal steps that are round on a clock, or in hours."""
    raw = (high - low) / most
    step = next((t for t in _CLOCK if t >= raw), None)
    if step is None or raw <= 0.5:
        unit = 1 if raw <= 0.5 else 3600
        return [unit * v for v in linear(low / unit, high / unit, most)]
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _powers(low: float, high: float, steps: tuple[int, ...]) -> list[float]:
    """`steps` times the powers of ten, from `low` to `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for p in powers for m in steps if low * (1 - 1e-9) <= (v := float(f"{m}e{p}")) <= high * (1 + 1e-9)]


def _thinned(values: list[float], most: int) -> list[float]:
    return values[::math.ceil(len(values) / most) or 1]


def duration_label(seconds: float) -> str:
    """36000 to `"10 h"`, 600 to `"10 min"`, 0.1 to `"0.1 s"`."""
    unit, scale = ("h", 3600) if seconds >= 3600 else ("min", 60) if seconds >= 60 else ("s", 1)
    value = seconds / scale
    return f"{value:,.10g} {unit}" if 1e-4 < value < 1e7 else f"{value:.3g} {unit}"
