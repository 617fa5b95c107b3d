"""What an attempt means: an error is read for its kind, and a spill is found without one."""

import json
from typing import Any

import pytest
import torch
from helpers.made import SAMPLES, make_cliff, make_record

from probe.cell import Cell
from probe.cliff import default_limit
from probe.outcome import CellProgress, Outcome
from probe.records import Measurement
from probe.tasks.measure_distributed import cause
from probe.verdict import Card, Verdict, judge, slow_step_s, stuck_reason
from spillcliff.failures import FailedElsewhere, Failure, failure, is_out_of_memory

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
    for bit in (0x8, 0x20, 0x40, 0x80):
        hot = measured(4 * 512 / 2100, readings={"throttle": bit})
        assert judge(hot, CELL, CARD, [smaller])[0] == "fits"
    for bit in (0x1, 0x4):  # idleness, and the power cap, at which a busy card always is
        idle = measured(4 * 512 / 2100, readings={"throttle": bit})
        assert judge(idle, CELL, CARD, [smaller])[0] == "spills"
    assert judge(slow, CELL, HOST, [smaller])[0] == "fits"


@pytest.mark.parametrize(("fall", "bits", "clock_share", "status"), [
    (36, 0x4, None, "spills"), (75, 0x20, None, "spills"), (2.2, 0x40, None, "spills"), (1.9, 0x40, None, "fits"),
    (1.6, 0x40, 0.62, "fits"), (2.2, 0x40, 0.62, "spills"), (2.2, 0x40, 0.5, "fits"), (1.6, 0x4, 0.7, "fits"),
    (1.6, 0x40, 1.0, "spills"), (1.6, 0, 0.5, "spills")])
def test_a_throttle_excuses_what_the_clock_that_was_read_explains(fall, bits, clock_share, status):
    smaller = make_record(1, tok_s=4000, readings={"clock_mhz": 1600})
    readings = {"throttle": bits} | ({} if clock_share is None else {"clock_mhz": clock_share * 1600})
    assert judge(measured(4 * 512 * fall / 4000, readings=readings), CELL, CARD, [smaller])[0] == status


def test_a_fall_below_a_trend_that_grew_is_a_spill():
    """B=1, 2 and 4 had 500, 980 and 1,900 tok/s: the next may stay there, but not fall by a quarter."""
    grew = [make_record(b, tok_s=t) for b, t in ((1, 500), (2, 980), (4, 1900))]
    cell = Cell.of("150M", 8, 512)
    status, why = judge(measured(8 * 512 / 1440), cell, CARD, grew)
    assert status == "spills"
    assert "trend" in why
    assert judge(measured(8 * 512 / 1720), cell, CARD, grew)[0] == "fits"
    assert judge(measured(16 * 512 / 1720), Cell.of("150M", 16, 512), CARD, grew)[0] == "fits"
    flat = [make_record(b, tok_s=t) for b, t in ((2, 1900), (4, 1900))]
    assert judge(measured(8 * 512 / 1440), cell, CARD, flat)[0] == "fits"
    other_length = [make_record(1, 256, tok_s=500), make_record(2, 256, tok_s=980), make_record(4, 256, tok_s=1900)]
    assert judge(measured(8 * 512 / 1440), cell, CARD, other_length)[0] == "fits"


def test_a_cell_much_slower_than_with_more_recomputation_has_spilled():
    """Recomputing takes time and saves memory: without it a step can't rightly be 7 times as long."""
    leaner = make_record(4, tok_s=2000, recompute="block")
    status, why = judge(measured(4 * 512 * 7 / 2000), CELL, CARD, [leaner])
    assert status == "spills"
    assert why == "slower than with more recomputation: spilled (286 tok/s where --recompute block had 2,000)"
    recomputed = Cell.of("150M", 4, 512, recompute="block")
    assert judge(measured(4 * 512 * 7 / 2000), recomputed, CARD, [make_record(4, tok_s=2000)])[0] == "fits"
    assert judge(measured(4 * 512 * 7 / 2000), CELL, CARD, [make_record(8, tok_s=2000, recompute="block")])[0] == "fits"


@pytest.mark.parametrize(("step_s", "status"), [
    ((15.0,) * 6 + (70.0,) * 5, "spills"), ((15.0,) * 6 + (29.0,) * 5, "fits"), ((15.0,) * 6 + (70.0,) * 2, "fits"),
    ((15.0,) * 6 + (70.0,) * 3, "spills"), ((15.0, 15.0, *(70.0,) * 3), "spills"),
    ((15.0,) * 4 + (70.0, 15.0, 70.0, 70.0), "fits"),
    ((0.02,) * 190 + (0.1,) * 10, "fits"), ((0.02,) * 170 + (0.1,) * 30, "spills"), ((70.0,) * 5 + (15.0,) * 6, "fits")])
def test_steps_that_take_much_longer_from_one_on_have_spilled_in_the_middle(step_s, status):
    """Somebody opened a game: the median would tell the time before, or the time after, as the cell's own."""
    assert judge(measured(step_s), CELL, CARD, [])[0] == status
    assert judge(measured(step_s), CELL, HOST, [])[0] == "fits"
    shown_fast = Card(6 * GIB, True, make_cliff("failure", 4.9e9, 5.0e9))
    assert judge(measured(step_s, device_peak_bytes=4 * GIB), CELL, shown_fast, [])[0] == "fits"


def test_more_than_the_card_has_by_the_device_s_figure_is_a_spill():
    """Graphs and the context are not the allocator's."""
    status, why = judge(measured(device_peak_bytes=6_600_000_000), CELL, Card(6_440_000_000, True), [])
    assert status == "spills"
    assert "6.6 GB taken in all" in why
    assert judge(measured(device_peak_bytes=6_400_000_000), CELL, Card(6_440_000_000, True), [])[0] == "fits"


def test_what_took_an_unknown_part_of_the_card_was_not_shown_to_be_fast():
    """9.0 GB were fast, 9.8 are reserved, and the device doesn't say what the process has in all."""
    card, smaller = Card(12 * 10**9, True, make_cliff("failure", 9.0e9, 9.1e9)), make_record(1, tok_s=4000)
    for unknown in ({"reserved_peak_bytes": 9_800_000_000}, {"reserved_peak_bytes": None}):
        assert judge(measured(4 * 512 * 75 / 4000, **unknown), CELL, card, [smaller])[0] == "spills"
    assert judge(measured(4 * 512 * 75 / 4000, reserved_peak_bytes=8_000_000_000), CELL, card, [smaller])[0] == "fits"


def test_memory_that_failed_in_pieces_is_told_with_what_helps():
    def failed(reserved: float, allocated: float, cell: Cell = CELL) -> Verdict:
        known = Measurement(reserved_peak_bytes=int(reserved * 1e9), allocated_peak_bytes=int(allocated * 1e9))
        text = "CUDA out of memory. Tried to allocate 2.00 MiB"
        return judge(ended(known, error=("OutOfMemoryError", text)), cell, Card(24 * 10**9, True), [])
    status, why = failed(22.33, 12.35)
    assert status == "oom"
    assert all(word in why for word in ("fragmentation", "expandable_segments", "smaller step"))
    assert "fragmentation" not in failed(22.33, 18.0).why
    assert "fragmentation" not in failed(0.6, 0.4).why
    assert "fragmentation" not in failed(1.8, 1.15, Cell.of("150M", 4, 512, engine="graph")).why  # seen where all was well


def test_what_ran_out_of_memory_is_found_however_it_is_wrapped():
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    captured = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    other = ValueError("a shape that can't be")

    def raised(cause: Exception | None, context: Exception | None = None, e: Exception = captured) -> Exception:
        e = type(e)(*e.args)
        if cause:
            e.__cause__ = cause
        e.__context__ = context
        return e
    assert failure(raised(memory)) == failure(raised(None, memory)) == failure(memory)
    assert failure(raised(memory, e=other)) == failure(memory)
    assert failure(ExceptionGroup("two", [other, memory])) == failure(memory)
    assert is_out_of_memory(*failure(raised(None)))
    assert failure(raised(None, other)) == ("ValueError", "a shape that can't be")
    assert failure(FailedElsewhere("OutOfMemoryError", "x")) == ("OutOfMemoryError", "x")
    itself = RuntimeError("a loop")
    itself.__context__ = itself
    assert failure(itself) == ("RuntimeError", "a loop")


@pytest.mark.parametrize(("failures", "printed", "kind"), [
    ([("RuntimeError", "Connection reset by peer")], "Signal 9 (SIGKILL) received by PID 71", "Killed"),
    ([("RuntimeError", "Connection closed by peer"), ("ValueError", "no")], "", "ValueError"),
    ([("RuntimeError", "Connection closed by peer"), ("OutOfMemoryError", "x")], "Signal 9 (SIGKILL)", "OutOfMemoryError"),
    ([("RuntimeError", "Connection reset by peer")], "", "RuntimeError"), ([], "Signal 11 (SIGSEGV)", "Ended")])
def test_a_team_fails_by_what_ended_it_and_not_by_what_the_others_saw(failures, printed, kind):
    assert cause([Failure(*f) for f in failures], printed).kind == kind
    status = judge(ended(error=cause([Failure(*f) for f in failures], printed)), CELL, CARD, [])[0]
    assert (status == "oom") == (kind in ("Killed", "OutOfMemoryError"))


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
