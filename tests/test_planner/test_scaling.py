"""What several devices would do is assumed from one: each its part of a micro-step, and then the exchange of gradients."""

import pytest
from helpers.made import make_record, there

from planner.decide.scaling import assumption, exchange_s, scaled_records

ONE = make_record(4, 512, tok_s=1000, peak=4e9, reserved_peak_bytes=3_500_000_000)
GRADIENT_BYTES = 4 * there(ONE.model).parameters


@pytest.mark.parametrize(("count", "share"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_each_sends_and_receives_its_part_of_the_gradients_twice(count, share):
    """A ring of N passes 2 (N - 1) / N of them, by 6 GB a second."""
    assert exchange_s(ONE, count) == pytest.approx(share * GRADIENT_BYTES / 6e9)


def test_two_do_twice_the_batch_in_the_time_of_one_and_the_exchange():
    (two,) = scaled_records([ONE], 2)
    assert two.device == f"{ONE.device}-x2"
    assert (two.cell.batch, two.cell.length) == (8, 512)
    assert two.step_s == pytest.approx([t + exchange_s(ONE, 2) for t in ONE.step_s])
    assert two.device_peak_bytes == 4e9 + GRADIENT_BYTES
    assert two.reserved_peak_bytes == 3.5e9 + GRADIENT_BYTES
    assert two.allocated_peak_bytes is None


def test_what_can_not_be_shared_out_so_is_left_out():
    """An update in the backward pass comes before the gradients could be exchanged."""
    backward = make_record(4, 512, cell=ONE.cell.with_step(update="backward"))
    assert scaled_records([backward], 2) == []


def test_the_assumption_is_said_with_its_figures():
    line = assumption(ONE, 2)
    for words in ("2 devices were not measured together", "6 GB/s", "probe grid --model 150M --nproc 2"):
        assert words in line
