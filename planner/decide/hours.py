"""From a step's raw times to the hours of a corpus: pure."""

import math
from dataclasses import dataclass

from planner.decide.choose import Candidate
from trainer.checkpoint import STATE_BYTES
from trainer.plan import Span, eval_batches, times_due

OVERHEAD_SD = 0.15
"""How far the seconds beside the steps may be off, as the standard deviation of their logarithm: an assumption."""
PEAK_SD = 0.006
"""How far a run's peak may be off the measured one, likewise: an assumption, by which the band is 1% to either side."""
BAND_SD = 1.645
"""Standard deviations to either side that hold 90% of a normal distribution."""


@dataclass(frozen=True)
class Rates:
    """What a device does beside stepping, from device.json, or from past runs where there are any: seconds of starting
    Python and its libraries, bytes per second to the disk and from the card to new and to used host memory (None on a
    processor, which writes from where the tensors are). None where it was not measured."""

    start_up_s: float | None = None
    disk_write_bytes_s: float | None = None
    first_copy_bytes_s: float | None = None
    copy_bytes_s: float | None = None


@dataclass(frozen=True)
class Overheads:
    """What a run does beside stepping, in seconds; None where it was not measured, and then it is not counted."""

    eval_s: float | None
    checkpoint_s: float | None
    start_up_s: float | None

    @property
    def total_s(self) -> float:
        return sum(value or 0 for value in (self.eval_s, self.checkpoint_s, self.start_up_s))

    def missing(self) -> list[str]:
        return [name for name, value in (("evaluations", self.eval_s), ("checkpoints", self.checkpoint_s),
                                         ("start-up", self.start_up_s)) if value is None]


def step_span(candidate: Candidate, factor: float = 1.0, sd: float = 0.0) -> Span:
    """Seconds of a step: the median times `factor`, and a 90% band of the raw times' own spread (their tenth and ninetieth
    percentiles) and of `sd`, the standard deviation by which whole runs differ from their forecasts, in shares."""
    ordered = sorted(candidate.record.step_s)
    n, median_s = len(ordered), candidate.median_step_s
    below, above = (abs(math.log(ordered[round(part * (n - 1))] / median_s)) for part in (0.1, 0.9))
    mid = candidate.step_s * factor
    return Span(mid * math.exp(-math.hypot(below, BAND_SD * sd)), mid, mid * math.exp(math.hypot(above, BAND_SD * sd)))


def peak_span(candidate: Candidate) -> Span:
    """Bytes of the peak; 0 where none was measured."""
    peak, wide = candidate.record.peak_bytes or 0, math.exp(BAND_SD * PEAK_SD)
    return Span(peak / wide, peak, peak * wide)


def steps_for(tokens: float, tokens_per_step: int) -> int:
    """Whole steps that see at least `tokens`, as the trainer runs them."""
    return max(1, math.ceil(tokens / tokens_per_step))


def cadence(steps: int, step_s: float) -> int:
    """Steps between evaluations and between checkpoints: a tenth of the run, and no more than a quarter of an hour lost
    to a crash."""
    return max(1, min(math.ceil(steps / 10), round(900 / step_s)))


def run_overheads(candidate: Candidate, corpus_tokens: float, steps: int, every: int, rates: Rates) -> Overheads:
    """Seconds of all evaluations and checkpoints of a run, and of its start-up."""
    r, batches = candidate.record, eval_batches(int(corpus_tokens), candidate.step)
    evaluations = times_due(steps, every)
    # beside the libraries: weights and first kernels, less the first step, which is one of the steps
    setup_s = None if r.setup_s is None else max(0.0, r.setup_s - candidate.median_step_s)
    state_bytes = STATE_BYTES * candidate.model.parameters
    return Overheads(
        eval_s=None if r.eval_s is None else evaluations * batches * r.eval_s,
        checkpoint_s=_checkpoints(evaluations - 1, state_bytes, every * candidate.step_s, rates),
        start_up_s=None if setup_s is None or rates.start_up_s is None else rates.start_up_s + setup_s)


def _checkpoints(count: int, size: int, apart_s: float, rates: Rates) -> float | None:
    """Seconds that a run is held by `count` checkpoints of `size` bytes, `apart_s` from each other. From a card it waits
    for each copy, for a write that is not through when the next is due, and for the last one."""
    if not rates.disk_write_bytes_s:
        return None
    write_s = size / rates.disk_write_bytes_s
    if not rates.copy_bytes_s or not rates.first_copy_bytes_s:
        return count * write_s
    copies_s = size / rates.first_copy_bytes_s + (count - 1) * size / rates.copy_bytes_s
    return copies_s + (count - 1) * max(0.0, write_s - apart_s) + write_s


def run_hours(step_s: Span, steps: int, overheads: Overheads) -> Span:
    """Hours of a whole run, with a 90% band: steps and overheads are off independently."""
    mid, wide_s = steps * step_s.mid + overheads.total_s, overheads.total_s * (math.exp(BAND_SD * OVERHEAD_SD) - 1)
    low = mid - math.hypot(steps * (step_s.mid - step_s.low), wide_s)
    high = mid + math.hypot(steps * (step_s.high - step_s.mid), wide_s)
    return Span(low / 3600, mid / 3600, high / 3600)
