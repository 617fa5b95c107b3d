"""Which cells of a plane (batch x length) must be measured for a safe pick of the fastest that fits: pure.

Every answer follows from the records alone, so an interrupted grid goes on where it stopped. Two curves are fitted as
records come in: seconds of a step, max(launch floor, fixed + tokens x (1 + attention x length)), and bytes of the peak,
static + tokens. What a curve misses is roughness (quantised batches, allocator bumps): independent from cell to cell, in
part shared by the cells of one batch. How rough a card is isn't assumed but weighed: each of ROUGHNESS has a curve of its
own, and the records say how much each is believed (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.7
and 5.4). A cell is left out when even an optimist would not expect it to win, or when it needs too much memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from probe.cell import Cell, planes
from probe.cliff import FALL, can_spill
from probe.records import Record
from trainer.units import format_bytes

LONG = 0.05
"""A plan takes a longer length while its best tok/s is within this of the overall best."""
NEAR = 0.01
OPTIMISM = 1.35
FAR = 0.02
CLIMB = 4
MARGIN = 0.03
DOUBT = 1.5
TRIES = 2
GLOBAL = False
ENDS = True
FIRST = 1.0
SCORE = True
SURE = 1.35
FAILED = ("oom", "spills", "thrashes")
NOISE = 0.006
PEAK_NOISE = 0.01
ROUGHNESS = {0.0: 16, 0.01: 8, 0.02: 4, 0.04: 2, 0.08: 1, 0.16: 0.5}
SHARED = {0.1: 1, 0.5: 1, 0.9: 4}
STEPS = 14
SPREAD = [1.0, 1.5, 1.5, 0.7]
POWER = 4


def unknown(cell: Cell) -> None:
    """The prediction of peaks where there is no estimator."""


def best(records: Iterable[Record], limit_bytes: int | None) -> Record | None:
    """The pick: of the cells that fit, and within the limit, the one with most tok/s; None if there is none."""
    fitting = [r for r in records if r.status == "fits" and (limit_bytes is None or (r.peak_bytes or 0) <= limit_bytes)]
    return max(fitting, key=lambda r: r.tok_s, default=None)


def next_cell(cells: Sequence[Cell], known: Mapping[Cell, Record], limit_bytes: int | None,
              predict: Callable[[Cell], int | None] = unknown) -> Cell | None:
    """What to measure next; None when the pick is safe or nothing fits."""
    view = _survey(cells, known, limit_bytes, predict)
    todo = [c for c in view.cells if c not in known and c not in view.hopeless]
    if view.pick is None:
        return min(todo, key=_needs, default=None)
    worth = [c for c in todo if view.most_tok_s[c] > (1 + NEAR) * view.pick.tok_s]
    beside = [c for c in todo if _beside(c, view)]
    if not worth:
        return next(iter(beside), None)
    if FIRST is not None and beside and all(view.expected[c] < FIRST * view.pick.tok_s for c in worth):
        return beside[0] if not SCORE else max(beside, key=view.gain_per_s.get)
    largest = max(c.step.tokens for c, r in known.items() if r.status == "fits")
    reach = max(CLIMB * largest, min((c.step.tokens for c in todo if c.step.tokens > largest), default=0))
    safe = [c for c in todo if c.step.tokens <= reach or c in view.surely_fits]
    return max(set(safe) & set(worth), key=view.gain_per_s.get, default=None) or max(safe, key=_needs)


def left_out(cells: Sequence[Cell], known: Mapping[Cell, Record], limit_bytes: int | None,
             predict: Callable[[Cell], int | None] = unknown) -> dict[Cell, str]:
    """Why each cell that has no record need not be measured, one line each; cells still to be measured are not in it."""
    view = _survey(cells, known, limit_bytes, predict)
    reasons = dict(view.hopeless)
    if view.pick is not None:
        for c in view.cells:
            if c not in known and c not in reasons and not _decides(c, view):
                reasons[c] = (f"at most {view.most_tok_s[c]:,.0f} tok/s predicted where {_name(view.pick.cell)} has "
                              f"{view.pick.tok_s:,.0f}")
    return reasons


@dataclass(frozen=True)
class _View:
    cells: Sequence[Cell]
    pick: Record | None
    hopeless: dict[Cell, str]
    most_tok_s: dict[Cell, float]
    gain_per_s: dict[Cell, float]
    surely_fits: set[Cell]
    expected: dict[Cell, float]
    sure: dict[Cell, float]


@dataclass(frozen=True)
class _Curve:
    weight: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    def at(self, sds: float) -> np.ndarray:
        return self.weight @ (self.mean + sds * self.sd)


def _beside(cell: Cell, view: _View) -> bool:
    pick, most = view.pick.cell, view.sure[cell] / view.pick.tok_s
    if cell.length == pick.length:
        axis = sorted({c.batch for c in view.cells if c.length == pick.length})
        if ENDS and most > 1 - FAR and cell.batch == max(c.batch for c in view.cells if c.length == pick.length and c not in view.hopeless):
            return True
        return abs(axis.index(cell.batch) - axis.index(pick.batch)) == 1
    if cell.batch == pick.batch and most > 1 - FAR:
        axis = sorted({c.length for c in view.cells if c.batch == pick.batch})
        return abs(axis.index(cell.length) - axis.index(pick.length)) == 1
    return False


def _decides(cell, view):
    return view.most_tok_s[cell] > (1 + NEAR) * view.pick.tok_s or _beside(cell, view)


def _needs(cell: Cell) -> tuple[int, int]:
    return cell.step.tokens, cell.batch


def _name(cell: Cell) -> str:
    return f"B={cell.batch} L={cell.length}"


def _spilled_unseen(record: Record, fits: Iterable[Record]) -> bool:
    def flops(r: Record) -> int:
        return r.model.flops_per_token(r.cell.length)
    return can_spill(record) and any(
        r.cell.within(record.cell) and record.tok_s * FALL * (flops(record) / flops(r))**2 < r.tok_s for r in fits)


def _survey(cells, known, limit_bytes, predict) -> _View:
    every = list(dict.fromkeys([*cells, *known]))
    at = {c: i for i, c in enumerate(every)}
    pick = best((known[c] for c in cells if c in known), limit_bytes)
    fits = [r for r in known.values() if r.status == "fits"]
    spilled = [r for r in fits if _spilled_unseen(r, fits)]
    fits = [r for r in fits if r not in spilled]
    failed = [r for r in known.values() if r.status in FAILED] + spilled
    peak = _peaks(every, at, fits, failed, limit_bytes, predict)
    hopeless, chance = _hopeless(every, at, known, failed, limit_bytes, peak, pick)
    if pick is None:
        return _View(cells, pick, hopeless, {}, {}, set(), {}, {})
    time = _times(every, at, fits)
    log_tokens = np.log([c.step.tokens for c in every])
    most = np.exp(log_tokens - time.at(-OPTIMISM))
    ahead = (log_tokens - time.mean - math.log(pick.tok_s)) / time.sd
    gain = time.weight @ (time.sd * (np.exp(-ahead**2 / 2) / math.sqrt(2 * math.pi) + ahead * _normal(ahead)))
    cost_s = np.median([r.setup_s or 0 for r in fits]) + 1 + STEPS * np.exp(time.at(0))
    sure = set()
    if peak is not None and limit_bytes:
        sure = {c for c, top in zip(every, peak.at(DOUBT), strict=True) if top < math.log(limit_bytes)}
    return _View(cells, pick, hopeless, dict(zip(every, most.tolist(), strict=True)),
                 dict(zip(every, (gain * chance / cost_s).tolist(), strict=True)), sure,
                 dict(zip(every, np.exp(log_tokens - time.at(0)).tolist(), strict=True)), dict(zip(every, np.exp(log_tokens - time.at(-SURE)).tolist(), strict=True)))


def _hopeless(every, at, known, failed, limit_bytes, peak, pick):
    reasons = {}
    chance = np.ones(len(every))
    todo = [c for c in every if c not in known]
    for r in known.values():
        over = limit_bytes and (r.peak_bytes or 0) > limit_bytes
        if r.status == "timeout" or (pick is None or peak is None) and (r in failed or over):
            words = f"took {format_bytes(r.peak_bytes)}" if r.status == "fits" else f"ended in {r.status}"
            reasons |= {c: f"the smaller {_name(r.cell)} {words}" for c in todo if r.cell.within(c)}
    if peak is None:
        return reasons, chance
    mean, sd = peak.at(0), peak.at(1) - peak.at(0)
    bounds = [(math.log(limit_bytes), 0.0, f"is over the {format_bytes(limit_bytes)} limit")] if limit_bytes else []
    bounds += [(mean[at[r.cell]], sd[at[r.cell]],
                f"is over {format_bytes(math.exp(mean[at[r.cell]]))}, with which {_name(r.cell)} ended in {r.status}")
               for r in failed]
    if not bounds:
        return reasons, chance
    bound, doubt, words = min(bounds)
    sd = np.sqrt(sd**2 + doubt**2 + (MARGIN / DOUBT)**2)
    reasons = {c: f"predicted {format_bytes(math.exp(mean[at[c]]))} {words}" for c in todo
               if mean[at[c]] - bound > DOUBT * sd[at[c]]} | reasons
    most = max((mean[at[c]] for c, r in known.items() if r.status == "fits"), default=bound)
    room = np.linspace(min(most, bound), bound, 9) if doubt else np.array([bound])
    chance = _normal((room[:, None] - mean) / sd).mean(0)
    for c in todo:
        if sum((GLOBAL or r.cell.length == c.length) and mean[at[r.cell]] <= mean[at[c]] for r in failed) >= TRIES:
            reasons.setdefault(c, f"{TRIES} cells of this length that need no more memory failed")
    return reasons, chance


def _times(every, at, fits) -> _Curve:
    tokens = np.array([c.step.tokens for c in every], float)
    length = np.array([c.length for c in every], float)
    step_s = np.array([r.median_step_s for r in fits])
    seen = [at[r.cell] for r in fits]
    model = fits[0].model
    attention = 1.7 * (model.flops_per_token(1024) / model.flops_per_token(0) - 1) / 1024

    def log_step_s(logs):
        floor, fixed, per_token, attention = np.exp(logs)
        return np.log(floor**POWER + (fixed + per_token * tokens * (1 + attention * length))**POWER) / POWER
    center = np.log([step_s.min(), 0.3 * step_s.min(), (step_s / tokens[seen]).min(), attention])
    return _curve(log_step_s, center, np.array(SPREAD), every, seen, np.log(step_s), NOISE)


def _peaks(every, at, fits, failed, limit_bytes, predict) -> _Curve | None:
    fits = [r for r in fits if r.peak_bytes]
    needs = np.array([predict(c) or math.nan for c in every])
    if not np.isnan(needs).any():
        center, spread = np.log([0.05 * needs.min(), 0.95]), np.array([1.0, 0.15])
    elif fits:
        needs = np.array([c.step.tokens for c in every], float)
        least = min(fits, key=lambda r: r.peak_bytes)
        center = np.log([0.8 * least.peak_bytes, 0.2 * least.peak_bytes / least.cell.step.tokens])
        spread = np.array([0.7, 1.5])
    else:
        return None

    def log_peak(logs):
        return np.log(np.exp(logs[0]) + np.exp(logs[1]) * needs)
    seen, logs = [at[r.cell] for r in fits], [math.log(r.peak_bytes) for r in fits]
    curve = _curve(log_peak, center, spread, every, seen, np.array(logs), PEAK_NOISE)
    expected = curve.at(0)
    least = {at[r.cell]: math.log(max(limit_bytes or 1, r.peak_bytes or 1)) for r in failed}
    more = [i for i, value in least.items() if expected[i] < value]
    if not more:
        return curve
    logs += [least[i] for i in more]
    return _curve(log_peak, center, spread, every, seen + more, np.array(logs), PEAK_NOISE)


def _curve(log_trend, center, spread, every, seen, logs, noise) -> _Curve:
    def slopes(at):
        here = log_trend(at)
        return here, np.stack([(log_trend(at + h) - here) / 1e-5 for h in 1e-5 * np.eye(len(at))], axis=1)

    best_fit = center
    for _ in range(20):
        here, slope = slopes(best_fit)
        pull = slope[seen].T @ (logs - here[seen]) / 0.03**2 + (center - best_fit) / spread**2
        stiff = slope[seen].T @ slope[seen] / 0.03**2 + np.diag(1 / spread**2)
        step = np.clip(np.linalg.solve(stiff, pull), -1, 1)
        best_fit = best_fit + step
        if np.abs(step).max() < 1e-3:
            break
    here, slope = slopes(best_fit)
    before = here + slope @ (center - best_fit)
    trend = (slope * spread**2) @ slope.T
    batch = np.array([c.batch for c in every])
    same = batch[:, None] == batch
    evidence, means, sds = [], [], []
    for rough, odds in ROUGHNESS.items():
        for shared, odds_shared in SHARED.items():
            prior = trend + rough**2 * (shared * same + (1 - shared) * np.eye(len(every)))
            root = np.linalg.cholesky(prior[np.ix_(seen, seen)] + noise**2 * np.eye(len(seen)))
            miss = np.linalg.solve(root, logs - before[seen])
            link = np.linalg.solve(root, prior[seen])
            evidence.append(math.log(odds * odds_shared) - miss @ miss / 2 - np.log(np.diag(root)).sum())
            means.append(before + link.T @ miss)
            sds.append(np.sqrt(np.maximum(np.diag(prior) - (link**2).sum(0), 1e-8)))
    weight = np.exp(np.array(evidence) - max(evidence))
    return _Curve(weight / weight.sum(), np.array(means), np.array(sds))


def _normal(z: np.ndarray) -> np.ndarray:
    """The normal distribution's cumulative probability."""
    return 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def picks(records: Iterable[Record], limit_bytes: int | None) -> list[Record]:
    """Of each plane the pick, and the fastest of the longest length that comes near it: what a plan may take, and so what
    is worth measuring with accumulation."""
    found: dict[Cell, Record] = {}
    by_cell = {r.cell: r for r in records}
    for plane in planes(by_cell):
        within = [by_cell[c] for c in plane if best([by_cell[c]], limit_bytes)]
        if within:
            top = best(within, limit_bytes)
            longest = max((r for r in within if r.tok_s >= (1 - LONG) * top.tok_s), key=lambda r: (r.cell.length, r.tok_s))
            found |= {top.cell: top, longest.cell: longest}
    return list(found.values())
