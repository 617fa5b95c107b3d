"""What a step costs over batch and length, from few records of one series: pure, and never what a plan is chosen by.

The form is probe.grid.surrogate's: seconds are the launch floor or, where that is more, fixed + a part of the length + a
part of the tokens + a part of tokens x length; bytes are a static part and a part of the tokens; no part is below zero.
Where records lie off that form, cells near them (of the same batch above all) are drawn along.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from probe.cell import Cell
from probe.grid import surrogate
from probe.records import WANT_OF_MEMORY, Record
from trainer.plan import Span

PARTS = 4
"""Parts of the form that records have to tell: what they have beyond that tells how sure it is."""
FEWEST = 3
"""Records below which there is no form to fit."""
DOUBT, DOUBTED = 3, 1.6
"""Records' worth of doubt in the fit's own intervals, and the square of what they are then multiplied by, before leaving
records out shows how wide they should be: an assumption, by which the bands of made-up smooth cards hold 90%."""
BEYOND = 0.10
"""Standard deviation that is added for each doubling beyond what was measured: an assumption."""
LEFT_OUT = 16
"""Most records that are left out in turn: each takes a fit, of 40 ms for 120 records."""
ROUGH = 0.03
"""Roughness from which on the form is said not to hold."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and bytes of its peak, each with a 90% band; `peak_bytes` None where no peak is known. `note` says
    what weakens it, "" if nothing does."""

    step_s: Span
    peak_bytes: Span | None
    note: str


class CostModel:
    """Fitted to the records of one series; ValueError if fewer than FEWEST of them fit."""

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        self.fits = [r for r in records if r.status == "fits"]
        self.failed = [r.cell for r in records if r.status in WANT_OF_MEMORY]
        if len(self.fits) < FEWEST:
            raise ValueError(f"{len(self.fits)} records that fit; {FEWEST} are needed")
        cells = [r.cell for r in self.fits]
        self.rough = _times(cells, self.fits)[2]
        misses = []
        for i in range(0, len(self.fits), -(-len(self.fits) // LEFT_OUT)):
            record = self.fits[i]
            rest = self.fits[:i] + self.fits[i + 1:]
            if len(rest) >= FEWEST and record.median_step_s:
                logs, sds, _ = _times(cells, rest)
                misses.append((math.log(record.median_step_s) - logs[i]) / (sds[i] + BEYOND * _beyond(record.cell, rest)))
        self.scale = math.sqrt((DOUBT * DOUBTED + sum(z * z for z in misses)) / (DOUBT + len(misses)))
        """By how much leaving each record out showed the fit's intervals to be too narrow (or wide)."""

    def note(self) -> str:
        """What is to be said of the whole fit; "" if nothing."""
        if self.rough < ROUGH:
            return ""
        return (f"step times lie {self.rough:.0%} off any smooth form (a sawtooth over the batch, or noise): what was not "
                f"measured is interpolated between its neighbours")

    def predict(self, cells: Sequence[Cell]) -> list[Prediction | None]:
        """One prediction a cell; None past the cliff, where a smaller cell or this one failed: no form holds there."""
        cells = list(cells)
        every = list(dict.fromkeys([*cells, *(r.cell for r in self.fits)]))
        logs, sds, _ = _times(every, self.fits)
        peaks = surrogate.peaks(every, self.fits, {}, [None] * len(every))
        wide = band_sds(len(self.fits) - PARTS)
        predictions: list[Prediction | None] = []
        for cell in cells:
            i = every.index(cell)
            if any(failed.within(cell) for failed in self.failed):
                predictions.append(None)
                continue
            beyond = _beyond(cell, self.fits)
            sd = self.scale * (sds[i] + BEYOND * beyond)
            peak = None
            if peaks:
                peak = _span(peaks.at(0)[i], wide * (peaks.spread()[i] + BEYOND * beyond))
            predictions.append(Prediction(_span(logs[i], wide * sd), peak, "outside what was measured" if beyond else ""))
        return predictions


def _times(cells: list[Cell], fits: list[Record]) -> tuple[np.ndarray, np.ndarray, float]:
    """(log seconds, their standard deviations, roughness), one value a cell."""
    fitted = surrogate.step_times(cells, fits, exact=True)
    return fitted.at(0), fitted.spread(), fitted.rough


def band_sds(freedom: int) -> float:
    """Standard deviations to either side that hold 90% of Student's t with so many degrees of freedom, at least 2
    (Abramowitz and Stegun, 26.7.5): 2.1 with 4, towards 1.645 with many."""
    z, n = 1.645, max(2, freedom)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def _span(log: float, wide: float) -> Span:
    return Span(math.exp(log - wide), math.exp(log), math.exp(log + wide))


def _beyond(cell: Cell, fits: Sequence[Record]) -> float:
    """Doublings that a cell lies outside the tokens and the lengths of `fits`; 0 within."""
    total = 0.0
    for value, measured in ((cell.step.micro_tokens, [r.cell.step.micro_tokens for r in fits]),
                            (cell.length, [r.cell.length for r in fits])):
        total += max(0.0, math.log2(value / max(measured)), math.log2(min(measured) / value))
    return total
