"""The sweet spot among measured cells, with its reasons, the runners-up and the rejected: pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from probe.cell import Cell
from probe.cliff import FALL, Cliff, can_spill, fell
from probe.grid.search import LONG
from probe.records import Record, latest
from probe.stats import median_interval
from spillcliff.errors import NoPlan
from spillcliff.units import format_bytes, format_count
from trainer.config import StepConfig

NEAR = 0.02
"""Among steps this near to the fastest, the one that needs the least memory is taken: the spread of tok/s from day to
day is about as large."""


@dataclass(frozen=True)
class Candidate:
    """A step that could be run: a measured record, and how many of its micro-steps make an optimizer step."""

    record: Record
    accum: int

    @property
    def step(self) -> StepConfig:
        c = self.record.cell
        return StepConfig(c.batch, c.length, self.accum, c.engine, c.recompute, c.update)

    def stretch(self) -> float:
        """How far its accumulation is from the measured one, 0 if it is that."""
        return abs(math.log(self.accum / self.record.cell.accum))

    @property
    def step_s(self) -> float:
        """Median seconds of an optimizer step; for another accumulation than the measured one, so many micro-steps more."""
        r = self.record
        if self.accum == r.cell.accum:
            return r.median_step_s
        once_s = max(0.0, r.median_step_s - r.cell.accum * r.micro_s)  # clip and update
        return self.accum * r.micro_s + once_s

    @property
    def tok_s(self) -> float:
        return self.step.tokens / self.step_s

    def interval(self) -> tuple[float, float]:
        """tok/s between which the 95% interval of the measured median lies; (0, inf) from fewer than 6 times."""
        fastest_s, slowest_s = median_interval(self.record.step_s)
        if fastest_s <= 0:
            return 0.0, math.inf
        whole = self.tok_s * self.record.median_step_s
        return whole / slowest_s, whole / fastest_s

    def name(self) -> str:
        return step_name(self.step)


def step_name(step: StepConfig) -> str:
    """"B=4 L=512", and what is not usual about it."""
    extra = "" if (step.engine, step.recompute) == ("eager", "none") else f" {step.engine}/{step.recompute}"
    extra += "" if step.update == "after" else " update=backward"
    return f"B={step.batch} L={step.length}" + (f" accum={step.accum}" if step.accum > 1 else "") + extra


@dataclass(frozen=True)
class Choice:
    """The pick, and the account of it."""

    pick: Candidate
    why: list[str]
    runners_up: list[dict]
    rejected: list[dict]


def reject(record: Record, limit_bytes: int, records: list[Record], cliff: Cliff | None = None) -> list[str]:
    """Every reason against a measured cell; empty if there is none. `records` are of its option, the fastest first."""
    reasons = []
    if (record.peak_bytes or 0) > limit_bytes:
        reasons.append(f"{format_bytes(record.peak_bytes)} is over the {format_bytes(limit_bytes)} limit")
    fastest = next((r.tok_s for r in records if r.status == "fits"), 0)
    may_have_fallen = record.step_s and record.tok_s * FALL < fastest and can_spill(record) and not (
        cliff and cliff.shows_fast(record.peak_bytes))
    slower = fell(record.cell, record.tok_s, records) if may_have_fallen else None
    if slower:
        reasons.append(slower)
    if record.status != "fits" and not (slower and record.status == "spills"):
        reasons.append(record.status + (f": {record.why}" if record.why else ""))
    return reasons


def choose(records: list[Record], limit_bytes: int, tokens_wanted: int, tokens_asked: bool,
           length: int | None, cliff: Cliff | None = None) -> Choice:
    """The sweet spot for about `tokens_wanted` tokens per step; NoPlan if nothing fits.

    `records` are of one model on one device. Only cells that were measured as fitting are taken, with accumulation only
    where that was measured too; `tokens_asked` says that the user named the tokens per step, so that nothing else will
    do.
    """
    newest = list(latest(records).values())
    alike: dict[tuple, list[Record]] = {}
    for r in newest:
        alike.setdefault(_option(r.cell), []).append(r)
    fastest_first = {key: sorted(group, key=lambda r: -(r.tok_s or 0)) for key, group in alike.items()}
    reasons = {r.cell: reject(r, limit_bytes, fastest_first[_option(r.cell)], cliff) for r in newest}
    rejected = [{"cell": _cell(r.cell), "why": why} for r in newest if (why := reasons[r.cell])]
    fitting = [r for r in newest if not reasons[r.cell] and (length is None or r.cell.length == length)]
    if not fitting:
        raise NoPlan(_nothing_fits(newest, reasons, limit_bytes, length))
    candidates = _candidates(fitting, tokens_wanted)
    if tokens_asked:
        exact = [c for c in candidates if abs(c.step.tokens / tokens_wanted - 1) <= 0.2]
        if not exact:
            r = max(fitting, key=lambda r: r.tok_s)
            raise NoPlan(f"no measured cell makes {tokens_wanted:,} tokens a step; measure one with accumulation: probe "
                         f"grid --model {r.cell.model} --batch {r.cell.batch} --length {r.cell.length}"
                         + replace(r.cell, accum=2).options())
        candidates = exact
    fastest = max(candidates, key=lambda c: c.tok_s)
    why = []
    if length is None:
        best_at = {}
        for c in candidates:
            best_at[c.step.length] = max(best_at.get(c.step.length, 0), c.tok_s)
        longest = max(at for at, tok_s in best_at.items() if tok_s >= (1 - LONG) * fastest.tok_s)
        others = sorted(at for at in best_at if at != longest)
        if others:
            why.append(f"length {longest}: the longest whose best tok/s is within {LONG:.0%} of the best of all "
                       f"({fastest.tok_s:,.0f} tok/s, {fastest.name()})")
        candidates = [c for c in candidates if c.step.length == longest]
        fastest = max(candidates, key=lambda c: c.tok_s)
    near = [c for c in candidates if c.tok_s >= (1 - NEAR) * fastest.tok_s]
    pick = min(near, key=lambda c: (c.record.peak_bytes or 0, -c.tok_s, c.name()))
    if pick is fastest:
        why.append(f"{pick.name()}: the fastest that fits, {pick.tok_s:,.0f} tok/s at {format_bytes(pick.record.peak_bytes)}"
                   f" under the {format_bytes(limit_bytes)} limit")
    else:
        why.append(f"{pick.name()}: within {NEAR:.0%} of the fastest ({fastest.name()}, {fastest.tok_s:,.0f} tok/s) with "
                   f"{format_bytes(pick.record.peak_bytes)} instead of {format_bytes(fastest.record.peak_bytes)}")
    why += _ties(pick, near)
    why += [line for group in alike.values() for line in contradictions(group, reasons)]
    if pick.step.tokens < 0.8 * tokens_wanted and pick.record.cell.accum == 1 and pick.step.update == "after":
        why.append(f"no accumulation, as none was measured; {tokens_wanted:,} tokens a step would need: probe grid --model "
                   f"{pick.record.cell.model} --batch {pick.step.batch} --length {pick.step.length}"
                   + replace(pick.record.cell, accum=2).options())
    others = sorted((c for c in candidates if c is not pick), key=lambda c: (-c.tok_s, c.name()))[:5]
    leanest = min(candidates, key=lambda c: (c.record.peak_bytes or 0, -c.tok_s, c.name()))
    if leanest is not pick and leanest not in others:
        others.append(leanest)
    runners_up = [{"cell": _cell(c.record.cell) | {"accum": c.accum}, "tok_s": c.tok_s, "peak_bytes": c.record.peak_bytes,
                   "hours_ratio": pick.tok_s / c.tok_s,
                   "saves_bytes": (pick.record.peak_bytes or 0) - (c.record.peak_bytes or 0)} for c in others]
    return Choice(pick, why, runners_up, rejected)


def _option(cell: Cell) -> tuple:
    return cell.engine, cell.recompute, cell.update


def _ties(pick: Candidate, near: Sequence[Candidate]) -> list[str]:
    """Which of the near ones can't be told apart from the pick by what was measured."""
    low, high = pick.interval()
    alike = [c.name() for c in near if c is not pick and high >= c.interval()[0] and c.interval()[1] >= low]
    return [f"{', '.join(sorted(alike))}: no slower and no faster than the pick, within the noise of what was measured"
            ] if alike else []


def contradictions(records: Sequence[Record], reasons: dict[Cell, list[str]]) -> list[str]:
    """Failures that a cell which fits belies: one that needs at least as much memory. `records` are of one option."""
    found = []
    fitting = sorted((r.cell for r in records if not reasons[r.cell]), key=lambda c: (c.batch * c.length, c.accum))
    for bad in records:
        if bad.status not in ("spills", "oom", "thrashes"):
            continue
        b = bad.cell
        if a := next((c for c in fitting if b.within(c)), None):
            found.append(f"B={b.batch} L={b.length} {bad.status} where the larger B={a.batch} L={a.length} fits: one of the "
                         f"two was disturbed, or memory has a bump there; probe grid --again tells")
    return found


def _candidates(fitting: list[Record], tokens_wanted: int) -> list[Candidate]:
    """For each micro-step the accumulation that comes nearest to the tokens wanted: above 1 only from a record with
    accumulation; where there is none, one micro-step makes do."""
    found = {}
    for r in sorted(fitting, key=lambda r: r.cell.accum):
        accum = max(1, round(tokens_wanted / (r.cell.batch * r.cell.length)))
        if r.cell.accum == 1:
            candidate = Candidate(r, 1)
        elif accum > 1 and (accum == r.cell.accum or r.micro_s is not None):
            candidate = Candidate(r, accum)
        elif replace(r.cell.step, accum=1) in found:
            continue
        else:
            candidate = Candidate(r, r.cell.accum)
        key = replace(candidate.step, accum=1)
        if key not in found or candidate.step != found[key].step or candidate.stretch() < found[key].stretch():
            found[key] = candidate
    return list(found.values())


def _cell(cell: Cell) -> dict:
    return {"model": cell.model, "batch": cell.batch, "length": cell.length, "accum": cell.accum, "engine": cell.engine,
            "recompute": cell.recompute, "vocab": cell.vocab, "update": cell.update}


def _nothing_fits(newest: list[Record], reasons: dict, limit_bytes: int, length: int | None) -> str:
    if length is not None and not any(r.cell.length == length for r in newest):
        have = ", ".join(str(n) for n in sorted({r.cell.length for r in newest}))
        return f"no cell of length {length} was measured (there are {have}); probe grid --length {length} measures it"
    smallest = min(newest, key=lambda r: (r.peak_bytes or 1 << 62, r.cell.batch * r.cell.length))
    why = "; ".join(reasons[smallest.cell]) or "it is of another length"
    model = f"{smallest.cell.model} ({format_count(smallest.model.parameters)})"
    return (f"none of {len(newest)} measured cells of {model} fits under {format_bytes(limit_bytes)}; "
            f"the smallest, B={smallest.cell.batch} L={smallest.cell.length}: {why}. "
            f"Measure a smaller --batch or --length, --recompute block, or a smaller --model")
