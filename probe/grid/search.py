"""Which cells of a plane (batch x length) must be measured for a safe pick of the fastest that fits: pure.

Every answer follows from the records alone, so an interrupted grid goes on where it stopped. Curves of step time and peak
are fitted as records come in (surrogate.py); a cell is left out when even an optimist would not expect it to win, or when it
needs too much memory. Nothing is taken to be monotone near the pick: its neighbours are measured.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from probe.cell import Cell, planes
from probe.cliff import can_spill, fall_reason
from probe.grid import surrogate
from probe.records import WANT_OF_MEMORY, Record, Status
from spillcliff.units import format_bytes

NEAR = 0.01
"""A cell that could beat the pick by no more than this is not worth its time."""
LONG = 0.05
"""A plan takes a longer length while its best tok/s is within this of the overall best."""
OPTIMISM = 1.35
"""Standard deviations by which a cell that wasn't measured may be faster than expected. Of 360 made-up
grids 2 lost over 1% and 9 took over 35% of the time; at 1.0 6 and 9, at 1.5 2 and 17."""
FAR = 0.02
"""A pick's neighbour in length, or the largest batch, is measured unless an optimist puts it this far below the pick."""
CLIMB = 4
"""Times as many tokens as any cell that fits has: no cell beyond is tried before its memory is known, since far past its
memory a card under Windows makes the desktop hang."""
MARGIN = 0.03
"""Least share by which a predicted peak must be over the limit for a cell to be left out."""
DOUBT = 1.5
"""Standard deviations of the predicted peak that are granted to a cell besides."""
TRIES = 2
"""Failures at one length that speak for every cell which needs no less."""
EARLY_SHARE = 0.1
"""Of the memory that was free: a failure that had taken less was no want of it, and says nothing of other cells."""
STEPS = 14
"""Steps that a cell takes, warm-up included: the median of an H200's grid."""


def unknown(cell: Cell) -> None:
    """The prediction of peaks where there is no estimator."""


def is_early(record: Record) -> bool:
    """Whether it failed for want of memory with hardly any taken: a hiccup of the driver, another program's doing."""
    free_bytes, peak_bytes = record.free_at_start_bytes, record.peak_bytes
    return (record.status is Status.OOM and free_bytes is not None and peak_bytes is not None
            and peak_bytes < EARLY_SHARE * free_bytes)


def best(records: Iterable[Record], limit_bytes: int | None) -> Record | None:
    """The pick: of the cells that fit, and within the limit, the one with most tok/s; None if there is none."""
    fitting = [r for r in records if r.fits and (limit_bytes is None or (r.peak_bytes or 0) <= limit_bytes)]
    return max(fitting, key=lambda r: r.tok_s, default=None)


def picks(records: Iterable[Record], limit_bytes: int | None) -> list[Record]:
    """Of each plane the pick, and the fastest of the longest length that comes near it: what a plan may take, and so what
    is worth measuring with accumulation."""
    chosen: dict[Cell, Record] = {}
    by_cell = {r.cell: r for r in records}
    for plane in planes(by_cell):
        within = [by_cell[c] for c in plane if best([by_cell[c]], limit_bytes)]
        if top := best(within, limit_bytes):
            near = [r for r in within if r.tok_s >= (1 - LONG) * top.tok_s]
            longest = max(near, key=lambda r: (r.cell.length, r.tok_s))
            chosen |= {top.cell: top, longest.cell: longest}
    return list(chosen.values())


def next_cell(cells: Sequence[Cell], known: Mapping[Cell, Record], limit_bytes: int | None,
              predict: Callable[[Cell], int | None] = unknown) -> Cell | None:
    """What to measure next of one plane (cells that differ in batch and length alone); None when the pick is safe or
    nothing fits. `predict` gives a peak in bytes, of the process's whole claim, or None."""
    view = _survey(cells, known, limit_bytes, predict)
    todo = [c for c in view.cells if c not in known and c not in view.hopeless]
    if view.pick is None:
        return min(todo, key=_needs, default=None)
    worth = [c for c in todo if view.could_win(c)]
    beside = [c for c in todo if view.is_beside_pick(c)]
    if beside and all(view.expected_tok_s[c] < view.pick.tok_s for c in worth):
        return max(beside, key=view.gain_per_s.__getitem__)
    if not worth:
        return None
    largest = max(c.step.tokens for c, r in known.items() if r.fits)
    reach = max(CLIMB * largest, min((c.step.tokens for c in todo if c.step.tokens > largest), default=0))
    safe = [c for c in todo if c.step.tokens <= reach or c in view.surely_fits]
    return max(set(safe) & set(worth), key=view.gain_per_s.__getitem__, default=None) or max(safe, key=_needs)


def left_out(cells: Sequence[Cell], known: Mapping[Cell, Record], limit_bytes: int | None,
             predict: Callable[[Cell], int | None] = unknown) -> dict[Cell, str]:
    """Why each cell that has no record need not be measured, one line each; cells still to be measured are not in it."""
    view = _survey(cells, known, limit_bytes, predict)
    reasons = dict(view.hopeless)
    if view.pick is not None:
        for c in view.cells:
            if c not in known and c not in reasons and not view.could_win(c) and not view.is_beside_pick(c):
                reasons[c] = (f"at most {view.most_tok_s[c]:,.0f} tok/s predicted where {_name(view.pick.cell)} has "
                              f"{view.pick.tok_s:,.0f}")
    return reasons


@dataclass(frozen=True)
class _View:
    """What the records say of every cell: why it is hopeless, tok/s expected and at most, the tok/s that measuring it may
    win for each second it takes, and which are sure to be under the limit."""

    cells: Sequence[Cell]
    pick: Record | None
    hopeless: dict[Cell, str]
    expected_tok_s: dict[Cell, float]
    most_tok_s: dict[Cell, float]
    gain_per_s: dict[Cell, float]
    surely_fits: set[Cell]

    def could_win(self, cell: Cell) -> bool:
        assert self.pick is not None, "asked only where something fits"
        return self.most_tok_s[cell] > (1 + NEAR) * self.pick.tok_s

    def is_beside_pick(self, cell: Cell) -> bool:
        """Whether a cell must be measured for the pick's sake: the next batches at its length, and unless they are far
        below it, the next lengths at its batch and the largest batch that may fit."""
        assert self.pick is not None, "asked only where something fits"
        pick = self.pick.cell
        is_near = self.most_tok_s[cell] > (1 - FAR) * self.pick.tok_s
        if cell.length == pick.length:
            axis = sorted({c.batch for c in self.cells if c.length == pick.length})
            largest = max(c.batch for c in self.cells if c.length == pick.length and c not in self.hopeless)
            return abs(axis.index(cell.batch) - axis.index(pick.batch)) == 1 or (is_near and cell.batch == largest)
        if cell.batch != pick.batch or not is_near:
            return False
        axis = sorted({c.length for c in self.cells if c.batch == pick.batch})
        return abs(axis.index(cell.length) - axis.index(pick.length)) == 1


def _survey(cells: Sequence[Cell], known: Mapping[Cell, Record], limit_bytes: int | None,
            predict: Callable[[Cell], int | None]) -> _View:
    every = list(dict.fromkeys([*cells, *known]))
    pick = best((known[c] for c in cells if c in known), limit_bytes)
    fits = [r for r in known.values() if r.fits]
    # a record made elsewhere may say "fits" of a spill; its time is no point of the curve
    spilled = [r for r in fits if can_spill(r) and fall_reason(r.cell, r, fits)]
    fits = [r for r in fits if r not in spilled]
    failed = [r for r in known.values() if r.status in WANT_OF_MEMORY and not is_early(r)] + spilled
    at_least = {r.cell: max(limit_bytes or 1, r.peak_bytes or 1) for r in failed}
    peak = surrogate.peaks(every, fits, at_least, [predict(c) for c in every])
    hopeless, chance, surely_fits = _memory(every, known, failed, limit_bytes, peak)
    if pick is None:
        return _View(cells, pick, hopeless, {}, {}, {}, surely_fits)
    time = surrogate.step_times(every, fits)
    log_tokens = np.log([c.step.tokens for c in every])
    # expected improvement on the pick, in shares of its tok/s (Jones et al. 1998, Efficient Global Optimization, eq. 15)
    ahead = (log_tokens - time.mean - math.log(pick.tok_s)) / time.sd
    gain = time.weight @ (time.sd * (np.exp(-ahead**2 / 2) / math.sqrt(2 * math.pi) + ahead * _normal(ahead)))
    cost_s = np.median([r.setup_s or 0 for r in fits]) + 1 + STEPS * np.exp(time.at(0))

    def by_cell(values: np.ndarray) -> dict[Cell, float]:
        return dict(zip(every, values.tolist(), strict=True))
    return _View(cells, pick, hopeless, by_cell(np.exp(log_tokens - time.at(0))),
                 by_cell(np.exp(log_tokens - time.at(-OPTIMISM))), by_cell(gain * chance / cost_s), surely_fits)


def _memory(every: Sequence[Cell], known: Mapping[Cell, Record], failed: list[Record], limit_bytes: int | None,
            peak: surrogate.Surrogate | None) -> tuple[dict[Cell, str], np.ndarray, set[Cell]]:
    """(why cells without a record are hopeless, each cell's chance to fit, those that are sure to be under the limit)."""
    at = {c: i for i, c in enumerate(every)}
    todo = [c for c in every if c not in known]
    reasons: dict[Cell, str] = {}
    # until two peaks are known no curve says how they grow, and every larger cell may be far past the card's memory
    slope_known = peak is not None and sum(r.fits and r.peak_bytes is not None for r in known.values()) >= 2
    for r in known.values():
        is_over = limit_bytes and (r.peak_bytes or 0) > limit_bytes
        if r.status is Status.TIMEOUT or (not slope_known and (r in failed or is_over)):
            words = f"took {format_bytes(r.peak_bytes)}" if r.fits else f"ended in {r.status}"
            reasons |= {c: f"the smaller {_name(r.cell)} {words}" for c in todo if r.cell.within(c)}
    chance = np.ones(len(every))
    if peak is None:
        return reasons, chance, set()
    mean, sd = peak.at(0), peak.at(1) - peak.at(0)
    bounds = [(math.log(limit_bytes), 0.0, f"is over the {format_bytes(limit_bytes)} limit")] if limit_bytes else []
    bounds += [(mean[at[r.cell]], sd[at[r.cell]],
                f"is over {format_bytes(math.exp(mean[at[r.cell]]))}, with which {_name(r.cell)} ended in {r.status}")
               for r in failed]
    if not bounds:
        return reasons, chance, set()
    bound, doubt, words = min(bounds)
    surely_fits = {c for c in every if limit_bytes and mean[at[c]] + DOUBT * sd[at[c]] < math.log(limit_bytes)}
    sd = np.sqrt(sd**2 + doubt**2 + (MARGIN / DOUBT)**2)
    reasons = {c: f"predicted {format_bytes(math.exp(mean[at[c]]))} {words}" for c in todo
               if mean[at[c]] - bound > DOUBT * sd[at[c]]} | reasons
    most = max((mean[at[c]] for c, r in known.items() if r.fits), default=bound)
    room = np.linspace(min(most, bound), bound, 9) if doubt else np.array([bound])
    chance = _normal((room[:, None] - mean) / sd).mean(0)
    for c in todo:
        if sum(r.cell.length == c.length and mean[at[r.cell]] <= mean[at[c]] for r in failed) >= TRIES:
            reasons.setdefault(c, f"{TRIES} cells of this length that need no more memory failed")
    return reasons, chance, surely_fits


def _normal(z: np.ndarray) -> np.ndarray:
    """The normal distribution's cumulative probability."""
    return 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def _needs(cell: Cell) -> tuple[int, int]:
    return cell.step.tokens, cell.batch


def _name(cell: Cell) -> str:
    return f"B={cell.batch} L={cell.length}"
