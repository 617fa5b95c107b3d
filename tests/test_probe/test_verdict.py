"""What an attempt means: an error is read for its kind, and a spill is found without one."""

import json
from typing import Any

import pytest
from helpers.made import SAMPLES, make_cliff, make_record

from probe.cell import Cell
from probe.cliff import default_limit
from probe.outcome import CellProgress, Outcome
from probe.records import Measurement
from probe.verdict import Card, Verdict, judge, slow_step_s, stuck_reason
from spillcliff.errors import is_out_of_memory

MEMORY = json.loads((SAMPLES / "memory.json").read_text())
CELL = Cell.of("150M", 4, 512)
GIB = 2**30
CARD = Card(6 * GIB, True)
CellOutcome = Outcome[Measurement, CellProgress]
HOST = Card(None, False)


def measured(step_s: float | tuple[float, ...] = 0.9, **other: Any) -> CellOutcome:
    """A cell that was measured to its end."""
    times = step_s if isinstance(step_s, tuple) else (step_s,) * 5
    values: dict[str, Any] = {"step_s": times, "reserved_peak_bytes": 4 * GIB}
    return Outcome(answer=Measurement(**(values | other)))


def ended(progress: Measurement | None = None, **how: Any) -> CellOutcome:
    """A cell whose process ended without an answer, after it had told `progress`."""
    return Outcome(progress=None if progress is None else CellProgress(False, progress), **how)


@pytest.mark.parametrize(("kind", "text"), MEMORY["out_of_memory"])
def test_failures_to_allocate_are_known_by_kind_and_text(kind, text):
    assert is_out_of_memory(kind, text)
    assert judge(ended(error=(kind, text)), CELL, CARD, [])[0] == "oom"


@pytest.mark.parametrize(("kind", "text"), MEMORY["not_out_of_memory"])
def test_other_failures_are_crashes_with_their_text(kind, text):
    status, why = judge(ended(error=(kind, text)), CELL, CARD, [])
    assert status == "crashed"
    assert text in why


def test_a_step_that_ran_fits():
    assert judge(measured(), CELL, CARD, []) == ("fits", "")


@pytest.mark.parametrize("gib", MEMORY["reserved_over_total"]["reserved_gib"])
def test_more_reserved_than_the_card_has_is_a_spill(gib):
    outcome = measured(reserved_peak_bytes=int(gib * GIB))
    status, why = judge(outcome, CELL, Card(8 * GIB, True), [])
    assert status == "spills"
    assert "reserved" in why


def test_more_than_the_card_has_was_a_spill_before_it_failed():
    """iPASSR issue 9: 17.20 GiB allocated and 19.15 reserved on a card of 8, and then an error."""
    both = Measurement(allocated_peak_bytes=int(17.20 * GIB), reserved_peak_bytes=int(19.15 * GIB))
    for known in (both, Measurement(allocated_peak_bytes=both.allocated_peak_bytes)):
        failed = ended(known, error=("OutOfMemoryError", "CUDA out of memory."))
        status, why = judge(failed, CELL, Card(8 * GIB, True), [])
        assert status == "spills"
        assert why.startswith("spilled before it failed: ")
    assert judge(ended(both, error=("OutOfMemoryError", "")), CELL, Card(24 * GIB, True), [])[0] == "oom"


def test_throughput_that_falls_while_the_batch_grows_is_a_spill():
    """The first user's card: 5.67 GB is below its total, and no error came."""
    case = MEMORY["throughput_fell"]
    smaller = make_record(case["batch"][0], tok_s=case["tok_s"][0])
    outcome = measured(case["batch"][1] * 512 / case["tok_s"][1])
    status, why = judge(outcome, Cell.of("150M", 6, 512), CARD, [smaller])
    assert status == "spills"
    assert "slower than the smaller batch" in why


@pytest.mark.parametrize("case", MEMORY["slower_at_the_cap"])
def test_a_quarter_of_a_gigabyte_past_the_cap_is_enough(case):
    smaller = make_record(case["batch"] - 1, tok_s=(case["batch"] - 1) * 512 / case["uncapped_step_s"])
    assert judge(measured(case["step_s"]), Cell.of("150M", case["batch"], 512), CARD, [smaller])[0] == "spills"


def test_heat_is_no_spill_nor_is_a_processor():
    smaller = make_record(1, tok_s=4000)
    slow = measured(4 * 512 / 1000)
    assert judge(slow, CELL, CARD, [smaller])[0] == "spills"
    for bit in (0x4, 0x8, 0x20, 0x40, 0x80):
        hot = measured(4 * 512 / 1000, readings={"throttle": bit})
        assert judge(hot, CELL, CARD, [smaller])[0] == "fits"
    idle = measured(4 * 512 / 1000, readings={"throttle": 0x1})
    assert judge(idle, CELL, CARD, [smaller])[0] == "spills"
    assert judge(slow, CELL, HOST, [smaller])[0] == "fits"


def test_a_longer_length_is_excused_for_its_attention_and_no_further():
    """At 150M attention's operations are a tenth at length 512 and a third at 2048: with attention five times as slow as
    products a token may cost 1.5 times as much, not 10."""
    short = make_record(8, 512, tok_s=4000)
    long = Cell.of("150M", 4, 2048)
    same_batch = Cell.of("150M", 8, 2048)
    assert judge(measured(8 * 2048 / 2000), same_batch, CARD, [short])[0] == "fits"
    status, why = judge(measured(8 * 2048 / 800), same_batch, CARD, [short])
    assert status == "spills"
    assert "B=8 L=512" in why
    assert judge(measured(4 * 2048 / 400), long, CARD, [make_record(8, 1024, tok_s=4000)])[0] == "fits"  # not smaller


def test_memory_that_moved_to_the_system_is_a_spill_and_what_was_there_before_is_not():
    """Windows counts it for each process; only growth says so (64 MB of it were reported to cost 26% of the speed)."""
    status, why = judge(measured(non_local_growth_bytes=64 << 20), CELL, CARD, [])
    assert status == "spills"
    assert "moved to system memory" in why
    assert judge(measured(non_local_growth_bytes=1 << 20), CELL, CARD, [])[0] == "fits"
    assert judge(measured(non_local_growth_bytes=None), CELL, CARD, [])[0] == "fits"


def test_past_the_measured_collapse_it_spills_however_fast_it_seems():
    card = Card(6 * GIB, True, make_cliff("collapse", 4.9e9, 5.0e9, free=5.6e9))
    status, why = judge(measured(reserved_peak_bytes=5_010_000_000), CELL, card, [])
    assert status == "spills"
    assert "cliff" in why
    assert judge(measured(reserved_peak_bytes=4_950_000_000), CELL, card, [])[0] == "fits"
    # a program that was open when the cliff was measured has ended since
    freer = measured(reserved_peak_bytes=5_010_000_000, free_at_start_bytes=5_900_000_000)
    assert judge(freer, CELL, card, [])[0] == "fits"
    assert judge(measured(reserved_peak_bytes=5_010_000_000), CELL,
                 Card(6 * GIB, True, make_cliff("failure", 4.9e9, 5.0e9)), [])[0] == "fits"


def test_a_fall_below_what_was_shown_to_be_fast_has_another_cause():
    """Where the card fails instead of spilling, a slow cell is slow for other reasons."""
    smaller, slow = make_record(1, tok_s=4000), measured(4 * 512 / 1000, device_peak_bytes=4_000_000_000)
    assert judge(slow, CELL, Card(6 * GIB, True, make_cliff("failure", 4.9e9, 5.0e9)), [smaller])[0] == "fits"
    assert judge(slow, CELL, Card(6 * GIB, True, make_cliff("collapse", 4.9e9, 5.0e9)), [smaller])[0] == "spills"


def test_another_program_on_the_card_makes_it_contended_not_slow():
    def beside(error: tuple[str, str] | None = None, **others: Any) -> Verdict:
        readings = {"others": {"grown_bytes": 0, "largest_bytes": None, "busy_percent": None, "pid": 77} | others}
        if error:
            return judge(ended(Measurement(readings=readings), error=error), CELL, CARD, [])
        return judge(measured(readings=readings), CELL, CARD, [])

    assert beside() == ("fits", "")
    assert beside(busy_percent=4.0)[0] == "fits"  # a desktop that draws
    status, why = beside(busy_percent=80.0)
    assert status == "contended"
    assert "pid 77" in why
    assert "80%" in why
    assert beside(grown_bytes=300 << 20)[0] == beside(grown_bytes=-(300 << 20))[0] == "contended"
    assert beside(largest_bytes=2 * 10**9)[0] == "fits"  # it fits beside it
    failed = ("OutOfMemoryError", "CUDA out of memory.")
    status, why = beside(failed, largest_bytes=2 * 10**9)
    assert status == "contended"
    assert "2.0 GB" in why
    assert "alone it would read oom" in why
    assert beside(failed, largest_bytes=200 * 10**6)[0] == "oom"
    assert beside(("RuntimeError", "device-side assert triggered"), busy_percent=80.0)[0] == "crashed"


def test_a_step_that_does_not_end_is_stopped_within_ten_seconds():
    slow_s = slow_step_s(Cell.of("150M", 6, 512), CARD, [make_record(4, tok_s=2269)])
    assert slow_s == pytest.approx(6 * 512 * 1.5 / 2269)

    def after(quiet_s: float, steps: int, cell: Cell = CELL, slow_s: float | None = slow_s) -> str | None:
        return stuck_reason(cell, slow_s, CellProgress(False, Measurement(warmup_s=(1.0,) * steps)), quiet_s)
    assert after(10.5, 1)
    assert not after(9.0, 1)
    assert not after(30.0, 0)
    assert after(41.0, 0)
    assert not after(300.0, 0, Cell.of("150M", 4, 512, engine="compile"))
    assert not after(12.0, 1, slow_s=20.0)
    assert after(21.0, 1, slow_s=20.0)
    assert not after(1000.0, 1, slow_s=None)
    assert slow_step_s(CELL, CARD, []) is None
    assert slow_step_s(Cell.of("150M", 6, 512), HOST, [make_record(4)]) is None
    assert stuck_reason(CELL, slow_s, CellProgress(), 1000.0) is None  # it is setting up
    stopped = ended(killed="spill", certain=after(11.0, 1))
    assert judge(stopped, CELL, CARD, []) == ("spills", "a step took more than 10 s, where smaller cells ask for 1.4 s")


def test_a_cache_freed_during_timed_steps_is_thrashing():
    assert judge(measured(timed_retries=3), CELL, CARD, [])[0] == "thrashes"


def test_a_process_that_dies_is_a_record():
    assert judge(ended(exit_code=-9), CELL, HOST, [])[0] == "oom"
    assert judge(ended(exit_code=-11), CELL, CARD, [])[0] == "crashed"
    assert judge(ended(exit_code=-6, printed="terminate\nCUDA error: out of memory\n"), CELL, CARD, [])[0] == "oom"
    assert judge(ended(Measurement(step_s=(9.0,)), killed="timeout", seconds=120.0), CELL, CARD, []) == (
        "timeout", "1 timed steps in 120 s where 5 are needed")
    assert judge(ended(killed="memory", resident_bytes=9 * 10**9), CELL, HOST, [])[0] == "oom"


def test_a_cell_that_ran_out_of_time_because_it_spilled_has_spilled():
    """Its steps were too slow to be timed, and memory had moved to the system: the time is not what it lacks."""
    slow = Measurement(step_s=(40.0, 41.0), non_local_growth_bytes=64 << 20)
    status, why = judge(ended(slow, killed="timeout", seconds=120.0), CELL, CARD, [])
    assert status == "spills"
    assert "moved to system memory" in why
    assert judge(ended(slow, killed="timeout", seconds=120.0), CELL, HOST, [])[0] == "timeout"


def test_a_timeout_stays_one_whoever_else_was_on_the_card():
    """It lacked timed steps, so nothing was measured that another program could have disturbed."""
    busy = Measurement(step_s=(40.0,), readings={"others": {"pid": 77, "busy_percent": 80.0}})
    assert judge(ended(busy, killed="timeout", seconds=120.0), CELL, CARD, [])[0] == "timeout"


def test_the_median_step_decides_and_not_the_fastest():
    """One step of a spilled cell may find its blocks still on the card."""
    smaller = make_record(2, tok_s=2000)
    fast, slow = 4 * 512 / 2000, 4 * 512 / 500
    assert judge(measured(step_s=(fast, slow, slow, slow, slow)), CELL, CARD, [smaller])[0] == "spills"
    assert judge(measured(step_s=(slow, fast, fast, fast, fast)), CELL, CARD, [smaller])[0] == "fits"


def test_the_default_limit_is_below_what_was_free():
    assert default_limit([make_record()]) is None
    of_free = default_limit([make_record(free_at_start_bytes=free) for free in (6_000_000_000, 5_600_000_000)])
    assert of_free == (5_040_000_000, "90% of the memory that was free when it was measured")
    of_cliff = default_limit([], make_cliff("collapse", 4.9e9, 5.0e9))
    assert of_cliff is not None
    assert of_cliff[0] == int(0.97 * 5.2e9)  # the context counts
    assert "collapse" in of_cliff[1]
