"""Is a job saturated or starved, and of what? From what was observed to findings: pure."""

from probe.health.observation import LATE, Finding, Observed
from probe.health.run_log import Page
from probe.health.utilization import Rhythm, rhythm
from spillcliff.hardware.device import THROTTLED
from spillcliff.units import format_bytes
from trainer.run.slowdown import BUSY_PERCENT, DATA_SHARE, FREE_IT, MOVED_BYTES, Sight, trouble

POWER_CAP = 0x4
"""NVML's bit for the power cap, which a card at full load may show all the time."""
CLOCK_SHARE = 0.8
"""Of the card's highest clock: below it a throttle costs more than the 9 to 14% that a laptop loses when warm; assumed."""
FULL_SHARE, POWER_SHARE = 0.97, 0.5
"""Of memory, the part of a cliff that a plan takes; of its power, what a busy card that waits for system memory stays below
(its units wait for the bus): the second is assumed."""
HELD_BYTES = 1 << 30
"""In system memory: a healthy process was seen to hold 480 to 940 MB there for its card."""
IDLE_PERCENT = 5.0
"""A card that never reads more does nothing; assumed."""
CROWDED = 90.0
"""Percent of all cores in use from which on a job may lack a core and not data; assumed."""
SOME = 0.05
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
"""watch.Trouble's names as they are called here; the others stay."""


def speed(o: Observed) -> list[Finding]:
    """What keeps it from its speed, most certain first, or that it is steady; that it runs on battery is told beside."""
    seen = rhythm(o.samples)
    found = [_by_log(o, o.page, seen) if o.page and o.page.tok_s else _by_readings(o, seen)]
    if o.on_battery and found[0].what != "battery":
        found.append(_is("warn", "battery", "the machine is on battery, where a card runs at half its speed: plug it in"))
    return found


def _is(level: str, what: str, line: str) -> Finding:
    return Finding("speed", level, what, line)


def _by_log(o: Observed, page: Page, seen: Rhythm) -> Finding:
    """From what our own run writes down, which is exact, and the readings beside it."""
    readings = _readings(o, seen)
    shares, moved = page.shares, _moved(o)
    cause = trouble(Sight(o.kind, page.tok_s, page.planned_tok_s, page.data_s / page.mean_s, moved, _throttle(o),
                          o.highest("temperature_c"), o.on_battery, o.other_pid, o.other_percent, _used(o)), THROTTLED)
    is_certain = cause and (cause.what not in ("spill", "slow") or (moved or 0) > MOVED_BYTES)
    if is_certain:
        return _is("bad", NAMES.get(cause.what, cause.what), f"{cause.line} ({readings})")
    worst = max(WAITS, key=shares.get)
    split = ", ".join(f"{name} {shares[name]:.0%}" for name in sorted(shares, key=shares.get, reverse=True)
                      if shares[name] >= 0.005)
    has_gaps = o.kind == "cuda" and seen.name in ("dips", "plateaus", "starved")
    if shares[worst] >= DATA_SHARE or (has_gaps and shares[worst] >= SOME):
        what, advice = WAITS[worst]
        return _is("bad" if shares[worst] >= DATA_SHARE else "warn", what,
                   f"by its log the time goes to {split}{_aligned(page, seen, worst)}: {advice} ({readings})")
    if page.phase == "evaluation" and page.usual_s and page.silent_s > max(LATE * page.usual_s, LONG_S):
        return _is("warn", "evaluation stall", f"this evaluation has taken {page.silent_s:.0f} s where {page.usual_s:.1f} s "
                                               f"are usual ({readings})")
    if cause:
        return _is("bad", cause.what, f"{cause.line} ({readings})")
    return _memory_or_heat(o, seen) or _is(
        "ok", "steady", f"{page.tok_s:,.0f} tok/s where at least {page.planned_tok_s:,.0f} were planned; the time goes to "
                        f"{split} ({readings})")


def _aligned(page: Page, seen: Rhythm, name: str) -> str:
    """How much of the low readings lies in evaluations and checkpoints, where those are the cause."""
    low_s = sum(end - begin for begin, end in seen.stretches)
    inside_s = sum(max(0.0, min(end, until) - max(begin, since))
                   for begin, end in seen.stretches for since, until in page.pauses)
    if name not in ("evaluation", "checkpoint") or not inside_s:
        return ""
    return f", and {inside_s:.1f} of {low_s:.1f} s of low readings lie in evaluations and checkpoints"


def _by_readings(o: Observed, seen: Rhythm) -> Finding:
    """From the series alone: of another program, or where the log has no step yet."""
    if worse := _memory_or_heat(o, seen):
        return worse
    is_card, shape, level = o.kind == "cuda", _shape(o, seen), "bad" if seen.low_share >= DATA_SHARE else "warn"
    if o.other_percent is not None and o.other_percent >= BUSY_PERCENT:
        return _is("warn", "contended", f"another process (pid {o.other_pid}) keeps the card {o.other_percent:.0f}% busy: "
                                        f"close it ({_readings(o, seen)})")
    if is_card and o.highest("utilization") < IDLE_PERCENT:
        return _is("bad", "idle card", f"{shape}: a long preparation or evaluation on the processor, or it waits for ever")
    if seen.name == "plateaus":
        return _is(level, "evaluation stall", f"{shape}: long low stretches, up to {seen.worst_s:.1f} s, as of an "
                                              f"evaluation, sampled text or a checkpoint; batch it, or do it less often")
    if seen.name in ("dips", "starved"):
        if not is_card and _lacks_cores(o):
            return _is("warn", "contended", f"{shape}, and all programs together keep {o.typical('machine_percent'):.0f}% "
                                            f"of the cores busy: close what else computes")
        how = "between steps" if seen.name == "dips" else "throughout"
        beside = "" if is_card else "; if it computes on a card that can't be read from here, this says nothing"
        return _is(level, "data bubble", f"{shape}: starved {how}, most likely of data. Tokenize once into one array and "
                                         f"slice batches from it, no loops over rows, no workers under Windows{beside}")
    if seen.name == "middling":
        return _is("warn", "unsaturated", f"{shape}, at one level: a part of every step is a wait, for data or for launches "
                                          f"of small kernels")
    return _is("ok", "steady", _readings(o, seen))


def _memory_or_heat(o: Observed, seen: Rhythm) -> Finding | None:
    """Spill and throttling, by what the card and the system count."""
    moved, held = _moved(o) or 0, o.last("non_local_bytes") or 0
    edge, used = o.fast_bytes or o.card_bytes, _used(o)
    is_full = bool(edge and used) and used >= FULL_SHARE * edge
    if moved > MOVED_BYTES or (is_full and held > HELD_BYTES):
        return _is("bad", "spill", f"{format_bytes(held)} of it lie in system memory, {format_bytes(moved)} more than when "
                                   f"the look began, and {format_bytes(used)} on the card: {FREE_IT}")
    bits, clock, power = _throttle(o), o.typical("clock_mhz"), o.typical("power_w")
    if bits:
        top = o.clock_max_mhz or o.highest("clock_mhz")
        is_slow = bool(clock and top) and clock < CLOCK_SHARE * top
        if is_slow or bits & ~POWER_CAP:
            at = f" at {clock:,.0f} of {top:,.0f} MHz" if clock and top else ""
            hot = "" if (degrees := o.highest("temperature_c")) is None else f", {degrees:.0f} degrees"
            return _is("bad" if is_slow else "warn", "throttling", f"the card throttles{at}{hot} (bits {bits:#x} in most "
                       f"readings): clear its vents, see to its supply, or plan from `probe soak`")
    elif is_full and seen.mean >= 80 and power and o.power_limit_w and power < POWER_SHARE * o.power_limit_w:
        return _is("warn", "spill", f"the card is {seen.mean:.0f}% busy at {power:.0f} of {o.power_limit_w:.0f} W, with "
                                    f"{format_bytes(used)} of {format_bytes(edge)} taken and no throttle: some has likely "
                                    f"moved to system memory; {FREE_IT}")
    return None


def _lacks_cores(o: Observed) -> bool:
    """Whether low readings of a processor's job are for want of cores: it would run, where a starved one sleeps."""
    return o.typical("machine_percent") >= CROWDED and sum(s.is_waiting for s in o.samples) < len(o.samples) / 4


def _moved(o: Observed) -> int | None:
    held = o.told("non_local_bytes")
    return held[-1] - held[0] if held else None


def _used(o: Observed) -> int | None:
    return o.highest("memory_bytes") if o.kind == "cuda" else None


def _throttle(o: Observed) -> int:
    """The throttle bits that are set in at least half of the readings."""
    read = o.told("throttle")
    bits = [1 << i for i in range(9) if THROTTLED >> i & 1]
    return sum(bit for bit in bits if read and 2 * sum(bool(r & bit) for r in read) >= len(read))


def _shape(o: Observed, seen: Rhythm) -> str:
    """The series in words: its levels, the memory at each, how much of the time is low."""
    def level(busy, held) -> str:
        return f"{busy:.0f}%{'' if held is None else f' at {format_bytes(held)}'}"

    if seen.name in ("dips", "plateaus"):
        return (f"the {_what(o)} is {level(seen.high, seen.high_bytes)} busy, then {level(seen.low, seen.low_bytes)}: low "
                f"for {seen.low_share:.0%} of {o.seconds:.0f} s, {len(seen.stretches)} times, {seen.mean:.0f}% on average")
    return f"the {_what(o)} is {seen.mean:.0f}% busy on average over {o.seconds:.0f} s"


def _readings(o: Observed, seen: Rhythm) -> str:
    """The readings in short, as evidence beside a verdict that stands on something else."""
    units = {"power_w": "W", "clock_mhz": "MHz", "temperature_c": "degrees"}
    middles = [f"{value:,.0f} {unit}" for name, unit in units.items() if (value := o.typical(name))]
    held = o.last("memory_bytes")
    return ", ".join([f"{_what(o)} {seen.mean:.0f}% busy in {len(o.samples)} readings", *middles,
                      *([] if held is None else [format_bytes(held)])])


def _what(o: Observed) -> str:
    return "card" if o.kind == "cuda" else "processor"
