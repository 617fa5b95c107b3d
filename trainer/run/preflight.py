"""The checklist before a run: from facts to findings, without touching anything. preflight_facts.py gathers it."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spillcliff.errors import Refused, UserError
from spillcliff.hardware.device import ON_BATTERY, THROTTLED
from spillcliff.units import format_bytes, format_count
from trainer.checkpoint import KEEP, STATE_BYTES
from trainer.plan import Plan, times_due, validation_tokens
from trainer.run.slowdown import BUSY_PERCENT

NEAR = 1.03
"""Free memory over the plan's peak below which it is close; assumed."""
REPEATS = 1.5
"""How often each token may be seen, over the plan's epochs, before the data is called short; assumed."""
HOT_C = 85
BUSY_SHARE = 0.5
"""Share of a processor's cores that others keep busy above which a forecast is off; assumed."""
INPUT = ("build", "engine", "model", "data", "run folder")
"""Points that are about what was asked for, not about the machine's state: a start ends by them as by any bad input."""


@dataclass(frozen=True)
class Finding:
    """One point of the audit: level "ok", "warn" or "refuse", and in one line what was seen and what would be right."""

    level: Literal["ok", "warn", "refuse"]
    what: str
    seen: str


@dataclass(frozen=True)
class PreflightFacts:
    """All that an audit sees; sizes in bytes, None where it is not known or does not apply.

    `power_source` is NVML's (0 mains, 1 battery, 2 undersized supply), the `_problem`s are why something can't be, `tokens`
    those left to train on and `sequences` how many of the plan's length they make, `disk_free_bytes` what is free or will
    be, `checkpoints` how many there are of this very run, `others_bytes` what each other process holds on the card by pid,
    `busy_percent` how busy they keep it, `busy_share` the share of the processor's cores that others keep busy, `is_locked`
    whether another process runs in the run's folder.
    """

    plan: Plan
    on_battery: bool = False
    allow_battery: bool = False
    power_source: int | None = None
    tf32_problem: str | None = None
    kind: str | None = None
    fingerprint: str | None = None
    build_problem: str | None = None
    engine_problem: str | None = None
    software: dict[str, str | None] | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    data_problem: str | None = None
    disk_free_bytes: int | None = None
    checkpoints: int = 0
    others_bytes: dict[int, int | None] | None = None
    busy_percent: float | None = None
    temperature_c: float | None = None
    throttle: int | None = None
    busy_share: float | None = None
    folder_problem: str | None = None
    is_locked: bool | None = None


def _unless(problem: str | None, what: str, seen: str) -> Finding:
    return Finding("refuse", what, problem) if problem else Finding("ok", what, seen)


def _power(facts: PreflightFacts) -> Finding:
    if facts.on_battery or facts.power_source == 1:
        if facts.allow_battery:
            return Finding("warn", "power", ON_BATTERY)
        return Finding("refuse", "power", f"{ON_BATTERY}, or add --allow-battery")
    if facts.power_source == 2:
        return Finding("warn", "power", "the supply gives less than the card can draw; use the machine's own")
    return Finding("ok", "power", "on mains, or no battery")


def _precision(facts: PreflightFacts) -> Finding:
    return _unless(facts.tf32_problem, "precision", "fp32, TF32 off")


def _card(facts: PreflightFacts) -> Finding | None:
    if facts.fingerprint is None:
        return None
    if facts.fingerprint != facts.plan.device:
        return Finding("warn", "card", f"planned on {facts.plan.device}, this is {facts.fingerprint}: the forecast is not "
                                       f"for it; measure and plan here")
    return Finding("ok", "card", facts.fingerprint)


def _build(facts: PreflightFacts) -> Finding:
    return _unless(facts.build_problem, "build", "this torch runs on the device")


def _engine(facts: PreflightFacts) -> Finding | None:
    if facts.kind is None:
        return None
    return _unless(facts.engine_problem, "engine", facts.plan.step.engine)


def _software(facts: PreflightFacts) -> Finding | None:
    if facts.software is None:
        return None
    if changed := facts.plan.other_software(facts.software):
        return Finding("warn", "software", f"measured with {', '.join(changed)}: the forecast is not for what runs here; "
                                           f"measure and plan again")
    if not facts.plan.software:
        return Finding("ok", "software", "the plan does not say what it was measured with")
    return Finding("ok", "software", "as it was measured with")


def _model(facts: PreflightFacts) -> Finding | None:
    if facts.total_bytes is None:
        return None
    least = STATE_BYTES * facts.plan.model.parameters
    seen = f"weights and moments of {format_count(facts.plan.model.parameters)} parameters take {format_bytes(least)}"
    if least > facts.total_bytes:
        return Finding("refuse", "model", f"out of memory before it starts: {seen} and the device has "
                                          f"{format_bytes(facts.total_bytes)}; plan a smaller model")
    return Finding("ok", "model", seen)


def _memory(facts: PreflightFacts) -> Finding | None:
    if facts.kind is None:
        return None
    peak, free = facts.plan.predicted.peak_bytes.mid, facts.free_bytes
    if free is None or not peak:
        return Finding("ok", "memory", f"{'what is free' if peak else 'the peak of the plan'} is not known here")
    seen = f"{format_bytes(free)} free, the plan's peak is {format_bytes(peak)}"
    if free < peak:
        return Finding("refuse", "memory", f"{seen}; end what holds the rest, or plan with a smaller --limit")
    if free < peak * NEAR:
        return Finding("warn", "memory", f"{seen}, which leaves {format_bytes(free - peak)}; end other programs that use it")
    return Finding("ok", "memory", seen)


def _limit(facts: PreflightFacts) -> Finding:
    peak, limit = facts.plan.predicted.peak_bytes.mid, facts.plan.limit_bytes
    if peak > limit:
        return Finding("refuse", "limit", f"the plan's peak of {format_bytes(peak)} is over its own limit of "
                                          f"{format_bytes(limit)}; plan again")
    return Finding("ok", "limit", f"{format_bytes(peak)} of the plan's {format_bytes(limit)}")


def _data(facts: PreflightFacts) -> Finding:
    if facts.data_problem:
        return Finding("refuse", "data", facts.data_problem)
    if facts.tokens is None:
        return Finding("ok", "data", "not looked at; add --data FILE")
    plan, step = facts.plan, facts.plan.step
    needed = plan.steps * step.tokens
    each = needed / facts.tokens
    seen = f"{facts.tokens:,} tokens, each seen {each:.1f} times"
    if facts.sequences is not None and step.sequences > facts.sequences and not facts.checkpoints:
        return Finding("refuse", "data", f"a step of {step.batch} x {step.accum} sequences is larger than the data, which "
                                         f"has {facts.sequences:,} to train on: some would be in it twice; give more data, "
                                         f"or plan for this file with --corpus")
    if each > REPEATS * plan.epochs and not _is_planned_for(plan, facts.tokens):
        return Finding("warn", "data", f"{seen} by {plan.steps:,} steps of {step.tokens:,}, where the plan has "
                                       f"{plan.epochs:g} x {format_count(plan.corpus_tokens)} tokens; give that much data, "
                                       f"or plan for this file with --corpus")
    return Finding("ok", "data", seen)


def _is_planned_for(plan: Plan, tokens: int) -> bool:
    """Whether there are as many tokens to train on as the plan's corpus leaves, and its steps are no more than that takes:
    of a corpus of a few steps, what is held back and the last step's rest are much."""
    held = validation_tokens(plan.corpus_tokens, plan.step, plan.rules)
    return tokens >= plan.corpus_tokens - held and (plan.steps - 1) * plan.step.tokens < plan.corpus_tokens * plan.epochs


def _disk(facts: PreflightFacts) -> Finding | None:
    if facts.disk_free_bytes is None:
        return Finding("ok", "disk", "what is free is not known here")
    one = STATE_BYTES * facts.plan.model.parameters
    most = min(KEEP + 2, times_due(facts.plan.steps, facts.plan.checkpoint) - 1)
    least, room = min(2, most), facts.checkpoints + facts.disk_free_bytes / one
    seen = f"{format_bytes(facts.disk_free_bytes)} free, a checkpoint takes {format_bytes(one)}"
    wanted = f"{seen}; make room for {most - facts.checkpoints}"
    if room < least:
        return Finding("refuse", "disk", f"{wanted} or put --run on another disk")
    if room < most:
        return Finding("warn", "disk", f"{wanted}: the newest {KEEP} and the best are kept while the next is written, and "
                                       f"without room older ones go before it")
    return Finding("ok", "disk", seen)


def _others(facts: PreflightFacts) -> Finding | None:
    if facts.kind != "cuda":
        return None
    sizes = {pid: size for pid, size in (facts.others_bytes or {}).items() if size}
    if sizes:
        largest = sorted(sizes, key=sizes.__getitem__)[:-4:-1]
        named = ", ".join(f"process {pid} with {format_bytes(sizes[pid])}" for pid in largest)
        them = "it" if len(sizes) == 1 else "them"
        return Finding("warn", "others", f"on the card: {named}; end {them}, or the forecast is off")
    if (facts.busy_percent or 0) >= BUSY_PERCENT:
        pids = ", ".join(map(str, sorted(facts.others_bytes or ())[:3]))
        return Finding("warn", "others", f"something keeps the card {facts.busy_percent:.0f}% busy"
                                         f"{f' (on it: process {pids})' if pids else ''}; end it, or the forecast is off")
    if facts.others_bytes is None or facts.others_bytes:
        return Finding("ok", "others", "what other processes hold of the card is not known here")
    return Finding("ok", "others", "none computes on the card")


def _thermal(facts: PreflightFacts) -> Finding | None:
    if facts.temperature_c is None and facts.throttle is None:
        return None
    bits = (facts.throttle or 0) & THROTTLED
    seen = "" if facts.temperature_c is None else f"{facts.temperature_c:.0f} C"
    if bits or (facts.temperature_c or 0) > HOT_C:
        slowed = f"slowed down before it has work (throttle bits {bits:#x})" if bits else ""
        return Finding("warn", "thermal", f"{', '.join(filter(None, (seen, slowed)))}; let it cool, see to its vents and "
                                          f"power settings")
    return Finding("ok", "thermal", seen or "not slowed down")


def _processor(facts: PreflightFacts) -> Finding | None:
    if facts.kind != "cpu" or facts.busy_share is None:
        return None
    seen = f"other programs keep {facts.busy_share:.0%} of the cores busy"
    if facts.busy_share > BUSY_SHARE:
        return Finding("warn", "processor", f"{seen}; end them, or the forecast is off")
    return Finding("ok", "processor", seen)


def _lock(facts: PreflightFacts) -> Finding | None:
    if facts.is_locked:
        return Finding("refuse", "lock", "another process runs in this folder; wait for it, or name another --run")
    return None


def _run_folder(facts: PreflightFacts) -> Finding | None:
    if facts.is_locked:
        return None
    return _unless(facts.folder_problem, "run folder", "free")


POINTS = (_power, _precision, _card, _build, _engine, _software, _model, _memory, _limit, _data, _disk, _others, _thermal,
          _processor, _lock, _run_folder)


def check(facts: PreflightFacts) -> list[Finding]:
    """The findings, one a point; a point that does not apply has none."""
    return [finding for point in POINTS if (finding := point(facts))]


def refusal(findings: list[Finding]) -> UserError | None:
    """What a start is to end with: Refused, or UserError where the input itself can't be run; it names all that refuse."""
    refusing = [f for f in findings if f.level == "refuse"]
    if not refusing:
        return None
    kind = UserError if any(f.what in INPUT for f in refusing) else Refused
    return kind("; ".join(f"{f.what}: {f.seen}" for f in refusing))


def warnings(findings: list[Finding]) -> list[str]:
    """A line for each finding that warns."""
    return [f"warning: {f.what}: {f.seen}" for f in findings if f.level == "warn"]


def lines(findings: list[Finding], width: int = 80) -> Iterator[str]:
    """The findings as a table of at most `width` columns."""
    for f in findings:
        level = f.level.upper() if f.level == "refuse" else f.level
        yield from textwrap.wrap(f"{level:<6}  {f.what:<10}  {f.seen}", width, subsequent_indent=" " * 20)
