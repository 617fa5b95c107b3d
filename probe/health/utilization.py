"""The shape of a series of readings of a job, of how busy it keeps its card or its cores: pure."""

from dataclasses import dataclass
from statistics import mean, quantiles

LOW = 70.0
"""Percent of busyness below which a reading is low: a starved card read 29 to 42 between bursts of 97 to 99 (a GTX 1060)."""
STARVED = 50.0
"""Always below it is a bubble in steps too short to be told apart, by that card's owner's rule."""
SATURATED = 85.0
CONTRAST = 25.0
"""Points between the means of the high and of the low readings, below which they are one noisy level; assumed."""
PLATEAU_S = 4.0
"""A low stretch from here on is no gap between steps; a GTX 1060's step takes 0.9 s. Assumed."""
FEW = 0.1
"""Share of low time that is not looked into: a checkpoint's copy, a line of the log."""
DIPS = 3
"""So many short low stretches, or DIPS_SHARE of the time, are a rhythm; fewer are a pause."""
DIPS_SHARE = 0.25


@dataclass(frozen=True)
class Sample:
    """One reading, at `at_s` (epoch). `cpu_percent` is of the whole process tree, 100 for one core; `machine_percent` of all
    cores, by everything; `is_waiting` whether its main threads slept. `memory_bytes` is what the job holds of its card (or
    everything does, where the driver doesn't tell), or its resident set. The rest is the card's; None where not told."""

    at_s: float
    cpu_percent: float
    machine_percent: float
    is_waiting: bool
    memory_bytes: int | None = None
    utilization: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: int | None = None
    non_local_bytes: int | None = None


@dataclass(frozen=True)
class Rhythm:
    """`name` is steady, dips (short gaps, again and again), plateaus (long ones), starved (low throughout) or middling;
    busyness in percent, `high` and `low` the means of the readings above and below LOW, memory in bytes beside each;
    `stretches` are the low times as (begin, end), `worst_s` the longest."""

    name: str
    mean: float
    high: float | None
    low: float | None
    low_share: float
    high_bytes: float | None
    low_bytes: float | None
    stretches: tuple[tuple[float, float], ...]

    @property
    def worst_s(self) -> float:
        return max((end - begin for begin, end in self.stretches), default=0.0)


def busyness(samples: tuple[Sample, ...]) -> list[float]:
    """Percent of the card at each reading; of a processor, percent of as many cores as the job keeps busy when it is busy,
    which is one at least."""
    if any(s.utilization is not None for s in samples):
        return [s.utilization or 0.0 for s in samples]
    percents = [s.cpu_percent for s in samples]
    cores = max(100.0, quantiles(percents, n=10)[-1] if len(percents) > 1 else max(percents, default=0.0))
    return [min(100.0, 100 * p / cores) for p in percents]


def rhythm(samples: tuple[Sample, ...]) -> Rhythm:
    """What the readings, in order of time and at least one, look like; each stands for the time since the one before."""
    busy = busyness(samples)
    is_low = [b < LOW for b in busy]
    high, low = ([b for b in busy if (b < LOW) is which] for which in (False, True))
    stretches = _stretches(samples, is_low)
    share, average = len(low) / len(busy), mean(busy)
    held = [[s.memory_bytes for s, b in zip(samples, busy, strict=True) if (b < LOW) is which and s.memory_bytes is not None]
            for which in (False, True)]
    return Rhythm(_name(share, average, high, low, stretches), average, _mean(high), _mean(low), share, *map(_mean, held),
                  stretches)


def _name(share: float, average: float, high: list[float], low: list[float], stretches) -> str:
    if share < FEW:
        return "steady"
    if average < STARVED and (not high or share > 1 - FEW):
        return "starved"
    if not high or mean(high) - mean(low) < CONTRAST:
        return "steady" if average >= SATURATED else "middling"
    lengths = [end - begin for begin, end in stretches]
    if sum(length for length in lengths if length >= PLATEAU_S) >= sum(lengths) / 2:
        return "plateaus"
    return "dips" if len(lengths) >= DIPS or share >= DIPS_SHARE else "steady"


def _stretches(samples, is_low: list[bool]) -> tuple[tuple[float, float], ...]:
    found: list[list[float]] = []
    for i, low in enumerate(is_low):
        if low and i and is_low[i - 1]:
            found[-1][1] = samples[i].at_s
        elif low:
            found.append([samples[i - 1].at_s if i else samples[i].at_s, samples[i].at_s])
    return tuple((begin, end) for begin, end in found)


def _mean(values: list) -> float | None:
    return mean(values) if values else None
