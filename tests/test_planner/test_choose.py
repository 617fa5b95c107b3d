"""The pick was run and fits, is the fastest worth its memory, and everything against it is said."""

import pytest
from helpers.made import make_cliff, make_record

from planner.decide.choose import TooLittleData, Wish, choose
from spillcliff.errors import NoPlan
from trainer.plan import training_windows

LIMIT = 5_000_000_000


def pick(records, wanted=2048, asked=False, length=None, limit=LIMIT):
    return choose(records, limit, Wish(wanted, asked, length))


def test_over_the_limit_is_rejected_with_the_number():
    choice = pick([make_record(4, tok_s=1000), make_record(8, tok_s=2000, peak=5.67e9)])
    assert choice.pick.step.batch == 4
    assert choice.rejected[0].cell["batch"] == 8
    assert choice.rejected[0].why == ["5.67 GB is over the 5.0 GB limit"]


def test_a_spill_is_rejected_even_where_the_record_says_that_it_fits():
    choice = pick([make_record(4, tok_s=2269), make_record(6, tok_s=1067, peak=4.9e9)])
    assert choice.pick.step.batch == 4
    assert "spilled" in choice.rejected[0].why[0]


def test_a_slow_cell_in_memory_that_was_found_fast_has_not_spilled():
    """An H200's host once made a small cell twice as slow; it has 147 GB."""
    records = [make_record(4, tok_s=2269), make_record(6, tok_s=1067, peak=4.9e9)]
    assert choose(records, LIMIT, Wish(2048), make_cliff("failure", 4.9e9, 5.0e9)).rejected == []
    assert choose(records, LIMIT, Wish(2048), make_cliff("collapse", 4.9e9, 5.0e9)).rejected != []


def test_cells_within_the_noise_of_the_pick_are_named():
    def noisy(batch, tok_s, peak):
        times = [batch * 512 / tok_s * x for x in (0.96, 0.98, 0.99, 1.0, 1.01, 1.02, 1.04)]
        return make_record(batch, 512, peak=peak, step_s=tuple(times))
    why = pick([noisy(4, 1000, 3e9), noisy(6, 1005, 4e9), noisy(8, 700, 4.5e9)]).why
    assert any(line.startswith("B=6 L=512: no slower and no faster") for line in why)
    exact = [make_record(b, 512, tok_s, p, step_s=(b * 512 / tok_s,) * 9)
             for b, tok_s, p in ((4, 1000, 3e9), (6, 1005, 4e9))]
    assert not any("noise" in line for line in pick(exact).why)


def test_a_measured_accumulation_is_not_made_up_from_another():
    records = [make_record(4, 512, accum=2, tok_s=1000), make_record(4, 512, accum=8, tok_s=1100)]
    assert pick(records, wanted=2 * 2048).pick.record.cell.accum == 2
    assert pick(records, wanted=6 * 2048).pick.record.cell.accum == 8


def test_ties_are_broken_the_same_way_whatever_the_order():
    records = [make_record(b, n, tok_s=1000, peak=3e9) for b, n in ((4, 512), (2, 512), (8, 512))]
    assert {pick(order).pick.step.batch for order in (records, records[::-1], records[1:] + records[:1])} == {2}


def test_a_larger_cell_that_fits_where_a_smaller_one_failed_is_reported():
    records = [make_record(4, tok_s=1000), make_record(6, tok_s=300, status="spills", why="moved"),
               make_record(8, tok_s=1100, peak=4.5e9)]
    choice = pick(records)
    assert choice.pick.step.batch == 8
    assert any("B=6 L=512 spills where the larger B=8 L=512 fits" in line for line in choice.why)
    assert not any("larger" in line for line in pick(records[:2]).why)


def test_runners_up_say_what_they_cost_and_save():
    choice = pick([make_record(8, tok_s=1000, peak=4.5e9), make_record(1, tok_s=500, peak=2e9)])
    (other,) = choice.runners_up
    assert other.hours_ratio == pytest.approx(2)
    assert other.saves_bytes == 2_500_000_000


def test_every_engine_and_recompute_option_is_compared():
    records = [make_record(4, tok_s=1000), make_record(4, tok_s=1300, engine="graph", peak=4.2e9),
               make_record(16, tok_s=1200, recompute="block", peak=3e9)]
    choice = pick(records)
    assert choice.pick.step.engine == "graph"
    assert len(choice.runners_up) == 2


@pytest.mark.parametrize("status", ["thrashes", "spills", "oom", "timeout", "crashed", "contended"])
def test_only_what_fits_is_picked(status):
    choice = pick([make_record(1, tok_s=10), make_record(4, tok_s=1e6, status=status, why="because")])
    assert choice.pick.step.batch == 1
    (rejected,) = choice.rejected
    assert (rejected.step.batch, rejected.why) == (4, [f"{status}: because"])


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
    assert choice.pick.step.accum == 1
    assert any("--accum 2" in line for line in choice.why)
    with_two = make_record(4, 512, accum=2, tok_s=1000, peak=4.5e9)
    choice = pick([plain, with_two], wanted=20_480)
    assert choice.pick.step.accum == 10
    assert choice.pick.record is with_two
    assert choice.pick.step_s == pytest.approx(10 * with_two.micro_s + with_two.optimizer_s)


def test_a_grid_of_accumulation_alone_is_planned_as_it_was_measured():
    choice = pick([make_record(4, 512, accum=2)], wanted=100)
    assert choice.pick.step.accum == 2


def test_heat_and_processors_are_not_called_spills():
    fast = make_record(4, tok_s=2269)
    for slow in (make_record(6, tok_s=1267, readings={"throttle": 0x40}), make_record(6, tok_s=1067, device="cpu-x")):
        assert not pick([fast, slow]).rejected
    assert pick([fast, make_record(6, tok_s=1067, readings={"throttle": 0x40})]).rejected  # more than heat costs


def test_a_fall_below_the_trend_is_rejected_though_the_record_says_that_it_fits():
    choice = pick([make_record(b, tok_s=t) for b, t in ((1, 500), (2, 980), (4, 1900), (8, 1440))])
    assert choice.pick.step.batch == 4
    assert "trend" in choice.rejected[0].why[0]


def test_a_cell_past_the_cliff_is_rejected_whatever_limit_is_asked_for():
    """It was measured before the cliff was, and a limit of 60 GB on a card of 6 excuses nothing."""
    records = [make_record(4, tok_s=2000), make_record(5, tok_s=2100, peak=5.5e9, reserved_peak_bytes=5_200_000_000)]
    choice = choose(records, 60 * 10**9, Wish(2048), make_cliff("collapse", 4.9e9, 5.0e9))
    assert choice.pick.step.batch == 4
    assert choice.rejected[0].why == ["5.2 GB reserved where this card's cliff is at 5.0 GB"]


def test_without_the_device_s_figure_the_context_counts_too():
    """Reserved alone is not the whole claim, which a limit is of."""
    records = [make_record(4, tok_s=2000, device_peak_bytes=None, reserved_peak_bytes=3_000_000_000),
               make_record(6, tok_s=2500, device_peak_bytes=None, reserved_peak_bytes=4_800_000_000)]
    choice = choose(records, LIMIT, Wish(2048), make_cliff("failure", 4.9e9, 5.0e9))
    assert choice.pick.step.batch == 4
    assert choice.rejected[0].why == ["5.1 GB is over the 5.0 GB limit"]


def test_where_nothing_tells_the_memory_the_limit_is_not_claimed_to_be_kept():
    why = pick([make_record(4, device_peak_bytes=None)], limit=500_000_000).why[0]
    assert "can't be read on this device" in why
    assert "-" not in why.split(":")[1].split("tok/s")[0]


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
    assert choice.runners_up[0].hours_ratio == pytest.approx(1.25)
    assert choice.runners_up[0].peak_bytes == 3e9


def test_tokens_that_were_asked_for_may_be_a_fifth_off_and_no_more():
    records = [make_record(4, 512)]
    for wanted in (1720, 2500):
        assert pick(records, wanted=wanted, asked=True).pick.step.tokens == 2048
    for wanted in (1650, 2700):
        with pytest.raises(NoPlan, match="tokens a step"):
            pick(records, wanted=wanted, asked=True)


def test_a_pick_with_four_fifths_of_the_tokens_is_not_told_to_lack_accumulation():
    def told(wanted):
        return any("no accumulation" in line for line in pick([make_record(4, 512)], wanted=wanted).why)
    assert not told(2048 / 0.81)
    assert told(2048 / 0.79)


@pytest.mark.parametrize(("wanted", "accum"), [(2048 * 3.4, 3), (2048 * 3.6, 4)])
def test_accumulation_is_the_whole_number_nearest_to_what_is_wanted(wanted, accum):
    assert pick([make_record(4, 512, accum=2)], wanted=int(wanted)).pick.step.accum == accum


def test_the_leanest_is_a_runner_up_however_slow_it_is():
    quick = [make_record(b, tok_s=1000 - b, peak=4e9) for b in range(2, 12)]
    leanest = make_record(1, tok_s=10, peak=1e9)
    batches = [r.step.batch for r in pick([*quick, leanest]).runners_up]
    assert len(batches) == 6
    assert batches[-1] == 1


def of_data(records, data, wanted=4096, asked=False, **wish):
    return choose(records, LIMIT, Wish(wanted, asked, data_tokens=data, **wish)).pick.step


def accumulating(accum=2, **other):
    return make_record(4, 64, accum=accum, tok_s=1000, **other)


@pytest.mark.parametrize(("data", "batch", "accum"), [
    (10_000, 4, 16), (3000, 4, 10), (900, 4, 3), (715, 4, 2), (650, 4, 2), (560, 4, 1), (400, 4, 1), (300, 2, 1)])
def test_a_step_is_made_no_larger_than_the_data(data, batch, accum):
    """Of accumulation first, down to a micro-step alone if that was measured, then of the batch."""
    records = [make_record(4, 64, tok_s=1000), accumulating(), make_record(2, 64, tok_s=500)]
    step = of_data(records, data)
    assert (step.batch, step.accum) == (batch, accum)
    assert step.sequences <= training_windows(data, step)


def test_a_micro_step_that_was_not_measured_alone_is_not_made_of_one_that_accumulates():
    assert of_data([accumulating(), make_record(2, 64, tok_s=500)], 400).batch == 2
    assert of_data([accumulating(micro_s=None), make_record(2, 64, tok_s=500)], 650).accum == 2


@pytest.mark.parametrize(("records", "data", "wish", "words"), [
    ([make_record(2, 512)], 300, {}, "300 tokens have 0 sequences of 512 to train on, and the smallest that was measured "
     "takes 2; give more text, or measure a smaller step: probe grid --model 150M --batch 1 --length 64"),
    ([make_record(4, 64), make_record(8, 64)], 300, {}, "takes 4; .* --batch 1 --length 64$"),
    ([make_record(4, 512)], 2000, {"length": 512}, "2 sequences of 512 .* takes 4; .* --batch 1 --length 512$"),
    ([make_record(2, 512)], 300, {"length": 512}, "give more text$"),
    ([make_record(2, 512)], 3, {}, "give more text$"),
    ([make_record(16, 64)], 900, {"wanted": 1024, "asked": True},
     "1,024 tokens a step take 16; ask for fewer --tokens-per-step"),
    ([accumulating()], 650, {"wanted": 1024, "asked": True}, "1,024 tokens a step take 16")])
def test_where_every_step_is_larger_than_the_data_it_is_said_what_would_do(records, data, wish, words):
    with pytest.raises(TooLittleData, match=words):
        print(of_data(records, data, **wish))


def test_pairs_are_whole_rows():
    records = [make_record(1, 64, tok_s=1000)]
    assert of_data(records, 128, are_pairs=True).batch == 1
    with pytest.raises(TooLittleData):
        of_data(records, 128)
