"""The pick was run and fits, is the fastest worth its memory, and everything against it is said."""

import pytest
from conftest import make_record

from planner.choose import choose
from trainer.errors import NoPlan

LIMIT = 5_000_000_000


def pick(records, wanted=2048, asked=False, length=None, limit=LIMIT):
    return choose(records, limit, wanted, asked, length)


def test_over_the_limit_is_rejected_with_the_number():
    choice = pick([make_record(4, tok_s=1000), make_record(8, tok_s=2000, peak=5.67e9)])
    assert choice.pick.step.batch == 4
    assert choice.rejected[0]["cell"]["batch"] == 8 and choice.rejected[0]["why"] == ["5.67 GB is over the 5.0 GB limit"]


def test_a_spill_is_rejected_even_where_the_record_says_that_it_fits():
    choice = pick([make_record(4, tok_s=2269), make_record(6, tok_s=1067, peak=4.9e9)])
    assert choice.pick.step.batch == 4 and "spilled" in choice.rejected[0]["why"][0]


@pytest.mark.parametrize("status", ["thrashes", "spills", "oom", "timeout", "crashed", "contended"])
def test_only_what_fits_is_picked(status):
    choice = pick([make_record(1, tok_s=10), make_record(4, tok_s=1e6, status=status, why="because")])
    assert choice.pick.step.batch == 1
    assert choice.rejected == [{"cell": choice.rejected[0]["cell"], "why": [f"{status}: because"]}]


def test_near_the_fastest_the_leanest_is_taken():
    records = [make_record(4, tok_s=990, peak=3e9), make_record(8, tok_s=1000, peak=4e9),
               make_record(2, tok_s=900, peak=2e9)]
    assert pick(records).pick.step.batch == 4
    assert pick([*records[1:], make_record(4, tok_s=970, peak=3e9)]).pick.step.batch == 8


def test_the_longest_length_near_the_fastest_is_taken_unless_one_is_asked_for():
    records = [make_record(8, 256, tok_s=1000), make_record(4, 512, tok_s=960), make_record(2, 1024, tok_s=900)]
    assert pick(records).pick.step.length == 512
    assert pick(records, length=1024).pick.step.length == 1024
    with pytest.raises(NoPlan, match="256, 512, 1024"):
        pick(records, length=2048)


def test_accumulation_only_where_it_was_measured():
    plain = make_record(4, 512)
    choice = pick([plain], wanted=20_480)
    assert choice.pick.step.accum == 1 and any("--accum 2" in line for line in choice.why)
    with_two = make_record(4, 512, accum=2, tok_s=1000, peak=4.5e9)
    choice = pick([plain, with_two], wanted=20_480)
    assert choice.pick.step.accum == 10 and choice.pick.record is with_two
    assert choice.pick.step_s == pytest.approx(10 * with_two.micro_s + with_two.optimizer_s)


def test_a_grid_of_accumulation_alone_is_planned_as_it_was_measured():
    choice = pick([make_record(4, 512, accum=2)], wanted=100)
    assert choice.pick.step.accum == 2


def test_heat_and_processors_are_not_called_spills():
    fast = make_record(4, tok_s=2269)
    for slow in (make_record(6, tok_s=1067, readings={"throttle": 0x40}), make_record(6, tok_s=1067, device="cpu-x")):
        assert not pick([fast, slow]).rejected


def test_accumulation_that_does_not_fit_is_not_planned():
    choice = pick([make_record(4, 512), make_record(4, 512, accum=2, peak=6e9)], wanted=20_480)
    assert choice.pick.step.accum == 1


def test_tokens_per_step_that_were_asked_for_are_kept_or_refused():
    records = [make_record(4, 512), make_record(8, 512)]
    assert pick(records, wanted=2048, asked=True).pick.step.batch == 4
    with pytest.raises(NoPlan, match="--accum 2"):
        pick(records, wanted=65_536, asked=True)


def test_nothing_fits_says_the_smallest_and_what_to_try():
    with pytest.raises(NoPlan, match=r"B=1 L=512: 6.0 GB is over the 5.0 GB limit.*--recompute block"):
        pick([make_record(1, peak=6e9), make_record(2, peak=7e9)])


def test_the_newest_record_counts():
    assert pick([make_record(4, tok_s=5000), make_record(8, tok_s=2000), make_record(4, tok_s=1000)]).pick.step.batch == 8


def test_runners_up_say_what_they_would_cost():
    choice = pick([make_record(4, tok_s=1000, peak=4e9), make_record(2, tok_s=800, peak=3e9)])
    assert choice.runners_up[0]["hours_ratio"] == pytest.approx(1.25) and choice.runners_up[0]["peak_bytes"] == 3e9
