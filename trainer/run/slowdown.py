"""What goes wrong with the speed of a run, from outside of it, while it goes: pure."""

from dataclasses import dataclass
from statistics import median

from spillcliff.units import format_bytes

FALL = 1.5
"""A fall of tok/s beyond this factor (against a smaller cell, or a plan) is no noise: the smallest spill measured (a quarter
of a GB past a cap of 5 GB, on an H200) made the step 4.2x longer, a GTX 1060's first one 3.2x."""
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
class Sight:
    """What a run shows now. `tok_s` is of the latest steps, `planned_tok_s` the low end of the plan's band, `data_share` the
    part of the latest steps that waited for tokens; None where the platform can't tell."""

    kind: str
    tok_s: float
    planned_tok_s: float
    data_share: float
    spilled_bytes: int | None = None
    throttle: int | None = None
    temperature_c: float | None = None
    on_battery: bool = False
    other_pid: int | None = None
    other_percent: float | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Trouble:
    """One thing that costs speed: `what` is spill, battery, data, throttle, contended or slow; `line` has the evidence and
    what to do."""

    what: str
    line: str


def trouble(seen: Sight, throttled: int) -> Trouble | None:
    """What is wrong, most certain first; None if nothing is. `throttled` are the bits that mean a throttle."""
    if seen.spilled_bytes is not None and seen.spilled_bytes > MOVED_BYTES:
        return Trouble("spill", f"{format_bytes(seen.spilled_bytes)} of this run have moved to system memory "
                                f"({_pace(seen)}): {FREE_IT}")
    if seen.tok_s * FALL >= seen.planned_tok_s:
        return None
    if seen.on_battery:
        return Trouble("battery", f"{_pace(seen)}, and the machine is on battery: plug it in")
    if seen.data_share > DATA_SHARE:
        return Trouble("data", f"{_pace(seen)}: {seen.data_share:.0%} of it waits for tokens; is the disk of --data slow or "
                               f"busy, or the processor?")
    if seen.throttle and seen.throttle & throttled:
        hot = "" if seen.temperature_c is None else f" at {seen.temperature_c:.0f} degrees"
        return Trouble("throttle", f"{_pace(seen)}: the card throttles{hot}; clear its vents, or plan from `probe soak`")
    if seen.other_percent is not None and seen.other_percent >= BUSY_PERCENT:
        return Trouble("contended", f"{_pace(seen)}: another process (pid {seen.other_pid}) keeps the card "
                                    f"{seen.other_percent:.0f}% busy; close it")
    if seen.kind in ("cuda", "xpu"):
        held = "" if seen.reserved_bytes is None else f" of its {format_bytes(seen.reserved_bytes)}"
        return Trouble("spill", f"{_pace(seen)}, and no throttle: some{held} has likely moved to system memory; {FREE_IT}")
    return Trouble("slow", f"{_pace(seen)}: what else is this machine busy with?")


def _pace(seen: Sight) -> str:
    return f"{seen.tok_s:,.0f} tok/s where at least {seen.planned_tok_s:,.0f} were planned"


def is_away(step_s: float, usual: list[float]) -> bool:
    """Whether a step took so long beside the `usual` ones that the machine was suspended, or the process stopped, in it."""
    return bool(usual) and step_s > max(AWAY_S, AWAY_TIMES * median(usual))
