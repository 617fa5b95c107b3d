"""Does a step hold its speed when the device is warm? What a soak saw, and when its speed has settled. Pure."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from probe import jsonl
from probe.cell import Cell
from trainer.config import from_fields
from trainer.errors import UserError
from trainer.units import format_duration

SCHEMA = 1
FIRST_S = 20.0
"""How long the device counts as fresh: about what a grid's cell takes."""
LEAST_S = 120.0
TRAIL = 0.4
"""Part of the time so far over which the speed must hold; growing with it, it outlasts a throttle's swings and follows a
slow warming to its end: with a time constant of 3 minutes and 10% lost, it ends within 0.5% of where that leads."""
DRIFT, WARMING_C = 0.005, 1.0
"""Between the halves of that part: most change of the median step, and of the temperature in degrees."""
THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


@dataclass(frozen=True)
class Window:
    """Some seconds of a soak: `at_s` since the first timed step, `step_s` the median; readings at its end, None where the
    device has none."""

    at_s: float
    steps: int
    step_s: float
    clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    utilization: float | None = None
    throttle: int | None = None


@dataclass(frozen=True)
class Soak:
    """A line of soak.jsonl: `minutes` were asked for, `seconds` run; `settled` whether the speed held at the end."""

    schema: int
    at: str
    device: str
    software: dict
    cell: Cell
    minutes: float
    seconds: float
    windows: tuple[Window, ...]
    settled: bool
    on_battery: bool = False

    @property
    def first_s(self) -> float:
        """Seconds of a step while the device was fresh, as a grid's cell would have measured it."""
        fresh = [w for w in self.windows if w.at_s <= min(FIRST_S, self.seconds / 10)]
        return _mean_s(fresh or self.windows[:1])

    @property
    def settled_s(self) -> float:
        """Seconds of a step at the end: over the last fifth, and a minute at least."""
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
        if not all(w.power_w for w in self.windows):
            return None
        ends = [0.0, *(w.at_s for w in self.windows)]
        return sum(w.power_w * (b - a) for w, a, b in zip(self.windows, ends, ends[1:], strict=False)) / 3600

    def _last(self) -> tuple[Window, ...]:
        start = self.windows[-1].at_s - max(60.0, self.windows[-1].at_s / 5)
        late = tuple(w for w in self.windows if w.at_s > start)
        return late if len(late) < len(self.windows) else self.windows[-max(1, len(self.windows) // 5):]

    @classmethod
    def from_json(cls, values: object) -> "Soak":
        """Checks one soak; UserError says what is wrong. Unknown fields are ignored."""
        if not isinstance(values, dict):
            raise UserError("a soak must be a JSON object")
        if values.get("schema") != SCHEMA:
            raise UserError(f"schema is {values.get('schema')!r:.40}; this version reads {SCHEMA}")
        values = dict(values)
        values["cell"] = from_fields(Cell, values.get("cell"), "cell")
        windows = values.get("windows")
        if not isinstance(windows, list) or not windows:
            raise UserError("windows must be a list, and not an empty one")
        values["windows"] = tuple(from_fields(Window, w, "a window") for w in windows)
        for w in values["windows"]:
            for field in dataclasses.fields(Window):
                value = getattr(w, field.name)
                missing = value is None and field.default is None
                if not (_is_number(value) or missing) or field.name == "step_s" and not value:
                    raise UserError(f"{field.name} of a window is {value!r:.40}; it must be a number of 0 or more")
        soak = from_fields(cls, values, "the soak")
        for name, kind, what in (("at", str, "text"), ("device", str, "text"), ("software", dict, "an object"),
                                 ("settled", bool, "true or false"), ("on_battery", bool, "true or false")):
            if not isinstance(getattr(soak, name), kind):
                raise UserError(f"{name} must be {what}")
        for name in ("minutes", "seconds"):
            if not _is_number(getattr(soak, name)):
                raise UserError(f"{name} must be a number of 0 or more")
        return soak

    def to_json(self) -> dict:
        return dataclasses.asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300


def load(path: Path, say=lambda line: None) -> list[Soak]:
    """The soaks of a file, oldest first; damage is told as probe.records.load does."""
    return jsonl.parse(path, "soaks", jsonl.lines(path, "soaks"), Soak.from_json, say)


def _mean_s(windows: Sequence[Window]) -> float:
    """Seconds of a step over several windows; the mean, since a card that throttles swings between two speeds."""
    return sum(w.steps * w.step_s for w in windows) / sum(w.steps for w in windows)


def settled(windows: Sequence[Window], asked_s: float) -> bool:
    """Whether the speed has stopped drifting: over the last TRAIL of the time, the two halves have the same mean step
    (within DRIFT, or two standard errors where windows are noisier than that), and it is not warming any more. Never before
    two minutes, or a third of `asked_s` if that is less."""
    if not windows or windows[-1].at_s < min(LEAST_S, asked_s / 3):
        return False
    start = windows[-1].at_s * (1 - TRAIL)
    trail = [w for w in windows if w.at_s > start]
    before, after = trail[:len(trail) // 2], trail[len(trail) // 2:]
    if len(before) < 3:
        return False
    # noise is what neighbours differ by, in the median 0.95 standard deviations of it: swings of a throttle are none
    noise = median(abs(a.step_s - b.step_s) for a, b in itertools.pairwise(trail)) / 0.95
    error = noise * math.sqrt(1 / len(before) + 1 / len(after))
    if abs(_mean_s(after) - _mean_s(before)) > max(DRIFT * _mean_s(before), 2 * error):
        return False
    warmths = [[w.temperature_c for w in half if w.temperature_c is not None] for half in (before, after)]
    return not all(warmths) or median(warmths[1]) - median(warmths[0]) <= WARMING_C


def lines(soak: Soak) -> list[str]:
    """What was seen, for a person."""
    tokens, change = soak.cell.step.tokens, (1 / soak.factor - 1) * 100
    out = [f"{tokens / soak.first_s:,.0f} tok/s at first, {tokens / soak.settled_s:,.0f} ({change:+.1f}%) after "
           f"{format_duration(soak.seconds)}"]
    for name, unit in (("clock_mhz", " MHz"), ("temperature_c", " degrees"), ("power_w", " W")):
        seen = [value for w in soak.windows if (value := getattr(w, name)) is not None]
        if seen:
            out.append(f"{name.partition('_')[0]}: {seen[0]:.0f} to {seen[-1]:.0f}{unit} (most {max(seen):.0f})")
    bits = {name for w in soak.windows for bit, name in THROTTLES.items() if int(w.throttle or 0) & bit}
    if bits:
        out.append(f"slowed by: {', '.join(sorted(bits))}")
    if soak.energy_wh:
        out.append(f"energy: {soak.energy_wh:.2g} Wh of the card alone")
    if soak.on_battery:
        out.append("on battery: this is not the speed that the mains give")
    if not soak.settled:
        out.append("the speed had not settled: it may fall further; soak it for longer")
    return out
