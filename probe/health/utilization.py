"""The pattern in a series of readings of how busy a job keeps its card or its cores: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Literal

LOW_PERCENT = 70.0
"""Busyness below which a reading is low: a starved card read 29 to 42 between bursts of 97 to 99 (a GTX 1060)."""
STARVED_PERCENT = 50.0
"""Always below it is a bubble in steps too short to be told apart, by that card's owner's rule."""
SATURATED_PERCENT = 85.0
CONTRAST_POINTS = 25.0
"""Percentage points between the means of the high and of the low readings, below which they are one noisy level; assumed."""
PLATEAU_S = 4.0
"""A low period from here on is no gap between steps; a GTX 1060's step takes 0.9 s. Assumed."""
NEGLIGIBLE_SHARE = 0.1
"""Share of low time that needs no cause: a checkpoint's copy, a line of the log."""
DIPS = 3
"""So many short low periods, or DIPS_SHARE of the time, recur; fewer are a pause."""
DIPS_SHARE = 0.25

PatternName = Literal["steady", "dips", "plateaus", "starved", "middling", "untold"]
"""Dips are short gaps, again and again, plateaus long ones; starved is low throughout, middling one level in between. Untold
is a card that gives no reading of how busy it is."""
Period = tuple[float, float]
"""When something began and ended, in seconds since the epoch."""


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
class UtilizationPattern:
    """How busyness goes up and down. `high_percent` and `low_percent` are the means of the readings above and below
    LOW_PERCENT (None without any), with the mean memory at each; `low_share` is the part of the readings that are low, and
    `low_periods` when they were."""

    name: PatternName
    mean_percent: float
    high_percent: float | None
    low_percent: float | None
    low_share: float
    high_bytes: float | None
    low_bytes: float | None
    low_periods: tuple[Period, ...]

    @property
    def longest_low_s(self) -> float:
        return max((end - begin for begin, end in self.low_periods), default=0.0)


def busy_percents(samples: Sequence[Sample]) -> list[float]:
    """Percent of the card at each reading that has one; of a job without a card, percent of as many cores as it keeps busy
    when it is busy, which is one at least."""
    told = [s.utilization for s in samples if s.utilization is not None]
    if told:
        return told
    percents = [s.cpu_percent for s in samples]
    cores = max(100.0, quantiles(percents, n=10)[-1] if len(percents) > 1 else max(percents, default=0.0))
    return [min(100.0, 100 * p / cores) for p in percents]


def utilization_pattern(samples: Sequence[Sample], is_card: bool) -> UtilizationPattern:
    """The pattern of one reading or more, in order of time; each stands for the time since the one before. Of a job on a
    card those count that the card has told: an instance of MIG tells none, and the processor's time says nothing of it."""
    if is_card:
        samples = [s for s in samples if s.utilization is not None]
        if not samples:
            return UtilizationPattern(name="untold", mean_percent=0.0, high_percent=None, low_percent=None, low_share=0.0,
                                      high_bytes=None, low_bytes=None, low_periods=())
    busy = busy_percents(samples)
    is_low = [percent < LOW_PERCENT for percent in busy]
    high = [percent for percent in busy if percent >= LOW_PERCENT]
    low = [percent for percent in busy if percent < LOW_PERCENT]
    low_periods = _low_periods(samples, is_low)
    return UtilizationPattern(
        name=_name(high, low, low_periods), mean_percent=mean(busy), high_percent=_mean(high), low_percent=_mean(low),
        low_share=len(low) / len(busy), high_bytes=_mean(_memory_where(samples, is_low, False)),
        low_bytes=_mean(_memory_where(samples, is_low, True)), low_periods=low_periods)


def _memory_where(samples: Sequence[Sample], is_low: list[bool], wanted: bool) -> list[int]:
    return [s.memory_bytes for s, low in zip(samples, is_low, strict=True) if low is wanted and s.memory_bytes is not None]


def _name(high: list[float], low: list[float], low_periods: tuple[Period, ...]) -> PatternName:
    average, low_share = mean(high + low), len(low) / (len(high) + len(low))
    if low_share < NEGLIGIBLE_SHARE:
        return "steady"
    if average < STARVED_PERCENT and (not high or low_share > 1 - NEGLIGIBLE_SHARE):
        return "starved"
    if not high or mean(high) - mean(low) < CONTRAST_POINTS:
        return "steady" if average >= SATURATED_PERCENT else "middling"
    seconds = [end - begin for begin, end in low_periods]
    if sum(s for s in seconds if s >= PLATEAU_S) >= sum(seconds) / 2:
        return "plateaus"
    return "dips" if len(seconds) >= DIPS or low_share >= DIPS_SHARE else "steady"


def _low_periods(samples: Sequence[Sample], is_low: list[bool]) -> tuple[Period, ...]:
    periods: list[Period] = []
    for i, low in enumerate(is_low):
        if low and i and is_low[i - 1]:
            periods[-1] = periods[-1][0], samples[i].at_s
        elif low:
            periods.append((samples[max(0, i - 1)].at_s, samples[i].at_s))
    return tuple(periods)


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None
