"""What an attempt to run a cell means: pure, each verdict with the evidence that decided."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from probe.cell import Cell
from probe.cliff import fell
from probe.records import Record
from trainer.device import THROTTLED
from trainer.errors import is_out_of_memory
from trainer.units import format_bytes

MIN_STEPS = 5

@dataclass(frozen=True)
class Outcome:
    """How a cell's process ended. `measured` is what it sent when it was done, `error` the (type, text) of the exception
    that ended it, `killed` why we ended it ("timeout", "memory" or ""), `exit_code` as the system gave it (negative: a
    signal), `tail` the end of what it printed."""

    measured: dict | None = None
    error: tuple[str, str] | None = None
    killed: str = ""
    exit_code: int | None = None
    tail: str = ""
    progress: dict = field(default_factory=dict)


def judge(outcome: Outcome, cell: Cell, total_bytes: int | None, is_card: bool,
          records: Iterable[Record]) -> tuple[str, str]:
    """(status, why) of a cell, given the device's other records; why is "" for a cell that fits."""
    if outcome.killed == "timeout":
        steps = len(outcome.progress.get("step_s", ()))
        return "timeout", f"{steps} timed steps in {outcome.progress.get('seconds', 0):.0f} s where {MIN_STEPS} are needed"
    if outcome.killed == "memory":
        return "oom", f"stopped at {format_bytes(outcome.progress['resident_bytes'])}: the machine was running out of memory"
    if outcome.error:
        kind, text = outcome.error
        line = next((line for line in text.splitlines() if line.strip()), "")
        return ("oom" if is_out_of_memory(kind, text) else "crashed"), f"{kind}: {line}"[:200]
    if outcome.measured is None:
        if outcome.exit_code == -getattr(signal, "SIGKILL", 9):
            return "oom", "killed without a message (SIGKILL), as the system's out-of-memory killer does"
        last = outcome.tail.strip().splitlines()[-1:] or [""]
        return ("oom" if is_out_of_memory("", outcome.tail) else "crashed"), (
            f"its process ended with code {outcome.exit_code} {last[0]}".strip()[:200])
    m = outcome.measured
    reserved = m.get("reserved_peak_bytes")
    if is_card and reserved is not None and total_bytes and reserved > total_bytes:
        return "spills", f"{format_bytes(reserved)} reserved on a card of {format_bytes(total_bytes)}"
    if is_card and m["step_s"] and not (m["readings"].get("throttle") or 0) & THROTTLED:
        ordered = sorted(m["step_s"])
        why = fell(cell, cell.step.tokens / ordered[len(ordered) // 2], records)
        if why:
            return "spills", why
    if m.get("timed_retries"):
        return "thrashes", f"the allocator had to free its cache and ask again {m['timed_retries']} times during timed steps"
    return "fits", ""


def hopeless(cell: Cell, records: Iterable[Record], limit_bytes: int | None) -> str | None:
    """Why a cell need not be run: a smaller one failed for want of memory or time, or was over the limit."""
    for r in records:
        if r.cell == cell or not r.cell.within(cell):
            continue
        name = f"B={r.cell.batch} L={r.cell.length}"
        if r.status in ("oom", "spills", "timeout"):
            return f"the smaller {name} ended in {r.status}"
        if limit_bytes and (r.peak_bytes or 0) > limit_bytes:
            return f"the smaller {name} took {format_bytes(r.peak_bytes)}"
    return None
