"""What an attempt to run a cell means: pure, each verdict with the evidence that decided."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from probe.cell import Cell
from probe.cliff import FALL, Cliff, fell, reference, wall
from probe.records import Record
from spillcliff.errors import is_out_of_memory
from spillcliff.hardware.device import THROTTLED
from spillcliff.units import format_bytes
from trainer.run.slowdown import BUSY_PERCENT, MOVED_BYTES

MIN_STEPS = 5

OTHERS_GREW_BYTES = 256 << 20
"""What others took of the card beyond which a measurement is not the cell's own: with nobody else on it 9 MB were read. That
a desktop stays below is assumed."""

OTHERS_SHARE = 0.1
"""A failure for want of memory is no verdict on the cell while one other process holds this share of the card."""

QUIET_S = 10.0
"""A step that takes this long, and longer than a smaller cell excuses, need not end."""

FIRST_S = {"eager": 30.0, "graph": 30.0, "compile": 300.0}
"""What the first step may take beyond that: kernels are loaded (0.4 s on an H200; elsewhere not
seen), or compiled (31 s there)."""


@dataclass(frozen=True)
class Outcome:
    """How a cell's process ended. `measured` is what it sent when it was done, `error` the (type, text) of the exception
    that ended it, `killed` why we ended it ("timeout", "spill", "memory" or ""), `exit_code` as the system gave it
    (negative: a signal), `tail` the end of what it printed, `progress` the last that it told."""

    measured: dict | None = None
    error: tuple[str, str] | None = None
    killed: str = ""
    exit_code: int | None = None
    tail: str = ""
    progress: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """What a verdict needs to know of the device: its memory, its cliff if that was measured, and whether it is a card at
    all, since a processor does not spill."""

    total_bytes: int | None
    is_card: bool
    cliff: Cliff | None = None


def slow_step_s(cell: Cell, card: Card, records: Iterable[Record]) -> float | None:
    """Seconds beyond which a step of `cell` shows a spill; None where nothing smaller was measured."""
    found = reference(cell, records) if card.is_card else None
    return found and cell.step.tokens * FALL / found[1]


def stuck(cell: Cell, slow_s: float | None, progress: dict) -> str | None:
    """Why a cell that is running has certainly spilled, by how long its present step takes; None if it has not."""
    if slow_s is None or progress.get("setting_up", True):
        return None
    steps = len(progress.get("warmup_s", ())) + len(progress.get("step_s", ()))
    allowed = max(QUIET_S, slow_s) + (0 if steps else FIRST_S[cell.engine])
    if progress.get("quiet_s", 0) <= allowed:
        return None
    return f"a step took more than {allowed:.0f} s, where smaller cells ask for {slow_s / FALL:.2g} s"


def contention(others: dict, total_bytes: int | None, failed: bool) -> str | None:
    """Why what was measured may be another program's doing; `failed` says that the memory did not suffice."""
    named = f" (pid {others['pid']})" if others.get("pid") else ""
    if (others.get("busy_percent") or 0) >= BUSY_PERCENT:
        return f"another process{named} kept the card {others['busy_percent']:.0f}% busy"
    if abs(others.get("grown_bytes") or 0) >= OTHERS_GREW_BYTES:
        moved = others["grown_bytes"]
        return f"other processes {'took' if moved > 0 else 'gave back'} {format_bytes(abs(moved))} of the card meanwhile"
    if failed and total_bytes and (others.get("largest_bytes") or 0) >= OTHERS_SHARE * total_bytes:
        return f"another process{named} holds {format_bytes(others['largest_bytes'])} of the card"
    return None


def judge(outcome: Outcome, cell: Cell, card: Card, records: Iterable[Record]) -> tuple[str, str]:
    """(status, why) of a cell, given the device's other records; why is "" for a cell that fits."""
    status, why = _alone(outcome, cell, card, list(records))
    if card.is_card and status not in ("crashed", "timeout"):
        readings = (outcome.measured or outcome.progress).get("readings") or {}
        other = contention(readings.get("others") or {}, card.total_bytes, status != "fits")
        if other:
            return "contended", other + (f"; alone it would read {status}: {why}" if why else "")
    return status, why


def _alone(outcome: Outcome, cell: Cell, card: Card, records: list[Record]) -> tuple[str, str]:
    """The verdict if nobody else used the card."""
    known = outcome.measured or outcome.progress
    spilled = spill(known, cell, card, records) if card.is_card else None
    if outcome.killed == "spill":
        return "spills", outcome.progress["certain"]
    if outcome.killed == "timeout":
        if spilled:
            return "spills", spilled
        steps = len(outcome.progress.get("step_s", ()))
        return "timeout", f"{steps} timed steps in {outcome.progress.get('seconds', 0):.0f} s where {MIN_STEPS} are needed"
    if outcome.killed == "memory":
        return "oom", f"stopped at {format_bytes(outcome.progress['resident_bytes'])}: the machine was running out of memory"
    if outcome.error:
        kind, text = outcome.error
        line = next((line for line in text.splitlines() if line.strip()), "")
        if not is_out_of_memory(kind, text):
            return "crashed", f"{kind}: {line}"[:200]
        if spilled:
            return "spills", f"spilled before it failed: {spilled}"
        held = known.get("reserved_peak_bytes")
        at = f"at {format_bytes(held)} reserved, " if held else ""
        return "oom", f"{at}{kind}: {line.split('. ')[0]}"[:200]  # what follows are figures, which nobody should believe
    if outcome.measured is None:
        if outcome.exit_code == -getattr(signal, "SIGKILL", 9):
            return "oom", "killed without a message (SIGKILL), as the system's out-of-memory killer does"
        last = outcome.tail.strip().splitlines()[-1:] or [""]
        return ("oom" if is_out_of_memory("", outcome.tail) else "crashed"), (
            f"its process ended with code {outcome.exit_code} {last[0]}".strip()[:200])
    if spilled:
        return "spills", spilled
    if known.get("timed_retries"):
        times = known["timed_retries"]
        return "thrashes", f"the allocator had to free its cache and ask again {times} times during timed steps"
    return "fits", ""


def spill(known: dict, cell: Cell, card: Card, records: Iterable[Record] = ()) -> str | None:
    """Which evidence says that a cell has spilled, of what is known of it so far; None if there is none."""
    for name, word in (("reserved_peak_bytes", "reserved"), ("allocated_peak_bytes", "allocated")):
        size = known.get(name)
        limit, what = wall(card.total_bytes, card.cliff, known.get("free_at_start_bytes"))
        if size is not None and limit and size > limit:
            return f"{format_bytes(size)} {word} {what}"
    moved = known.get("non_local_growth_bytes")
    if moved is not None and moved > MOVED_BYTES:
        return f"{format_bytes(moved)} of it moved to system memory while it ran"
    times = known.get("step_s") or ()
    if card.cliff and card.cliff.shows_fast(known.get("device_peak_bytes")):
        return None
    if times and not int((known.get("readings") or {}).get("throttle") or 0) & THROTTLED:
        ordered = sorted(times)
        return fell(cell, cell.step.tokens / ordered[len(ordered) // 2], records)
    return None
