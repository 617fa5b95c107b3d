"""The checklist before a run: from a Situation to findings, without touching anything. preflight_facts.py gathers it."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from spillcliff.errors import Refused, UserError
from spillcliff.hardware.device import THROTTLED
from spillcliff.units import format_bytes, format_count
from trainer.checkpoint import KEEP, STATE_BYTES
from trainer.plan import Plan

NEAR = 1.03
"""Free memory over the plan's peak below which it is close; assumed."""
REPEATS = 1.5
"""How often each token may be seen, over the plan's epochs, before the data is called short; assumed."""
BUSY_PERCENT = 10
"""From here on others keep a card busy, as the probe counts it; assumed."""
HOT_C = 85
BUSY_SHARE = 0.5
"""Share of a processor's cores that others keep busy above which a forecast is off; assumed."""
INPUT = ("build", "engine", "model", "data", "run folder")
"""Points that are about what was asked for, not about the machine's state: a start ends by them as by any bad input."""


@dataclass(frozen=True)
class Finding:
    """One point of the audit: level "ok", "warn" or "refuse", and in one line what was seen and what would be right."""

    level: str
    what: str
    seen: str


@dataclass(frozen=True)
class Situation:
    """All that an audit sees; sizes in bytes, None where it is not known or does not apply.

    `power_source` is NVML's (0 mains, 1 battery, 2 undersized supply), `tf32` why products would be TF32, `build` and
    `engine` why they can't run here, `tokens` those left to train on, `checkpoints_there` of this very run, `others` the
    bytes that each other process holds on the card by pid, `busy_percent` how busy they keep it, `busy_share` the share of
    the processor's cores that others keep busy, `run_problem` why no run can start in its folder, `held` whether another
    process runs in it.
    """

    plan: Plan
    on_battery: bool = False
    allow_battery: bool = False
    power_source: int | None = None
    tf32: str | None = None
    kind: str | None = None
    fingerprint: str | None = None
    build: str | None = None
    engine: str | None = None
    software: dict | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    tokens: int | None = None
    data_problem: str | None = None
    disk_free_bytes: int | None = None
    checkpoints_there: int = 0
    others: dict[int, int | None] | None = None
    busy_percent: float | None = None
    temperature_c: float | None = None
    throttle: int | None = None
    busy_share: float | None = None
    run_problem: str | None = None
    held: bool | None = None


def _power(s: Situation) -> Finding:
    if s.on_battery or s.power_source == 1:
        seen = ("on battery, where a card runs at about half its speed (Notebookcheck: -53%) and a forecast means nothing; "
                "plug the machine in")
        if s.allow_battery:
            return Finding("warn", "power", seen)
        return Finding("refuse", "power", f"{seen}, or add --allow-battery")
    if s.power_source == 2:
        return Finding("warn", "power", "the supply gives less than the card can draw; use the machine's own")
    return Finding("ok", "power", "on mains, or no battery")


def _precision(s: Situation) -> Finding:
    if s.tf32:
        return Finding("refuse", "precision", s.tf32)
    return Finding("ok", "precision", "fp32, TF32 off")


def _card(s: Situation) -> Finding | None:
    if s.fingerprint is None:
        return None
    if s.fingerprint != s.plan.device:
        return Finding("warn", "card", f"planned on {s.plan.device}, this is {s.fingerprint}: the forecast is not for it; "
                                       f"measure and plan here")
    return Finding("ok", "card", s.fingerprint)


def _build(s: Situation) -> Finding:
    return Finding("refuse", "build", s.build) if s.build else Finding("ok", "build", "this torch runs on the device")


def _engine(s: Situation) -> Finding | None:
    if s.kind is None:
        return None
    return Finding("refuse", "engine", s.engine) if s.engine else Finding("ok", "engine", s.plan.step.engine)


def _software(s: Situation) -> Finding | None:
    if s.software is None:
        return None
    if changed := s.plan.other_software(s.software):
        return Finding("warn", "software", f"measured with {', '.join(changed)}: the forecast is not for what runs here; "
                                           f"measure and plan again")
    if not s.plan.software:
        return Finding("ok", "software", "the plan does not say what it was measured with")
    return Finding("ok", "software", "as it was measured with")


def _model(s: Situation) -> Finding | None:
    if s.total_bytes is None:
        return None
    least = STATE_BYTES * s.plan.model.parameters
    seen = f"weights and moments of {format_count(s.plan.model.parameters)} parameters take {format_bytes(least)}"
    if least > s.total_bytes:
        return Finding("refuse", "model", f"out of memory before it starts: {seen} and the device has "
                                          f"{format_bytes(s.total_bytes)}; plan a smaller model")
    return Finding("ok", "model", seen)


def _memory(s: Situation) -> Finding | None:
    if s.kind is None:
        return None
    peak, free = s.plan.predicted.peak_bytes.mid, s.free_bytes
    if free is None or not peak:
        return Finding("ok", "memory", f"not known here: {'what is free' if peak else 'the peak of the plan'}")
    seen = f"{format_bytes(free)} free, the plan's peak is {format_bytes(peak)}"
    if free < peak:
        return Finding("refuse", "memory", f"{seen}; end what holds the rest, or plan with a smaller --limit")
    if free < peak * NEAR:
        return Finding("warn", "memory", f"{seen}, which leaves {format_bytes(free - peak)}; end other programs that use it")
    return Finding("ok", "memory", seen)


def _limit(s: Situation) -> Finding:
    peak, limit = s.plan.predicted.peak_bytes.mid, s.plan.limit_bytes
    if peak > limit:
        return Finding("refuse", "limit", f"the plan's peak of {format_bytes(peak)} is over its own limit of "
                                          f"{format_bytes(limit)}; plan again")
    return Finding("ok", "limit", f"{format_bytes(peak)} of the plan's {format_bytes(limit)}")


def _data(s: Situation) -> Finding:
    if s.data_problem:
        return Finding("refuse", "data", s.data_problem)
    if s.tokens is None:
        return Finding("ok", "data", "not looked at: none was given; add --data FILE")
    needed = s.plan.steps * s.plan.step.tokens
    each = needed / s.tokens
    seen = f"{s.tokens:,} tokens, each seen {each:.1f} times"
    if each > REPEATS * s.plan.epochs:
        return Finding("warn", "data", f"{seen} by {s.plan.steps:,} steps of {s.plan.step.tokens:,}, where the plan has "
                                       f"{s.plan.epochs:g} x {format_count(s.plan.corpus_tokens)} tokens; give that much "
                                       f"data, or plan for this file with --corpus")
    return Finding("ok", "data", seen)


def _disk(s: Situation) -> Finding | None:
    if s.disk_free_bytes is None:
        return Finding("ok", "disk", "not known here: what is free")
    one = STATE_BYTES * s.plan.model.parameters
    wanted = KEEP + 1 - s.checkpoints_there
    seen = f"{format_bytes(s.disk_free_bytes)} free, a checkpoint takes {format_bytes(one)}"
    right = f"{seen}; make room for {max(1, wanted)} or put --run on another disk"
    if s.disk_free_bytes < max(1, wanted - 1) * one:
        return Finding("refuse", "disk", right)
    if s.disk_free_bytes < max(1, wanted) * one:
        return Finding("warn", "disk", f"{right}: {KEEP} are kept while the next is written")
    return Finding("ok", "disk", seen)


def _others(s: Situation) -> Finding | None:
    if s.kind != "cuda":
        return None
    held = {pid: size for pid, size in (s.others or {}).items() if size}
    if held:
        named = ", ".join(f"process {pid} with {format_bytes(held[pid])}" for pid in sorted(held, key=held.get)[:-4:-1])
        return Finding("warn", "others", f"on the card: {named}; end {'it' if len(held) == 1 else 'them'}, or the forecast "
                                         f"is off")
    if (s.busy_percent or 0) >= BUSY_PERCENT:
        pids = ", ".join(map(str, sorted(s.others or ())[:3]))
        return Finding("warn", "others", f"something keeps the card {s.busy_percent:.0f}% busy"
                                         f"{f' (on it: process {pids})' if pids else ''}; end it, or the forecast is off")
    if s.others is None or s.others:
        return Finding("ok", "others", "not known here: what other processes hold of the card")
    return Finding("ok", "others", "none computes on the card")


def _thermal(s: Situation) -> Finding | None:
    if s.temperature_c is None and s.throttle is None:
        return None
    bits = (s.throttle or 0) & THROTTLED
    seen = "" if s.temperature_c is None else f"{s.temperature_c:.0f} C"
    if bits or (s.temperature_c or 0) > HOT_C:
        slowed = f"slowed down before it has work (throttle bits {bits:#x})" if bits else ""
        return Finding("warn", "thermal", f"{', '.join(filter(None, (seen, slowed)))}; let it cool, see to its vents and "
                                          f"power settings")
    return Finding("ok", "thermal", seen or "not slowed down")


def _processor(s: Situation) -> Finding | None:
    if s.kind != "cpu" or s.busy_share is None:
        return None
    seen = f"other programs keep {s.busy_share:.0%} of the cores busy"
    if s.busy_share > BUSY_SHARE:
        return Finding("warn", "processor", f"{seen}; end them, or the forecast is off")
    return Finding("ok", "processor", seen)


def _lock(s: Situation) -> Finding | None:
    if s.held:
        return Finding("refuse", "lock", "another process runs in this folder; wait for it, or name another --run")
    return None


def _run_folder(s: Situation) -> Finding | None:
    if s.held:
        return None
    return Finding("refuse", "run folder", s.run_problem) if s.run_problem else Finding("ok", "run folder", "free")


POINTS = (_power, _precision, _card, _build, _engine, _software, _model, _memory, _limit, _data, _disk, _others, _thermal,
          _processor, _lock, _run_folder)


def judge(s: Situation) -> list[Finding]:
    """The findings, one a point; a point that does not apply has none."""
    return [found for point in POINTS if (found := point(s))]


def refusal(findings: list[Finding]) -> UserError | None:
    """What a start is to end with: Refused, or UserError where the input itself can't be run; it names all that refuse."""
    against = [f for f in findings if f.level == "refuse"]
    if not against:
        return None
    kind = UserError if any(f.what in INPUT for f in against) else Refused
    return kind("; ".join(f"{f.what}: {f.seen}" for f in against))


def warnings(findings: list[Finding]) -> list[str]:
    """A line for each finding that warns."""
    return [f"warning: {f.what}: {f.seen}" for f in findings if f.level == "warn"]


def lines(findings: list[Finding], width: int = 80) -> Iterator[str]:
    """The findings as a table of at most `width` columns."""
    for f in findings:
        level = f.level.upper() if f.level == "refuse" else f.level
        yield from textwrap.wrap(f"{level:<6}  {f.what:<10}  {f.seen}", width, subsequent_indent=" " * 20)
