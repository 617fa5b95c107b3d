"""From a step's raw times to the hours of a corpus: pure."""

import math
from dataclasses import dataclass

from planner.choose import Candidate
from trainer.plan import Span, eval_batches, times_due


@dataclass(frozen=True)
class Overheads:
    """What a run does beside stepping, in seconds; None where it was not measured, and then it is not counted."""

    eval_s: float | None
    checkpoint_s: float | None
    start_up_s: float | None

    def missing(self) -> list[str]:
        return [name for name, value in (("evaluations", self.eval_s), ("checkpoints", self.checkpoint_s),
                                         ("start-up", self.start_up_s)) if value is None]


def step_span(candidate: Candidate) -> Span:
    """Seconds of a step: the median, and the tenth and ninetieth percentile of the raw times around it."""
    ordered = sorted(candidate.record.step_s)
    n, mid = len(ordered), candidate.record.median_step_s
    ratio = candidate.step_s / mid
    low, high = ordered[round(0.1 * (n - 1))], ordered[round(0.9 * (n - 1))]
    return Span(min(low, mid) * ratio, mid * ratio, max(high, mid) * ratio)


def steps_for(tokens: float, tokens_per_step: int) -> int:
    """Whole steps that see at least `tokens`, as the trainer runs them."""
    return max(1, math.ceil(tokens / tokens_per_step))


def cadence(steps: int, step_s: float) -> int:
    """Steps between evaluations and between checkpoints: a tenth of the run, and no more than a quarter of an hour lost
    to a crash."""
    return max(1, min(math.ceil(steps / 10), round(900 / step_s)))


def overheads(candidate: Candidate, corpus_tokens: float, steps: int, every: int, disk_bytes_s: float | None,
              start_up_s: float | None) -> Overheads:
    """Seconds of all evaluations and checkpoints of a run, and of its start-up."""
    r, batches = candidate.record, eval_batches(int(corpus_tokens), candidate.step)
    evaluations = times_due(steps, every)
    checkpoints = evaluations - 1
    # weights and two moments; the gradients are not kept
    size = 12 * r.model.parameters
    return Overheads(
        eval_s=None if r.eval_s is None else evaluations * batches * r.eval_s,
        checkpoint_s=None if not disk_bytes_s else checkpoints * size / disk_bytes_s,
        start_up_s=None if r.setup_s is None or start_up_s is None else start_up_s + r.setup_s)


def hours(step_s: Span, steps: int, extra: Overheads) -> Span:
    """Hours of a whole run."""
    more = sum(value or 0 for value in (extra.eval_s, extra.checkpoint_s, extra.start_up_s))
    return Span(*((steps * s + more) / 3600 for s in (step_s.low, step_s.mid, step_s.high)))
