"""From raw times to hours and their bands: the numbers that a band is made of, each by itself."""

import math

import pytest
from helpers.made import make_record

from planner.decide.choose import Candidate
from planner.decide.hours import Overheads, Rates, peak_span, run_hours, run_overheads, step_span
from trainer.plan import Span

ELEVEN = tuple(1 + 0.1 * i for i in range(11))
"""1.0 to 2.0 s, whose tenth percentile is 1.1, median 1.5 and ninetieth 1.9."""


def candidate(step_s):
    return Candidate(make_record(step_s=step_s), 1)


def test_a_step_s_band_reaches_from_its_tenth_to_its_ninetieth_percentile():
    """The extremes are single steps, which a run of thousands does not take."""
    span = step_span(candidate(ELEVEN))
    assert (span.low, span.mid, span.high) == pytest.approx((1.1, 1.5, 1.9))


def test_the_order_of_the_times_does_not_matter():
    assert step_span(candidate(ELEVEN[::-1])) == step_span(candidate(ELEVEN))


def test_what_runs_differ_by_is_added_as_independent():
    """With a spread of the logarithm of 3 and one of 4 the band is 5 wide."""
    alone = step_span(candidate(ELEVEN), sd=0.0)
    with_runs = step_span(candidate(ELEVEN), sd=0.1)
    low, wide = math.log(alone.mid / alone.low), 1.645 * 0.1
    assert math.log(with_runs.mid / with_runs.low) == pytest.approx(math.sqrt(low**2 + wide**2))
    steady = step_span(candidate((1.0,) * 9), factor=1.1, sd=0.02)
    assert (steady.mid, math.log(steady.high / steady.mid)) == pytest.approx((1.1, 0.0329))


def test_steps_and_overheads_are_off_independently():
    """Of 1000 steps 300 s to either side; of the overheads 400 s."""
    total_s = 400 / (math.exp(1.645 * 0.15) - 1)
    span = run_hours(Span(9.7, 10.0, 10.3), 1000, Overheads(eval_s=total_s, checkpoint_s=None, start_up_s=None))
    assert (span.mid * 3600 - total_s) == pytest.approx(10_000)
    assert (span.high - span.mid) * 3600 == pytest.approx(500)
    assert (span.mid - span.low) * 3600 == pytest.approx(500)


def test_a_peak_s_band_is_one_percent_to_either_side():
    span = peak_span(candidate((1.0,)))
    assert (span.mid / span.low, span.high / span.mid) == pytest.approx((1.0099, 1.0099), abs=1e-4)


def test_the_first_step_is_not_counted_twice():
    """It is in what setting up took, and it is one of the steps."""
    overheads = run_overheads(Candidate(make_record(step_s=(2.0,) * 5, setup_s=4.5), 1), 1e6, 100, 10, Rates(start_up_s=5.0))
    assert overheads.start_up_s == pytest.approx(5.0 + 4.5 - 2.0)
