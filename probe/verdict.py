"""What an attempt to run a cell means: pure, each verdict with the evidence that decided."""

import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from probe.cell import Cell
from probe.cliff import Cliff, demand_on, fall_reason, past_bound, spill_bound
from probe.outcome import CellProgress, Outcome
from probe.records import Measurement, Record, Status
from spillcliff.failures import fragmentation, is_out_of_memory
from spillcliff.hardware.usage import OtherPrograms
from spillcliff.units import format_bytes
from trainer.run.slowdown import BUSY_PERCENT, FALL, MOVED_BYTES

MIN_STEPS = 5

OTHERS_GREW_BYTES = 256 << 20
"""What others took of the card beyond which a measurement is not the cell's own: with nobody else on it 9 MB were read. That
a desktop stays below is assumed."""

OTHERS_SHARE = 0.1
"""A failure for want of memory is no verdict on the cell while one other process holds this share of the card."""

QUIET_S = 10.0
"""A step that takes this long, and longer than a smaller cell excuses, need not end."""

JUMP, JUMP_STEPS, JUMP_SHARE = 2.0, 3, 0.1
"""Steps that take so many times as long from one on have spilled in the middle, the last three or tenth at least: the
smallest spill measured cost 3.2, a throttled clock 2."""

FIRST_S = {"eager": 30.0, "graph": 30.0, "compile": 300.0}
"""What the first step may take beyond that: kernels are loaded (0.4 s on an H200; elsewhere not
seen), or compiled (31 s there)."""


@dataclass(frozen=True)
class Card:
    """What a verdict needs to know of the device: its memory, its cliff if that was measured, and whether it is a card at
    all, since a processor does not spill."""

    total_bytes: int | None
    is_card: bool
    cliff: Cliff | None = None


class Verdict(NamedTuple):
    """What became of a cell, and why; "" for one that fits."""

    status: Status
    why: str = ""


def slow_step_s(cell: Cell, card: Card, records: Iterable[Record]) -> float | None:
    """Seconds beyond which a step of `cell` shows a spill; None where nothing smaller was measured."""
    demand = demand_on(cell, records) if card.is_card else None
    return None if demand is None else cell.step.tokens * FALL / demand.tok_s


def stuck_reason(cell: Cell, slow_s: float | None, progress: CellProgress, quiet_s: float) -> str | None:
    """Why a cell that is running has certainly spilled, by how long its present step takes: nothing was heard of it for
    `quiet_s`. None if it has not."""
    if slow_s is None or progress.setting_up:
        return None
    steps = len(progress.measured.warmup_s) + len(progress.measured.step_s)
    allowed_s = max(QUIET_S, slow_s) + (0 if steps else FIRST_S[cell.step.engine])
    if quiet_s <= allowed_s:
        return None
    return f"a step took more than {allowed_s:.0f} s, where smaller cells ask for {slow_s / FALL:.2g} s"


def contention(others: OtherPrograms, total_bytes: int | None, failed: bool) -> str | None:
    """Why what was measured may be another program's doing; `failed` says that the memory did not suffice."""
    named = f" (pid {others.pid})" if others.pid else ""
    if (others.busy_percent or 0) >= BUSY_PERCENT:
        return f"another process{named} kept the card {others.busy_percent:.0f}% busy"
    grown = others.grown_bytes or 0
    if abs(grown) >= OTHERS_GREW_BYTES:
        return f"other processes {'took' if grown > 0 else 'gave back'} {format_bytes(abs(grown))} of the card meanwhile"
    if failed and total_bytes and (others.largest_bytes or 0) >= OTHERS_SHARE * total_bytes:
        return f"another process{named} holds {format_bytes(others.largest_bytes)} of the card"
    return None


def judge(outcome: Outcome[Measurement, CellProgress], cell: Cell, card: Card, records: Iterable[Record]) -> Verdict:
    """The verdict on a cell, given the device's other records."""
    verdict = _alone(outcome, cell, card, list(records))
    if card.is_card and verdict.status not in (Status.CRASHED, Status.TIMEOUT):
        others = OtherPrograms(**(_known(outcome).readings.get("others") or {}))
        if other := contention(others, card.total_bytes, verdict.status is not Status.FITS):
            alone = f"; alone it would read {verdict.status}: {verdict.why}" if verdict.why else ""
            return Verdict(Status.CONTENDED, other + alone)
    return verdict


def _known(outcome: Outcome[Measurement, CellProgress]) -> Measurement:
    """What is known of a cell, however its process ended."""
    return outcome.answer or (outcome.progress or CellProgress()).measured


def _alone(outcome: Outcome[Measurement, CellProgress], cell: Cell, card: Card, records: list[Record]) -> Verdict:
    """The verdict if nobody else used the card."""
    known = _known(outcome)
    spilled = spill_reason(known, cell, card, records) if card.is_card else None
    if outcome.killed == "spill":
        return Verdict(Status.SPILLS, outcome.certain)
    if outcome.killed == "timeout":
        if spilled:
            return Verdict(Status.SPILLS, spilled)
        return Verdict(Status.TIMEOUT, f"{len(known.step_s)} timed steps in {outcome.seconds:.0f} s where {MIN_STEPS} are "
                                       f"needed")
    if outcome.killed == "memory":
        return Verdict(Status.OOM, f"stopped at {format_bytes(outcome.resident_bytes)}: the machine was running out of "
                                   f"memory")
    if outcome.error:
        return _failed(*outcome.error, known, spilled, cell.step.engine != "eager")
    if outcome.answer is None:
        return _vanished(outcome)
    if spilled:
        return Verdict(Status.SPILLS, spilled)
    if known.timed_retries:
        return Verdict(Status.THRASHES, f"the allocator had to free its cache and ask again {known.timed_retries} times "
                                        f"during timed steps")
    return Verdict(Status.FITS)


def _failed(kind: str, text: str, known: Measurement, spilled: str | None, is_recorded: bool) -> Verdict:
    """By an exception of type `kind`, of a step that `is_recorded` as a graph or not."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    if not is_out_of_memory(kind, text):
        return Verdict(Status.CRASHED, f"{kind}: {line}"[:200])
    if spilled:
        return Verdict(Status.SPILLS, f"spilled before it failed: {spilled}")
    at = f"at {format_bytes(known.reserved_peak_bytes)} reserved, " if known.reserved_peak_bytes else ""
    # what follows the first sentence are figures, which nobody should believe
    error = f"{at}{kind}: {line.split('. ')[0]}"
    pieces = fragmentation(known.reserved_peak_bytes, known.allocated_peak_bytes, is_recorded)
    return Verdict(Status.OOM, f"{pieces} ({error[:60]})" if pieces else error[:200])


def _vanished(outcome: Outcome) -> Verdict:
    """By a process that ended without an answer."""
    if outcome.exit_code == -getattr(signal, "SIGKILL", 9):
        return Verdict(Status.OOM, "killed without a message (SIGKILL), as the system's out-of-memory killer does")
    last = outcome.printed.strip().splitlines()[-1:] or [""]
    status = Status.OOM if is_out_of_memory("", outcome.printed) else Status.CRASHED
    return Verdict(status, f"its process ended with code {outcome.exit_code} {last[0]}".strip()[:200])


def spill_reason(known: Measurement, cell: Cell, card: Card, records: Iterable[Record] = ()) -> str | None:
    """Which evidence says that a cell has spilled, of what is known of it so far; None if there is none."""
    claim = known.device_peak_bytes
    if claim is not None and card.total_bytes and claim > card.total_bytes:
        return f"{format_bytes(claim)} taken in all on a card of {format_bytes(card.total_bytes)}"
    if past := past_bound(known, *spill_bound(card.total_bytes, card.cliff, known.free_at_start_bytes)):
        return past
    moved = known.non_local_growth_bytes
    if moved is not None and moved > MOVED_BYTES:
        return f"{format_bytes(moved)} of it moved to system memory while it ran"
    if card.cliff and card.cliff.shows_fast(known):
        return None
    return jump_reason(known.warmup_s[1:] + known.step_s) or fall_reason(cell, known, records)


def jump_reason(step_s: Sequence[float]) -> str | None:
    """Why a cell's own steps show a spill: from one on all take JUMP times as long as those before. None if they don't."""
    for i in range(JUMP_STEPS - 1, len(step_s) - max(JUMP_STEPS, math.ceil(JUMP_SHARE * len(step_s))) + 1):
        before, after = median(step_s[:i]), step_s[i:]
        if min(after) > JUMP * before:
            return f"its steps took {before:.3g} s and from the {i + 1}th on {median(after):.3g}: spilled while it ran"
    return None
