"""What an attempt means: an error is read for its kind, and a spill is found without one."""

import json

import pytest
from conftest import SAMPLES, make_record

from probe.cell import Cell
from probe.cliff import default_limit
from probe.verdict import Outcome, hopeless, judge
from trainer.errors import is_out_of_memory

MEMORY = json.loads((SAMPLES / "memory.json").read_text())
CELL = Cell("150M", 4, 512)
GIB = 2**30


def measured(step_s=0.9, **other):
    return Outcome(measured=dict(step_s=[step_s] * 5, readings={}, reserved_peak_bytes=4 * GIB, timed_retries=0) | other)


@pytest.mark.parametrize(("kind", "text"), MEMORY["out_of_memory"])
def test_failures_to_allocate_are_known_by_kind_and_text(kind, text):
    assert is_out_of_memory(kind, text)
    assert judge(Outcome(error=(kind, text)), CELL, 6 * GIB, True, [])[0] == "oom"


@pytest.mark.parametrize(("kind", "text"), MEMORY["not_out_of_memory"])
def test_other_failures_are_crashes_with_their_text(kind, text):
    status, why = judge(Outcome(error=(kind, text)), CELL, 6 * GIB, True, [])
    assert status == "crashed" and text in why


def test_a_step_that_ran_fits():
    assert judge(measured(), CELL, 6 * GIB, True, []) == ("fits", "")


@pytest.mark.parametrize("gib", MEMORY["reserved_over_total"]["reserved_gib"])
def test_more_reserved_than_the_card_has_is_a_spill(gib):
    outcome = measured(reserved_peak_bytes=int(gib * GIB))
    status, why = judge(outcome, CELL, 8 * GIB, True, [])
    assert status == "spills" and "reserved" in why


def test_throughput_that_falls_while_the_batch_grows_is_a_spill():
    """The first user's card: 5.67 GB is below its total, and no error came."""
    case = MEMORY["throughput_fell"]
    smaller = make_record(case["batch"][0], tok_s=case["tok_s"][0])
    outcome = measured(case["batch"][1] * 512 / case["tok_s"][1])
    status, why = judge(outcome, Cell("150M", 6, 512), 6 * GIB, True, [smaller])
    assert status == "spills" and "slower than the smaller batch" in why


@pytest.mark.parametrize("case", MEMORY["slower_at_the_cap"])
def test_a_quarter_of_a_gigabyte_past_the_cap_is_enough(case):
    smaller = make_record(case["batch"] - 1, tok_s=(case["batch"] - 1) * 512 / case["uncapped_step_s"])
    assert judge(measured(case["step_s"]), Cell("150M", case["batch"], 512), 6 * GIB, True, [smaller])[0] == "spills"


def test_heat_is_no_spill_nor_is_a_slower_length_nor_a_processor():
    smaller = make_record(1, tok_s=4000)
    slow = measured(4 * 512 / 1000)
    assert judge(slow, CELL, 6 * GIB, True, [smaller])[0] == "spills"
    hot = measured(4 * 512 / 1000, readings={"throttle": 0x20})
    assert judge(hot, CELL, 6 * GIB, True, [smaller])[0] == "fits"
    idle = measured(4 * 512 / 1000, readings={"throttle": 0x1})
    assert judge(idle, CELL, 6 * GIB, True, [smaller])[0] == "spills"
    assert judge(slow, CELL, 6 * GIB, True, [make_record(1, 256, tok_s=4000)])[0] == "fits"
    assert judge(slow, CELL, 6 * GIB, False, [smaller])[0] == "fits"


def test_a_cache_freed_during_timed_steps_is_thrashing():
    assert judge(measured(timed_retries=3), CELL, 6 * GIB, True, [])[0] == "thrashes"


def test_a_process_that_dies_is_a_record():
    assert judge(Outcome(exit_code=-9), CELL, None, False, [])[0] == "oom"
    assert judge(Outcome(exit_code=-11), CELL, None, True, [])[0] == "crashed"
    assert judge(Outcome(exit_code=-6, tail="terminate\nCUDA error: out of memory\n"), CELL, None, True, [])[0] == "oom"
    assert judge(Outcome(killed="timeout", progress={"seconds": 120, "step_s": [9]}), CELL, None, True, []) == (
        "timeout", "1 timed steps in 120 s where 5 are needed")
    assert judge(Outcome(killed="memory", progress={"resident_bytes": 9e9}), CELL, None, False, [])[0] == "oom"


def test_only_a_larger_cell_than_a_failed_one_is_hopeless():
    oom = make_record(8, 512, status="oom", step_s=())
    assert "B=8 L=512" in hopeless(Cell("150M", 16, 512), [oom], None)
    assert hopeless(Cell("150M", 8, 1024), [oom], None)
    assert hopeless(Cell("150M", 4, 1024), [oom], None) is None
    assert hopeless(Cell("150M", 8, 512), [oom], None) is None
    assert hopeless(Cell("150M", 16, 512, recompute="block"), [oom], None) is None
    assert hopeless(Cell("150M", 16, 512), [make_record(8, 512, status="crashed", step_s=())], None) is None
    big = make_record(8, 512, peak=7e9)
    assert hopeless(Cell("150M", 16, 512), [big], 5e9) and not hopeless(Cell("150M", 16, 512), [big], 8e9)


def test_the_default_limit_is_below_what_was_free():
    assert default_limit([make_record()]) is None
    limit, why = default_limit([make_record(free_at_start_bytes=free) for free in (6_000_000_000, 5_600_000_000)])
    assert limit == 5_040_000_000 and "90%" in why
