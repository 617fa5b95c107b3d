"""The sweet spot among measured cells, with its reasons, the runners-up and the rejected: pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from probe.cell import Cell
from probe.cliff import GROWS, Cliff, can_spill, fall_reason, past_bound, spill_bound, whole_claim
from probe.grid.search import LONG
from probe.records import WANT_OF_MEMORY, Record, Status, latest
from probe.stats import median_interval
from spillcliff.errors import NoPlan
from spillcliff.units import format_bytes, format_count
from trainer.config import ModelConfig, StepConfig
from trainer.plan import Rejected, RunnerUp, training_windows
from trainer.run.slowdown import FALL

NEAR = 0.02
"""Among steps this near to the fastest, the one that needs the least memory is taken: the spread of tok/s from day to
day is about as large."""
TOLERANCE = 0.2
"""How far a step's tokens may be from those that the user asked for."""
SHORT = 0.8
"""Below this part of the tokens wanted, a pick without accumulation is told to be so."""
RUNNERS_UP = 5


@dataclass(frozen=True)
class Candidate:
    """A step that could be run: a measured record that fits, and how many of its micro-steps make an optimizer step."""

    record: Record
    accum: int

    @property
    def step(self) -> StepConfig:
        return replace(self.record.cell.step, accum=self.accum)

    @property
    def model(self) -> ModelConfig:
        if self.record.model is None:
            raise NoPlan("a step of somebody's own has no model to plan for")
        return self.record.model

    @property
    def median_step_s(self) -> float:
        """Seconds of the step that was measured, with its own accumulation."""
        if self.record.median_step_s is None:
            raise ValueError("a candidate's record has timed steps")
        return self.record.median_step_s

    @property
    def peak_bytes(self) -> int:
        """0 where the device gives none."""
        return self.record.peak_bytes or 0

    def stretch(self) -> float:
        """How far its accumulation is from the measured one, 0 if it is that."""
        return abs(math.log(self.accum / self.record.cell.accum))

    @property
    def step_s(self) -> float:
        """Median seconds of an optimizer step; for another accumulation than the measured one, so many micro-steps more."""
        measured = self.record.cell.accum
        if self.accum == measured or self.record.micro_s is None:
            return self.median_step_s
        once_s = max(0.0, self.median_step_s - measured * self.record.micro_s)  # clip and update
        return self.accum * self.record.micro_s + once_s

    @property
    def tok_s(self) -> float:
        return self.step.tokens / self.step_s

    def interval(self) -> tuple[float, float]:
        """tok/s between which the 95% interval of the measured median lies; (0, inf) from fewer than 6 times."""
        fastest_s, slowest_s = median_interval(self.record.step_s)
        if fastest_s <= 0:
            return 0.0, math.inf
        whole = self.tok_s * self.median_step_s
        return whole / slowest_s, whole / fastest_s

    def __str__(self) -> str:
        return str(self.step)


@dataclass(frozen=True)
class Wish:
    """What is wanted of a step: about so many `tokens`, which the user named themselves if `is_asked`, so that nothing else
    will do; of one `length`, or of any; no larger than the data of `data_tokens`, where that is known (`are_pairs` if it is
    of those)."""

    tokens: int
    is_asked: bool = False
    length: int | None = None
    data_tokens: int | None = None
    are_pairs: bool = False


class TooLittleData(NoPlan):
    """There is less data than one step of any measured cell takes."""


@dataclass(frozen=True)
class Choice:
    """The pick, and the account of it."""

    pick: Candidate
    why: list[str]
    runners_up: list[RunnerUp]
    rejected: list[Rejected]


def choose(records: list[Record], limit_bytes: int, wish: Wish, cliff: Cliff | None = None) -> Choice:
    """The sweet spot; NoPlan if nothing fits, TooLittleData if what fits is larger than the data.

    `records` are of one model on one device. Only cells that were measured as fitting are taken, with accumulation only
    where that was measured too.
    """
    newest = list(latest(records).values())
    reasons = _reasons(newest, limit_bytes, cliff)
    fitting = [r for r in newest if not reasons[r.cell] and wish.length in (None, r.cell.length)]
    if not fitting:
        raise NoPlan(_nothing_fits(newest, reasons, limit_bytes, wish.length))
    candidates = _within_data(_of_tokens(_candidates(fitting, wish.tokens), fitting, wish), fitting, wish)
    length_why: list[str] = []
    if wish.length is None:
        candidates, length_why = _of_best_length(candidates)
    pick, pick_why = _pick(candidates, limit_bytes)
    why = [*length_why, *pick_why, *_contradictions(newest, reasons), *_lacks_accumulation(pick, wish.tokens)]
    rejected = [Rejected(_cell(r.cell), reasons[r.cell]) for r in newest if reasons[r.cell]]
    return Choice(pick, why, _runners_up(pick, candidates), rejected)


def _families(records: Sequence[Record]) -> list[list[Record]]:
    """The records in groups whose cells differ in batch, length and accumulation alone."""
    groups: dict[Cell, list[Record]] = {}
    for r in records:
        groups.setdefault(r.cell.family, []).append(r)
    return list(groups.values())


def _reasons(newest: list[Record], limit_bytes: int, cliff: Cliff | None) -> dict[Cell, list[str]]:
    """Every reason against each measured cell; empty if there is none."""
    reasons: dict[Cell, list[str]] = {}
    for family in _families(newest):
        fastest_first = sorted(family, key=lambda r: -r.tok_s)
        reasons |= {r.cell: reject(r, limit_bytes, fastest_first, cliff) for r in family}
    return reasons


def reject(record: Record, limit_bytes: int, records: list[Record], cliff: Cliff | None = None) -> list[str]:
    """Every reason against a measured cell; empty if there is none. `records` are of its family, the fastest first."""
    reasons = []
    claim_bytes = whole_claim(record, cliff)
    if (claim_bytes or 0) > limit_bytes:
        reasons.append(f"{format_bytes(claim_bytes)} is over the {format_bytes(limit_bytes)} limit")
    if record.fits and (past := past_bound(record, *spill_bound(None, cliff, record.free_at_start_bytes))):
        reasons.append(past)  # measured before the cliff was, or under a limit that is past it
    fastest = next((r.tok_s for r in records if r.fits), 0.0)
    may_have_fallen = record.step_s and record.tok_s * FALL < fastest * GROWS and can_spill(record) and not (
        cliff and cliff.shows_fast(record))
    slower = fall_reason(record.cell, record, records) if may_have_fallen else None
    if slower:
        reasons.append(slower)
    if not record.fits and not (slower and record.status is Status.SPILLS):
        reasons.append(record.status + (f": {record.why}" if record.why else ""))
    return reasons


def _candidates(fitting: list[Record], tokens_wanted: int) -> list[Candidate]:
    """For each micro-step the accumulation that comes nearest to the tokens wanted: above 1 only from a record with
    accumulation; where there is none, one micro-step makes do."""
    best: dict[StepConfig, Candidate] = {}
    for r in sorted(fitting, key=lambda r: r.cell.accum):
        accum = max(1, round(tokens_wanted / r.cell.step.micro_tokens))
        micro_step = replace(r.cell.step, accum=1)
        if r.cell.accum == 1:
            candidate = Candidate(r, 1)
        elif accum > 1 and (accum == r.cell.accum or r.micro_s is not None):
            candidate = Candidate(r, accum)
        elif micro_step in best:
            continue
        else:
            candidate = Candidate(r, r.cell.accum)
        before = best.get(micro_step)
        if before is None or candidate.step != before.step or candidate.stretch() < before.stretch():
            best[micro_step] = candidate
    return list(best.values())


def _of_tokens(candidates: list[Candidate], fitting: list[Record], wish: Wish) -> list[Candidate]:
    """Those with the tokens that were asked for, all where none were; NoPlan if there is none such."""
    if not wish.is_asked:
        return candidates
    exact = [c for c in candidates if abs(c.step.tokens / wish.tokens - 1) <= TOLERANCE]
    if not exact:
        cell = max(fitting, key=lambda r: r.tok_s).cell
        raise NoPlan(f"no measured cell makes {wish.tokens:,} tokens a step; measure one with accumulation: "
                     f"{_grid_command(cell.with_step(accum=2))}")
    return exact


def _within_data(candidates: list[Candidate], fitting: list[Record], wish: Wish) -> list[Candidate]:
    """Those whose step has no sequence twice, with less accumulation where that is what it takes."""
    if wish.data_tokens is None:
        return candidates
    plain = {r.cell.step: r for r in fitting if r.cell.accum == 1}
    kept = []
    for c in candidates:
        most = training_windows(wish.data_tokens, c.step, wish.are_pairs) // c.step.batch
        if c.accum <= most:
            kept.append(c)
        elif not wish.is_asked and most > 1 and c.record.micro_s is not None:
            kept.append(replace(c, accum=most))
        elif not wish.is_asked and most == 1 and (once := plain.get(replace(c.step, accum=1))):
            kept.append(Candidate(once, 1))
    if not kept:
        raise TooLittleData(_larger_than_data(candidates, wish, wish.data_tokens))
    return kept


def _larger_than_data(candidates: list[Candidate], wish: Wish, data_tokens: int) -> str:
    smallest = min(candidates, key=lambda c: (c.step.tokens, c.step.length)).step
    windows = training_windows(data_tokens, smallest, wish.are_pairs)
    why = (f"a step must not be larger than the data: {data_tokens:,} tokens have {windows:,} sequences of "
           f"{smallest.length} to train on, and ")
    if wish.is_asked:
        return (f"{why}{wish.tokens:,} tokens a step take {smallest.sequences:,}; ask for fewer --tokens-per-step, or give "
                f"more text")
    cell = candidates[0].record.cell
    length = smallest.length if windows or wish.length else 1 << max(0, (data_tokens // 4).bit_length() - 1)
    measure = f", or measure a smaller step: {_grid_command(cell.with_step(batch=1, length=length, accum=1))}"
    can_be_smaller = training_windows(data_tokens, replace(smallest, length=length), wish.are_pairs) > 0
    return f"{why}the smallest that was measured takes {smallest.sequences:,}; give more text{measure * can_be_smaller}"


def _of_best_length(candidates: list[Candidate]) -> tuple[list[Candidate], list[str]]:
    """Those of the longest length whose best comes near the best of all, and why."""
    fastest = max(candidates, key=lambda c: c.tok_s)
    best_at: dict[int, float] = {}
    for c in candidates:
        best_at[c.step.length] = max(best_at.get(c.step.length, 0.0), c.tok_s)
    longest = max(length for length, tok_s in best_at.items() if tok_s >= (1 - LONG) * fastest.tok_s)
    why = [] if len(best_at) == 1 else [
        f"length {longest}: the longest whose best tok/s is within {LONG:.0%} of the best of all "
        f"({fastest.tok_s:,.0f} tok/s, {fastest})"]
    return [c for c in candidates if c.step.length == longest], why


def _pick(candidates: list[Candidate], limit_bytes: int) -> tuple[Candidate, list[str]]:
    """The leanest of those near the fastest, and why."""
    fastest = max(candidates, key=lambda c: c.tok_s)
    near = [c for c in candidates if c.tok_s >= (1 - NEAR) * fastest.tok_s]
    pick = min(near, key=lambda c: (c.peak_bytes, -c.tok_s, str(c)))
    if pick is fastest:
        limit = f"the {format_bytes(limit_bytes)} limit"
        under = (f" at {format_bytes(pick.record.peak_bytes)} under {limit}" if pick.peak_bytes else
                 f"; what it takes can't be read on this device, so {limit} was not checked")
        why = f"{pick}: the fastest that fits, {pick.tok_s:,.0f} tok/s{under}"
    else:
        why = (f"{pick}: within {NEAR:.0%} of the fastest ({fastest}, {fastest.tok_s:,.0f} tok/s) with "
               f"{format_bytes(pick.record.peak_bytes)} instead of {format_bytes(fastest.record.peak_bytes)}")
    return pick, [why, *_ties(pick, near)]


def _ties(pick: Candidate, near: Sequence[Candidate]) -> list[str]:
    """Which of the near ones can't be told apart from the pick by what was measured."""
    low, high = pick.interval()
    alike = [str(c) for c in near if c is not pick and high >= c.interval()[0] and c.interval()[1] >= low]
    return [f"{', '.join(sorted(alike))}: no slower and no faster than the pick, within the noise of what was measured"
            ] if alike else []


def _contradictions(records: Sequence[Record], reasons: dict[Cell, list[str]]) -> list[str]:
    return [line for family in _families(records) for line in contradictions(family, reasons)]


def contradictions(records: Sequence[Record], reasons: dict[Cell, list[str]]) -> list[str]:
    """Failures that a cell which fits belies: one that needs at least as much memory. `records` are of one family."""
    lines = []
    fitting = sorted((r.cell for r in records if not reasons[r.cell]), key=lambda c: (c.step.micro_tokens, c.accum))
    for failed in records:
        if failed.status not in WANT_OF_MEMORY:
            continue
        small = failed.cell
        if large := next((c for c in fitting if small.within(c)), None):
            lines.append(f"B={small.batch} L={small.length} {failed.status} where the larger B={large.batch} "
                         f"L={large.length} fits: one of the two was disturbed, or memory has a bump there; probe grid "
                         f"--again tells")
    return lines


def _lacks_accumulation(pick: Candidate, tokens_wanted: int) -> list[str]:
    cell = pick.record.cell
    if pick.step.tokens >= SHORT * tokens_wanted or cell.accum > 1 or pick.step.update != "after":
        return []
    return [f"no accumulation, as none was measured; {tokens_wanted:,} tokens a step would need: "
            f"{_grid_command(cell.with_step(accum=2))}"]


def _grid_command(cell: Cell) -> str:
    return f"probe grid --model {cell.model} --batch {cell.batch} --length {cell.length}{cell.command_options()}"


def _runners_up(pick: Candidate, candidates: list[Candidate]) -> list[RunnerUp]:
    """The fastest others, and the leanest of all."""
    others = sorted((c for c in candidates if c is not pick), key=lambda c: (-c.tok_s, str(c)))[:RUNNERS_UP]
    leanest = min(candidates, key=lambda c: (c.peak_bytes, -c.tok_s, str(c)))
    if leanest is not pick and leanest not in others:
        others.append(leanest)
    return [RunnerUp(cell=_cell(c.record.cell) | {"accum": c.accum}, tok_s=c.tok_s, peak_bytes=c.record.peak_bytes,
                     hours_ratio=pick.tok_s / c.tok_s, saves_bytes=pick.peak_bytes - c.peak_bytes) for c in others]


def _cell(cell: Cell) -> dict:
    """As plans name a cell."""
    return {name: value for name, value in cell.to_json().items() if name != "shape"}


def _nothing_fits(newest: list[Record], reasons: dict[Cell, list[str]], limit_bytes: int, length: int | None) -> str:
    if length is not None and not any(r.cell.length == length for r in newest):
        have = ", ".join(str(n) for n in sorted({r.cell.length for r in newest}))
        return f"no cell of length {length} was measured (there are {have}); probe grid --length {length} measures it"
    smallest = min(newest, key=lambda r: (r.peak_bytes or 1 << 62, r.cell.step.micro_tokens))
    why = "; ".join(reasons[smallest.cell]) or "it is of another length"
    size = f" ({format_count(smallest.model.parameters)})" if smallest.model else ""
    return (f"none of {len(newest)} measured cells of {smallest.cell.model}{size} fits under {format_bytes(limit_bytes)}; "
            f"the smallest, B={smallest.cell.batch} L={smallest.cell.length}: {why}. "
            f"Measure a smaller --batch or --length, --recompute block, or a smaller --model")
