"""What goes wrong with the speed of a run, from outside of it, while it goes: pure."""

from dataclasses import dataclass
from statistics import median

from spillcliff.hardware.device import THROTTLED
from spillcliff.units import format_bytes

FALL = 1.5
"""A fall of tok/s beyond this factor (against a smaller cell, or a plan) is no noise: the smallest spill measured (a quarter
of a GB past a cap of 5 GB, on an H200) made the step 4.2x longer, a GTX 1060's first one 3.2x."""
HEAT_BITS = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's throttle bits but for the power cap (0x4), which a card at full load may show all the time: it explains nothing."""
HEAT_FALL = 2.0
"""The most that heat is taken to cost where no clock was read: a GTX 1060 laptop lost 9 to 14%, clocks fall to half before a
card shuts down; a spill costs 3 and more."""
CLOCK_DOUBT = 1.2
"""How far a fall may be beyond what the clock's share explains, which is read once; assumed."""
MOVED_BYTES = 32 << 20
"""Growth of a process's memory outside the card that means a spill: what the step pins itself is under 1 MB, and 64 MB have
been reported to cost 26% of the speed. Only growth: a healthy process may hold 480 to 940 MB there."""
BUSY_PERCENT = 10
"""Others' use of the card from which on it is not ours: a product loop beside a cell read 50%, a card with nobody else on it
nothing. That a desktop stays below is assumed."""
DATA_SHARE = 0.25
"""Of the steps' time waiting for tokens: from here on that explains most of a fall by FALL, which is a third."""
FREE_IT = "close what else uses the card; if it stays, Ctrl-C and plan with a smaller --limit"
AWAY_S, AWAY_TIMES = 60.0, 20.0
"""A step of more than a minute and of so many usual ones: a spill costs 75 at most where it was seen, but every step of
it; this one stands alone."""


@dataclass(frozen=True)
class SpeedReadings:
    """What a run shows now. `tok_s` is of the latest steps, `planned_tok_s` the low end of the plan's band, `data_share` the
    part of the latest steps that waited for tokens, `clock_share` that of the card's highest clock; None where the platform
    can't tell."""

    kind: str
    tok_s: float
    planned_tok_s: float
    data_share: float
    spilled_bytes: int | None = None
    throttle: int | None = None
    clock_share: float | None = None
    temperature_c: float | None = None
    on_battery: bool = False
    other_pid: int | None = None
    other_percent: float | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Slowdown:
    """One thing that costs speed: `cause` is spill, battery, data, throttle, contended or slow; `line` has the evidence and
    what to do."""

    cause: str
    line: str


def allowed_fall(throttle_bits: int, clock_share: float | None) -> float:
    """The fall of tok/s up to which no spill is needed to explain it, at these throttle bits (0: none) and this share of the
    usual clock (None where it was not read): no more than the clock says."""
    if throttle_bits and clock_share:
        return max(FALL, CLOCK_DOUBT / clock_share)
    return HEAT_FALL if throttle_bits & HEAT_BITS else FALL


def find_slowdown(now: SpeedReadings) -> Slowdown | None:
    """What is wrong; None if nothing is. Of what may cost speed on a card other programs come first, then a spill, then
    heat."""
    is_slow = now.tok_s * FALL < now.planned_tok_s
    if is_slow and now.other_percent is not None and now.other_percent >= BUSY_PERCENT:
        return Slowdown("contended", f"{_pace(now)}: another process (pid {now.other_pid}) keeps the card "
                                     f"{now.other_percent:.0f}% busy; close it")
    if now.spilled_bytes is not None and now.spilled_bytes > MOVED_BYTES:
        return Slowdown("spill", f"{format_bytes(now.spilled_bytes)} of this run have moved to system memory "
                                 f"({_pace(now)}): {FREE_IT}")
    if not is_slow:
        return None
    if now.on_battery:
        return Slowdown("battery", f"{_pace(now)}, and the machine is on battery: plug it in")
    if now.data_share > DATA_SHARE:
        return Slowdown("data", f"{_pace(now)}: {now.data_share:.0%} of it waits for tokens; is the disk of --data slow or "
                                f"busy, or the processor?")
    allowed = allowed_fall((now.throttle or 0) & THROTTLED, now.clock_share)
    if allowed > FALL and now.tok_s * allowed >= now.planned_tok_s:
        hot = "" if now.temperature_c is None else f" at {now.temperature_c:.0f} degrees"
        return Slowdown("throttle", f"{_pace(now)}: the card throttles{hot}; clear its vents, or plan from `probe soak`")
    if now.kind in ("cuda", "xpu"):
        size = "" if now.reserved_bytes is None else f" of its {format_bytes(now.reserved_bytes)}"
        heat = "more than its throttle explains" if (now.throttle or 0) & HEAT_BITS else "and no throttle"
        return Slowdown("spill", f"{_pace(now)}, {heat}: some{size} has likely moved to system memory; {FREE_IT}")
    return Slowdown("slow", f"{_pace(now)}: what else is this machine busy with?")


def only_a_spill_explains(now: SpeedReadings, fall: float) -> bool:
    """Whether steps that take `fall` times the usual have spilled: by the system's count where it has one, else if no other
    program, heat, battery or wait for tokens explains so much."""
    if now.kind not in ("cuda", "xpu"):
        return False
    if now.spilled_bytes is not None:
        return now.spilled_bytes > MOVED_BYTES
    if now.on_battery or now.data_share > DATA_SHARE:
        return False
    left_to_us = max(0.01, 1 - (now.other_percent or 0) / 100)
    return fall > max(allowed_fall((now.throttle or 0) & THROTTLED, now.clock_share), FALL / left_to_us)


def _pace(now: SpeedReadings) -> str:
    return f"{now.tok_s:,.0f} tok/s where at least {now.planned_tok_s:,.0f} were planned"


def is_away(step_s: float, usual: list[float]) -> bool:
    """Whether a step took so long beside the `usual` ones that the machine was suspended, or the process stopped, in it."""
    return bool(usual) and step_s > max(AWAY_S, AWAY_TIMES * median(usual))
