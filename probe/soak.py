"""Does a step hold its speed when the device is warm? What a soak saw, and when its speed has settled. Pure."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from probe.cell import Cell
from probe.records import READINGS, Seconds, StepSeconds
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import Say, append_line, ignore, parse_lines, read_lines
from spillcliff.schema import Number
from spillcliff.units import format_duration

SCHEMA = 1
FIRST_S = 20.0
"""How long the device counts as fresh: about what a grid's cell takes."""
TRAIL_S, TRAIL = 180.0, 0.5
"""The speed must hold over the last half of the time so far, and over three minutes at least. A part that grows with the
time outlasts a throttle's swings in the end, and follows a slow warming."""
SHORT_S = 600.0
"""A soak asked for less than this has FIRST_S and TRAIL_S in proportion: it can settle soon after a third of its time."""
LEAST_WINDOWS = 3
"""Of each half; that it must have held for; and that are worth keeping of a soak that was broken off."""
DRIFT = 0.005
"""Most change of a step between the halves of that part. None is allowed for noise, which would hide a slow warming."""
WARMING_C = 1.0
"""Most rise in degrees over the later half."""
THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


@dataclass(frozen=True)
class Window:
    """Some seconds of a soak: it ends `at_s` after the first timed step began, `step_s` is the median; readings are means,
    `throttle` has every bit that was set; None where the device has none."""

    at_s: Seconds
    steps: Annotated[int, Number(1)]
    step_s: StepSeconds
    clock_mhz: Annotated[float | None, Number()] = None
    temperature_c: Annotated[float | None, Number()] = None
    power_w: Annotated[float | None, Number()] = None
    utilization: Annotated[float | None, Number()] = None
    throttle: Annotated[float | None, Number()] = None


@dataclass(frozen=True)
class Soak:
    """A line of soak.jsonl: `minutes` were asked for, `seconds` run; `settled` whether the speed held at the end. UserError
    for windows that can't be."""

    schema: int
    at: str
    device: str
    software: dict[str, str | None]
    cell: Cell
    minutes: Seconds
    seconds: Seconds
    windows: tuple[Window, ...]
    settled: bool
    on_battery: bool = False

    def __post_init__(self) -> None:
        if not self.windows:
            raise UserError("windows must be a list, and not an empty one")
        if any(b.at_s <= a.at_s for a, b in itertools.pairwise(self.windows)):
            raise UserError("windows must come in the order of their at_s")

    @property
    def first_s(self) -> float:
        """Seconds of a step while the device was fresh, as a grid's cell would have measured it."""
        fresh = [w for w in self.windows if w.at_s <= min(FIRST_S, self.seconds / 10)]
        return _mean_s(fresh or self.windows[:1])

    @property
    def settled_s(self) -> float:
        """Seconds of a step at the end: over what it had settled to, else the last fifth, and a minute at least."""
        return _mean_s(self._last())

    @property
    def factor(self) -> float:
        """By how much a step is slower when warm: above 1 is slower."""
        return self.settled_s / self.first_s

    @property
    def power_w(self) -> float | None:
        powers = [w.power_w for w in self._last() if w.power_w]
        return median(powers) if powers else None

    @property
    def energy_wh(self) -> float | None:
        """What the card took over the windows; None where it doesn't tell."""
        powers = [w.power_w for w in self.windows if w.power_w]
        if len(powers) < len(self.windows):
            return None
        ends = [0.0, *(w.at_s for w in self.windows)]
        return sum(power * (b - a) for power, (a, b) in zip(powers, itertools.pairwise(ends), strict=True)) / 3600

    def _last(self) -> tuple[Window, ...]:
        end = self.windows[-1].at_s
        start = end - (_trail_s(end, self.minutes * 60) if self.settled else max(60.0, end / 5))
        late = tuple(w for w in self.windows if w.at_s > start)
        return late if len(late) < len(self.windows) else self.windows[-max(1, len(self.windows) // 5):]

    @classmethod
    def from_json(cls, values: object) -> "Soak":
        """Checks one soak; UserError says what is wrong. Unknown fields are ignored."""
        if not isinstance(values, dict):
            raise UserError("a soak must be a JSON object")
        schema.check_version(values, SCHEMA)
        return schema.read(cls, values | {"cell": Cell.from_json(values.get("cell"))}, "the soak")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"cell": self.cell.to_json()}


def load(path: Path, say: Say = ignore) -> list[Soak]:
    """The soaks of a file, oldest first; damage is told as probe.records.load does."""
    return parse_lines(path, "soaks", read_lines(path, "soaks"), Soak.from_json, say)


def append(path: Path, soak: Soak) -> None:
    """Adds one line, on disk when this returns."""
    append_line(path, soak.to_json())


def readings_of(looks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A window's readings from several of nvml.readings."""
    read = {name: [look[name] for look in looks if look.get(name) is not None] for name in READINGS}
    means = {name: fmean(values) for name, values in read.items() if values and name != "throttle"}
    if read["throttle"]:
        means["throttle"] = functools.reduce(operator.or_, read["throttle"])
    return means


def _mean_s(windows: Sequence[Window]) -> float:
    """Seconds of a step over several windows; the mean, since a card that throttles swings between two speeds."""
    return sum(w.steps * w.step_s for w in windows) / sum(w.steps for w in windows)


def _trail_s(end_s: float, asked_s: float) -> float:
    """Seconds before `end_s` over which the speed must hold."""
    return max(TRAIL_S * min(1.0, asked_s / SHORT_S), end_s * TRAIL)


def settled(windows: Sequence[Window], asked_s: float) -> bool:
    """Whether the speed has stopped drifting, seen from each of the last few windows: what swings holds by chance at one.

    Over the trail (see TRAIL), which may not reach back into the fresh start, the two halves of its time have the same mean
    step, and the later half is not warming any more. The mean, not the median: a throttle swings between two levels, of
    which a median gives one. `settled_s` is the mean of the whole trail.
    """
    return all(_holds(windows[:len(windows) - i], asked_s) for i in range(LEAST_WINDOWS))


def _holds(windows: Sequence[Window], asked_s: float) -> bool:
    if not windows:
        return False
    end = windows[-1].at_s
    trail_s = _trail_s(end, asked_s)
    if end < trail_s + FIRST_S * min(1.0, asked_s / SHORT_S):
        return False
    before = [w for w in windows if end - trail_s < w.at_s <= end - trail_s / 2]
    after = [w for w in windows if w.at_s > end - trail_s / 2]
    if min(len(before), len(after)) < LEAST_WINDOWS or abs(_mean_s(after) / _mean_s(before) - 1) > DRIFT:
        return False
    heats = [w.temperature_c for w in after if w.temperature_c is not None]
    # the means of two halves of a steady rise are half of it apart
    return len(heats) < 2 or 2 * (fmean(heats[len(heats) // 2:]) - fmean(heats[:len(heats) // 2])) <= WARMING_C


def lines(soak: Soak) -> list[str]:
    """What was seen, for a person."""
    tokens, change = soak.cell.step.tokens, (1 / soak.factor - 1) * 100
    out = [f"{tokens / soak.first_s:,.0f} tok/s at first, {tokens / soak.settled_s:,.0f} ({change:+.1f}%) after "
           f"{format_duration(soak.seconds)}"]
    for name, unit in (("clock_mhz", " MHz"), ("temperature_c", " degrees"), ("power_w", " W")):
        values = [value for w in soak.windows if (value := getattr(w, name)) is not None]
        if values:
            out.append(f"{name.partition('_')[0]}: {values[0]:.0f} to {values[-1]:.0f}{unit} (most {max(values):.0f})")
    bits = {name for w in soak.windows for bit, name in THROTTLES.items() if int(w.throttle or 0) & bit}
    if bits:
        out.append(f"slowed by: {', '.join(sorted(bits))}")
    if soak.energy_wh:
        out.append(f"energy: {soak.energy_wh:.2g} Wh of the card alone")
    if soak.on_battery:
        out.append("on battery: this is not the speed that the mains give")
    if soak.settled:
        out.append(f"settled: no drift over the last {format_duration(_trail_s(soak.seconds, soak.minutes * 60))}")
    else:
        out.append("the speed had not settled: what was lost is a lower bound; soak it for longer")
    return out
