"""Is a job saturated or starved, and of what? From what was observed to findings: pure."""

from probe.health.observation import LATE_TIMES, Finding, Level, Observation
from probe.health.run_log import RunStatus
from probe.health.utilization import UtilizationPattern, utilization_pattern
from spillcliff.hardware.device import THROTTLED
from spillcliff.units import format_bytes
from trainer.run.slowdown import BUSY_PERCENT, DATA_SHARE, FREE_IT, MOVED_BYTES, SpeedReadings, find_slowdown

POWER_CAP = 0x4
"""NVML's bit for the power cap, which a card at full load may show all the time."""
CLOCK_SHARE = 0.8
"""Of the card's highest clock: below it a throttle costs more than the 9 to 14% that a laptop loses when warm; assumed."""
FULL_SHARE, POWER_SHARE = 0.97, 0.5
"""Of memory, the part of a cliff that a plan takes; of its power, what a busy card that waits for system memory stays below
(its units wait for the bus): the second is assumed."""
CLIFF_SHARE = 0.75
"""Of a card or of its cliff, what a process must have taken for a gigabyte in system memory to be a spill: a GTX 1060
spills from 0.78 of its memory on, a public report had 11 of 12 GB and 3 GB there; below, the program pinned it itself."""
NON_LOCAL_BYTES = 1 << 30
"""In system memory: a healthy process was seen to hold 480 to 940 MB there for its card."""
IDLE_PERCENT = 5.0
"""A card that never reads more does nothing; assumed."""
CROWDED_PERCENT = 90.0
"""Of all cores in use, from which on a job may lack a core and not data; assumed."""
NOTABLE_SHARE = 0.05
"""Share of the time that is worth a name where the readings show gaps; assumed."""
LONG_S = 10.0
"""An evaluation that has taken less is not called late; assumed."""
WAITS = {
    "data": ("data bubble", "the tokens come too late: is the disk slow or busy, or the processor?"),
    "logging": ("slow log", "its lines take that long to write: put the run's folder on a faster disk"),
    "evaluation": ("evaluation stall", "evaluate less often, a longer `eval` cadence in the plan"),
    "checkpoint": ("checkpoint stall", "save less often or to a faster disk, a longer `checkpoint` cadence in the plan"),
}
NAMES = {"data": "data bubble", "throttle": "throttling"}
"""Slowdown's causes as they are called here; the others stay."""


def find_bottleneck(o: Observation) -> list[Finding]:
    """What keeps it from its speed, most certain first, or that it is steady; that it runs on battery is told beside. `o`
    must have samples."""
    pattern = utilization_pattern(o.samples, o.kind == "cuda")
    first = _from_log(o, o.page, o.page.tok_s, pattern) if o.page and o.page.tok_s else _from_readings(o, pattern)
    if not o.on_battery or first.what == "battery":
        return [first]
    return [first, _speed("warn", "battery", "the machine is on battery, where a card runs at half its speed: plug it in")]


def _speed(level: Level, what: str, line: str) -> Finding:
    return Finding("speed", level, what, line)


def _from_log(o: Observation, run: RunStatus, tok_s: float, pattern: UtilizationPattern) -> Finding:
    """From what our own run writes down, which is exact, and the readings beside it."""
    readings, moved_bytes, shares = _readings(o, pattern), _moved_bytes(o), run.shares
    slowdown = find_slowdown(SpeedReadings(
        kind=o.kind, tok_s=tok_s, planned_tok_s=run.planned_tok_s, data_share=run.data_share, spilled_bytes=moved_bytes,
        throttle=_throttle_bits(o), clock_share=_clock_share(o), temperature_c=o.highest("temperature_c"),
        on_battery=o.on_battery, other_pid=o.other_pid, other_percent=o.other_percent, reserved_bytes=_used_bytes(o)))
    if slowdown and (slowdown.cause not in ("spill", "slow") or (moved_bytes or 0) > MOVED_BYTES):  # these two are guesses
        return _speed("bad", NAMES.get(slowdown.cause, slowdown.cause), f"{slowdown.line} ({readings})")
    largest_wait = max(WAITS, key=shares.__getitem__)
    split = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1])
                      if share >= 0.005)
    has_gaps = o.kind == "cuda" and pattern.name in ("dips", "plateaus", "starved")
    if shares[largest_wait] >= DATA_SHARE or (has_gaps and shares[largest_wait] >= NOTABLE_SHARE):
        what, advice = WAITS[largest_wait]
        aligned = _aligned(run, pattern) if largest_wait in ("evaluation", "checkpoint") else ""
        return _speed("bad" if shares[largest_wait] >= DATA_SHARE else "warn", what,
                      f"by its log the time goes to {split}{aligned}: {advice} ({readings})")
    if run.phase == "evaluation" and run.usual_s and run.silent_s > max(LATE_TIMES * run.usual_s, LONG_S):
        return _speed("warn", "evaluation stall", f"this evaluation has taken {run.silent_s:.0f} s where {run.usual_s:.1f} "
                                                  f"s are usual ({readings})")
    if slowdown:
        return _speed("bad", slowdown.cause, f"{slowdown.line} ({readings})")
    return _memory_or_heat(o, pattern) or _speed(
        "ok", "steady", f"{tok_s:,.0f} tok/s where at least {run.planned_tok_s:,.0f} were planned; the time goes to {split} "
                        f"({readings})")


def _aligned(run: RunStatus, pattern: UtilizationPattern) -> str:
    """How much of the low readings lies in evaluations and checkpoints."""
    low_s = sum(end - begin for begin, end in pattern.low_periods)
    inside_s = sum(max(0.0, min(low_end, pause_end) - max(low_begin, pause_begin))
                   for low_begin, low_end in pattern.low_periods for pause_begin, pause_end in run.pauses)
    return f", and {inside_s:.1f} of {low_s:.1f} s of low readings lie in evaluations and checkpoints" if inside_s else ""


def _from_readings(o: Observation, pattern: UtilizationPattern) -> Finding:
    """From the series alone: of another program, or where the log has no step yet."""
    if o.other_percent is not None and o.other_percent >= BUSY_PERCENT:
        return _speed("warn", "contended", f"another process (pid {o.other_pid}) keeps the card {o.other_percent:.0f}% "
                                           f"busy: close it ({_readings(o, pattern)})")
    if worse := _memory_or_heat(o, pattern):
        return worse
    is_card, levels = o.kind == "cuda", _levels(o, pattern)
    level: Level = "bad" if pattern.low_share >= DATA_SHARE else "warn"
    if pattern.name == "untold":
        return _speed("ok", "unknown", f"no verdict: {_readings(o, pattern)}")
    if is_card and (o.highest("utilization") or 0) < IDLE_PERCENT:
        return _speed("bad", "idle card", f"{levels}: a long preparation or evaluation on the processor, or it waits for "
                                          f"ever")
    if pattern.name == "plateaus":
        return _speed(level, "evaluation stall", f"{levels}: long low stretches, up to {pattern.longest_low_s:.1f} s, as "
                                                 f"of an evaluation, sampled text or a checkpoint; batch it, or do it "
                                                 f"less often")
    if pattern.name in ("dips", "starved"):
        if not is_card and _lacks_cores(o):
            return _speed("warn", "contended", f"{levels}, and all programs together keep {o.median('machine_percent'):.0f}"
                                               f"% of the cores busy: close what else computes")
        how = "between steps" if pattern.name == "dips" else "throughout"
        beside = "" if is_card else "; if it computes on a card that can't be read from here, this says nothing"
        return _speed(level, "data bubble", f"{levels}: starved {how}, most likely of data. Tokenize once into one array "
                                            f"and slice batches from it, no loops over rows, no workers under Windows"
                                            f"{beside}")
    if pattern.name == "middling":
        return _speed("warn", "unsaturated", f"{levels}, at one level: a part of every step is a wait, for data or for "
                                             f"launches of small kernels")
    return _speed("ok", "steady", _readings(o, pattern))


def _memory_or_heat(o: Observation, pattern: UtilizationPattern) -> Finding | None:
    """Spill and throttling, by what the card and the system count."""
    moved_bytes, non_local_bytes = _moved_bytes(o) or 0, o.last("non_local_bytes") or 0
    edge_bytes, used_bytes = o.fast_bytes or o.card_bytes, _used_bytes(o)
    is_full = bool(edge_bytes and used_bytes and used_bytes >= FULL_SHARE * edge_bytes)
    is_past_a_cliff = bool(edge_bytes and used_bytes and used_bytes >= CLIFF_SHARE * edge_bytes)
    if moved_bytes > MOVED_BYTES or (is_past_a_cliff and non_local_bytes > NON_LOCAL_BYTES):
        return _speed("bad", "spill", f"{format_bytes(non_local_bytes)} of it lie in system memory, "
                                      f"{format_bytes(moved_bytes)} more than at the first reading, and "
                                      f"{format_bytes(used_bytes)} on the card: {FREE_IT}")
    if bits := _throttle_bits(o):
        return _throttling(o, bits)
    power_w = o.median("power_w")
    if is_full and pattern.mean_percent >= 80 and power_w and o.power_limit_w and power_w < POWER_SHARE * o.power_limit_w:
        return _speed("warn", "spill", f"the card is {pattern.mean_percent:.0f}% busy at {power_w:.0f} of "
                                       f"{o.power_limit_w:.0f} W, with {format_bytes(used_bytes)} of "
                                       f"{format_bytes(edge_bytes)} taken and no throttle: some has likely moved to system "
                                       f"memory; {FREE_IT}")
    return None


def _throttling(o: Observation, bits: int) -> Finding | None:
    """None for a card that is at its power cap with its clock still high."""
    clock_mhz, top_mhz, share = o.median("clock_mhz"), _top_mhz(o), _clock_share(o)
    is_slow = share is not None and share < CLOCK_SHARE
    if not is_slow and not bits & ~POWER_CAP:
        return None
    at = f" at {clock_mhz:,.0f} of {top_mhz:,.0f} MHz" if clock_mhz and top_mhz else ""
    hot = "" if (degrees := o.highest("temperature_c")) is None else f", {degrees:.0f} degrees"
    return _speed("bad" if is_slow else "warn", "throttling", f"the card throttles{at}{hot} (bits {bits:#x} in most "
                  f"readings): clear its vents, see to its supply, or plan from `probe soak`")


def _top_mhz(o: Observation) -> float | None:
    return o.clock_max_mhz or o.highest("clock_mhz")


def _clock_share(o: Observation) -> float | None:
    """Of the card's highest clock, what it runs at; None where it can't be read."""
    clock_mhz, top_mhz = o.median("clock_mhz"), _top_mhz(o)
    return clock_mhz / top_mhz if clock_mhz and top_mhz else None


def _lacks_cores(o: Observation) -> bool:
    """Whether low readings of a processor's job are for want of cores: it would run, where a starved one sleeps."""
    is_crowded = (o.median("machine_percent") or 0) >= CROWDED_PERCENT
    return is_crowded and sum(s.is_waiting for s in o.samples) < len(o.samples) / 4


def _moved_bytes(o: Observation) -> int | None:
    """Growth of what lies in system memory."""
    sizes = o.readings("non_local_bytes")
    return int(sizes[-1] - sizes[0]) if sizes else None


def _used_bytes(o: Observation) -> int | None:
    """The most that was taken of the card."""
    sizes = o.readings("memory_bytes") if o.kind == "cuda" else []
    return int(max(sizes)) if sizes else None


def _throttle_bits(o: Observation) -> int:
    """The throttle bits that are set in at least half of the readings."""
    readings = [int(value) for value in o.readings("throttle")]
    bits = [1 << i for i in range(9) if THROTTLED >> i & 1]
    return sum(bit for bit in bits if readings and 2 * sum(bool(value & bit) for value in readings) >= len(readings))


def _levels(o: Observation, pattern: UtilizationPattern) -> str:
    """The series in words: its levels, the memory at each, how much of the time is low."""
    def level(percent: float | None, memory_bytes: float | None) -> str:
        return f"{percent:.0f}%{'' if memory_bytes is None else f' at {format_bytes(memory_bytes)}'}"

    if pattern.name in ("dips", "plateaus"):
        return (f"the {_unit(o)} is {level(pattern.high_percent, pattern.high_bytes)} busy, then "
                f"{level(pattern.low_percent, pattern.low_bytes)}: low for {pattern.low_share:.0%} of {o.seconds:.0f} s, "
                f"{len(pattern.low_periods)} times, {pattern.mean_percent:.0f}% on average")
    return f"the {_unit(o)} is {pattern.mean_percent:.0f}% busy on average over {o.seconds:.0f} s"


def _readings(o: Observation, pattern: UtilizationPattern) -> str:
    """The readings in short, as evidence beside a verdict that stands on something else."""
    units = {"power_w": "W", "clock_mhz": "MHz", "temperature_c": "degrees"}
    medians = [f"{value:,.0f} {unit}" for name, unit in units.items() if (value := o.median(name))]
    memory_bytes = o.last("memory_bytes")
    busy = ("the card does not tell how busy it is" if pattern.name == "untold" else
            f"{_unit(o)} {pattern.mean_percent:.0f}% busy in {len(o.samples)} readings")
    return ", ".join([busy, *medians,
                      *([] if memory_bytes is None else [format_bytes(memory_bytes)])])


def _unit(o: Observation) -> str:
    return "card" if o.kind == "cuda" else "processor"
