"""Curves through few records: seconds of a step and bytes of its peak over batch and length, with how sure they are. Pure.

What a trend misses is roughness (batches quantised by the hardware, bumps of an allocator): independent from cell to cell,
in part shared by the cells of one batch. How rough a card is isn't assumed but weighed: each roughness has a curve of its
own, and the records say how much each is believed (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.7 and
5.4). All values are logarithms, so that a spread is a share.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from probe.cell import Cell
from probe.records import Record

ROUGHNESS = {0.0: 16, 0.01: 8, 0.02: 4, 0.04: 2, 0.08: 1, 0.16: 0.5}
"""Standard deviations that are weighed, and the odds of each beforehand: an assumption, that smooth cards are commoner."""
SHARED = {0.1: 1, 0.5: 1, 0.9: 4}
"""Parts of it that the cells of one batch share, and their odds: assumed, since waves come with the batch."""
TIME_NOISE, PEAK_NOISE = 0.006, 0.01
"""Assumed of a measured median, beside its own unrest, and of a peak; large cells of an H200 came back within 0.1% from
run to run."""
TRUST = 0.03
"""How near to the records the trend is drawn before roughness is weighed."""
SHARPNESS, EXACT_SHARPNESS = 4, 16
"""How sharply a step's time bends from the launch floor to the work, for a search and for a cost model: where they are equal
it is 19% and 4% above them. The next step is launched while this one runs, so that the longer hides the shorter."""


@dataclass(frozen=True)
class Surrogate:
    """A mixture of normal distributions of the logarithm at each cell: `weight` (curves), `mean`, `sd` (curves, cells);
    `rough` is how far cells lie off the trend, a standard deviation in shares, as the records have it."""

    weight: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    rough: float

    def at(self, sds: float) -> np.ndarray:
        """The logarithm so many standard deviations from what is expected, one value a cell."""
        return self.weight @ (self.mean + sds * self.sd)

    def spread(self) -> np.ndarray:
        """The standard deviation of the logarithm at each cell, the curves' own and how far they are apart."""
        return np.sqrt(self.weight @ (self.sd**2 + (self.mean - self.weight @ self.mean)**2))


def step_times(cells: Sequence[Cell], fits: Sequence[Record], exact: bool = False) -> Surrogate:
    """log seconds of a step: the launch floor, or fixed + per_token x tokens x (1 + attention x length), and if `exact` a
    part of the length whatever the batch: a few long sequences leave a card half empty. With that and the sharper bend 8
    cells of an H200's 30 missed the others by 1.9% in the mean, without by 5.4%; but a search by it lost over 1% of tok/s
    on 9 of 360 made-up grids instead of 2."""
    tokens = np.array([c.step.tokens for c in cells], float)
    length = np.array([c.length for c in cells], float)
    step_s = np.array([r.median_step_s for r in fits])
    rows = [cells.index(r.cell) for r in fits]
    model = fits[0].model
    # attention's operations count 1.7 times: torch's fp32 kernel runs at 30 of an H200's 51 TFLOP/s; of somebody's own
    # step nothing is known, and a third more at 1024 is a guess that its records correct
    attention = 1.7 * (model.flops_per_token(1024) / model.flops_per_token(0) - 1) / 1024 if model else 0.3 / 1024

    def log_step_s(logs: np.ndarray) -> np.ndarray:
        floor, fixed, per_token, attention, *serial = np.exp(logs)
        work = fixed + per_token * tokens * (1 + attention * length) + sum(serial) * length
        return np.logaddexp(sharpness * np.log(floor), sharpness * np.log(work)) / sharpness

    sharpness = EXACT_SHARPNESS if exact else SHARPNESS
    center = [step_s.min(), 0.3 * step_s.min(), (step_s / tokens[rows]).min(), attention]
    spread = [1.0, 1.5, 1.5, 0.7]
    if exact:
        center.append(0.1 * step_s.min() / length.min())
        spread.append(1.5)
    noise = np.array([math.hypot(TIME_NOISE, _unrest(r.step_s) if exact else 0) for r in fits])
    return _fit(log_step_s, np.log(center), np.array(spread), cells, rows, np.log(step_s), noise)


def _unrest(step_s: Sequence[float]) -> float:
    """How far the median of raw times may lie above what the step takes by itself, as a share: its distance from their
    tenth percentile. Where the host disturbed an H200's steps that was 8%, elsewhere 0.1%."""
    ordered = sorted(step_s)
    return 1 - ordered[len(ordered) // 10] / ordered[len(ordered) // 2]


def peaks(cells: Sequence[Cell], fits: Sequence[Record], at_least: dict[Cell, int],
          predicted: Sequence[int | None]) -> Surrogate | None:
    """log bytes of the peak: static + a share of what was `predicted`, or of the tokens where that is unknown; None if
    neither tells anything. `at_least` has bytes that failed cells need more of."""
    measured = {r.cell: r.peak_bytes for r in fits if r.peak_bytes}
    needed = [size for size in predicted if size is not None]
    if len(needed) == len(predicted):
        needs = np.array(needed, float)
        center, spread = np.log([0.05 * needs.min(), 0.95]), np.array([1.0, 0.15])
    elif measured:
        needs = np.array([c.step.tokens for c in cells], float)
        least = min(measured, key=measured.__getitem__)
        center = np.log([0.8 * measured[least], 0.2 * measured[least] / least.step.tokens])
        spread = np.array([0.7, 1.5])
    else:
        return None

    def log_peak(logs: np.ndarray) -> np.ndarray:
        return np.log(np.exp(logs[0]) + np.exp(logs[1]) * needs)
    rows, logs = [cells.index(cell) for cell in measured], [math.log(size) for size in measured.values()]
    curve = _fit(log_peak, center, spread, cells, rows, np.array(logs), np.full(len(rows), PEAK_NOISE))
    expected = curve.at(0)
    short = {cells.index(c): math.log(size) for c, size in at_least.items() if expected[cells.index(c)] < math.log(size)}
    if not short:
        return curve
    rows = [*rows, *short]
    return _fit(log_peak, center, spread, cells, rows, np.array([*logs, *short.values()]), np.full(len(rows), PEAK_NOISE))


def _fit(log_trend: Callable[[np.ndarray], np.ndarray], center: np.ndarray, spread: np.ndarray, cells: Sequence[Cell],
         rows: list[int], logs: np.ndarray, noise: np.ndarray) -> Surrogate:
    """The trend's parameters start as `center` with standard deviations `spread`, all logarithms; `logs` are the values of
    the cells `rows`, each with a `noise` of its own. The trend is made straight where it fits best, and then everything is
    normal."""
    def slopes(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        here = log_trend(at)
        return here, np.stack([(log_trend(at + h) - here) / 1e-5 for h in 1e-5 * np.eye(len(at))], axis=1)

    fitted = center
    for _ in range(20):
        here, slope = slopes(fitted)
        weighed = slope[rows].T / (TRUST**2 + noise**2)
        pull = weighed @ (logs - here[rows]) + (center - fitted) / spread**2
        stiff = weighed @ slope[rows] + np.diag(1 / spread**2)
        step = np.clip(np.linalg.solve(stiff, pull), -1, 1)
        fitted = fitted + step
        if np.abs(step).max() < 1e-3:
            break
    here, slope = slopes(fitted)
    before = here + slope @ (center - fitted)
    trend = (slope * spread**2) @ slope.T
    batch = np.array([c.batch for c in cells])
    same = batch[:, None] == batch
    evidence, means, sds, roughs = [], [], [], []
    for rough, odds in ROUGHNESS.items():
        for shared, odds_shared in SHARED.items():
            prior = trend + rough**2 * (shared * same + (1 - shared) * np.eye(len(cells)))
            root = np.linalg.cholesky(prior[np.ix_(rows, rows)] + np.diag(noise**2))
            miss = np.linalg.solve(root, logs - before[rows])
            link = np.linalg.solve(root, prior[rows])
            evidence.append(math.log(odds * odds_shared) - miss @ miss / 2 - np.log(np.diag(root)).sum())
            roughs.append(rough)
            means.append(before + link.T @ miss)
            sds.append(np.sqrt(np.maximum(np.diag(prior) - (link**2).sum(0), 1e-8)))
    weight = np.exp(np.array(evidence) - max(evidence))
    weight /= weight.sum()
    return Surrogate(weight, np.array(means), np.array(sds), float(weight @ roughs))
