"""Receipts and soaks correct forecasts by as much as they are worth, of the same device and software alone."""

import dataclasses
import json
import math

import pytest
from helpers.made import make_plan, make_record

from planner.decide.build import PlanRequest, build
from planner.decide.calibration import PastRun, calibrate, read
from planner.decide.hours import Rates
from planner.decide.inputs import PlanInputs
from probe.cell import Cell
from probe.soak import Soak, Window
from spillcliff.files import write_json

GTX = "nvidia-geforce-gtx-1060"
PLAN = make_plan()
ASK = PlanRequest(corpus_tokens=100_000_000, limit_bytes=5_000_000_000)


def run(ratio, device=GTX, torch=None, corrected=1.0, **receipt) -> PastRun:
    plan = dataclasses.replace(PLAN, device=device, calibration={"tok_s": corrected})
    values = {"ran_on": device, "software": {"torch": torch}, "ratio": {"tok_s": ratio}}
    return PastRun("first", plan, values | receipt)


def soak(factor, settled=True) -> Soak:
    windows = tuple(Window(t, 5, 1.0 if t <= 20 else factor) for t in range(5, 600, 5))
    return Soak(schema=1, at="2026-01-01T00:00:00+00:00", device=GTX, software={}, cell=Cell.of("150M", 4, 512),
                minutes=10.0, seconds=595.0, windows=windows, settled=settled)


def test_nothing_known_changes_nothing():
    c = calibrate([], [], GTX, None, Rates(5.0, 1e8))
    assert (c.tok_s, c.receipts, c.soak, c.rates) == (1.0, 0, None, Rates(5.0, 1e8))
    assert c.lines() == []


def test_receipts_move_the_forecast_towards_them_and_narrow_it():
    found = [calibrate([run(0.95)] * n, [], GTX, None, Rates()) for n in (0, 1, 2, 10)]
    assert [c.tok_s for c in found] == sorted((c.tok_s for c in found), reverse=True)
    assert 0.95 < found[1].tok_s < 0.965
    assert found[3].tok_s == pytest.approx(0.95, abs=0.003)
    assert [c.sd for c in found] == sorted((c.sd for c in found), reverse=True)


def test_a_processor_s_single_receipt_is_believed_less():
    card, cpu = (calibrate([run(0.9, device=d)], [], d, None, Rates()).tok_s for d in (GTX, "cpu-x"))
    assert card < 0.93 < 0.98 < cpu


def test_receipts_that_disagree_widen_the_band():
    same, apart = (calibrate([run(1 - x), run(1 + x)], [], GTX, None, Rates()).sd for x in (0.001, 0.08))
    assert apart > 2 * same


def test_the_spread_is_of_what_runs_share_and_of_their_own():
    """Of a card nobody ran on 2% and 1%, independent; of two runs 8% to either side of the plan nearly their own spread,
    held back by four receipts' worth of trust in 1%."""
    assert calibrate([], [], GTX, None, Rates()).sd == pytest.approx(math.hypot(0.02, 0.01))
    off = 0.08
    own = math.sqrt((4 * 0.01**2 + 2 * off**2) / (4 + 2 - 1))
    shared = 1 / math.sqrt(1 / 0.02**2 + 2 / own**2)
    two = calibrate([run(math.exp(off)), run(math.exp(-off))], [], GTX, None, Rates())
    assert two.sd == pytest.approx(math.hypot(shared, own))
    assert two.tok_s == pytest.approx(1)


def test_what_was_corrected_already_is_not_corrected_twice():
    """Planned with 0.95 and met: the measurement is still to be multiplied by 0.95."""
    again = calibrate([run(1.0, corrected=0.95)] * 5, [], GTX, None, Rates()).tok_s
    assert again == pytest.approx(calibrate([run(0.95)] * 5, [], GTX, None, Rates()).tok_s)


@pytest.mark.parametrize("other", [run(0.5, device="nvidia-h200"), run(0.5, torch="1.0"),
                                   PastRun("moved", PLAN, {"ran_on": GTX, "ratio": {"tok_s": 0.5}}), run(None)])
def test_other_devices_and_software_say_nothing(other):
    assert calibrate([other], [], GTX, "2.11", Rates()).tok_s == 1.0


def test_a_receipt_of_the_same_build_counts_however_its_version_is_written():
    past = [run(0.95, torch="2.11.0+cu130")] * 10
    assert calibrate(past, [], GTX, "2.11.0", Rates()).tok_s == pytest.approx(0.95, abs=0.005)
    assert calibrate(past, [], GTX, "2.11.0+cu126", Rates()).tok_s == 1.0


def test_a_soak_s_loss_is_expected_and_receipts_outweigh_it():
    warm = calibrate([], [soak(1.1)], GTX, None, Rates())
    assert warm.tok_s == pytest.approx(1 / 1.1)
    assert "10.0% slower" in warm.lines()[0]
    assert calibrate([], [soak(1.1), soak(1.02, settled=False)], GTX, None, Rates()).soak == pytest.approx(1.1)
    assert calibrate([run(0.97)] * 10, [soak(1.1)], GTX, None, Rates()).tok_s == pytest.approx(0.97, abs=0.005)


def test_a_soak_on_battery_says_nothing_and_a_short_one_says_so():
    battery = dataclasses.replace(soak(1.9), on_battery=True)
    assert calibrate([], [battery], GTX, None, Rates()).soak is None
    assert "not settled" in calibrate([], [soak(1.1, settled=False)], GTX, None, Rates()).lines()[0]
    assert "faster" in calibrate([], [soak(0.98)], GTX, None, Rates()).lines()[0]


def test_the_power_is_that_of_the_same_step_and_model():
    there = make_record(accum=2)
    hot = dataclasses.replace(soak(1.0), windows=(Window(5, 5, 1.0, power_w=111.0),))
    known = PlanInputs(soaks=(dataclasses.replace(hot, cell=Cell.of("150M", 4, 512, 8)),))
    assert known.power_w(there) == 111.0
    assert PlanInputs(soaks=(dataclasses.replace(hot, cell=Cell.of("10M", 4, 512)),)).power_w(there) is None


def test_start_up_of_a_resumed_run_is_not_a_fresh_one_s():
    assert calibrate([run(1.0, start_up_s=99.0, resumed_from=5)], [], GTX, None, Rates(5.0)).rates.start_up_s == 5.0


def test_of_a_receipt_with_both_the_libraries_are_taken():
    """What comes after them is counted from the record's own setting up."""
    past = [run(1.0, start_up_s=9.0, libraries_s=6.0)]
    assert calibrate(past, [], GTX, None, Rates(5.0)).rates.start_up_s == 6.0


def test_start_up_and_disk_come_from_past_runs():
    size = 12 * PLAN.model.parameters * 4  # 32 steps, a checkpoint at 10, 20, 30 and 32
    seen = calibrate([run(1.0, start_up_s=9.0, checkpoint_write_s=2.0)], [], GTX, None, Rates(5.0, 1e8, 1e9, 1e10)).rates
    assert seen == Rates(9.0, size / 2.0, 1e9, 1e10)


def test_the_hours_follow_and_the_plan_says_why():
    records = [make_record()]
    plain = build(records, ASK, PlanInputs()).plan
    warm = build(records, ASK, PlanInputs(soaks=(soak(1.1),))).plan
    assert warm.predicted.hours.mid == pytest.approx(1.1 * plain.predicted.hours.mid, rel=0.001)
    assert any("soak" in line for line in warm.why)
    assert warm.calibration["soak"] == pytest.approx(1.1)
    met = build(records, ASK, PlanInputs(past=(run(0.9),) * 8)).plan
    assert met.predicted.tok_s.mid == pytest.approx(0.9 * plain.predicted.tok_s.mid, rel=0.01)
    assert any("8 past runs" in line for line in met.why)


def receipt(**changes) -> dict:
    three = {"tok_s": 1.0, "peak_bytes": 1.0, "hours": 1.0}
    return {"planned": three, "actual": three, "ratio": three, "ran_on": "cpu-x"} | changes


@pytest.mark.parametrize("damage", ["{", "[]", json.dumps(receipt(ratio=None)), json.dumps(receipt(ratio={"tok_s": "fast"})),
                                    json.dumps(receipt(actual={"hours": -1})), "null", "\x00",
                                    json.dumps(receipt(software="torch")), json.dumps(receipt(ratio={"tok_s": 1e-30})),
                                    json.dumps(receipt(ratio={"tok_s": 10**400})),
                                    json.dumps(receipt(ratio={"tok_s": 30.0}))])
def test_a_damaged_receipt_is_named_and_the_others_are_read(tmp_path, damage):
    for name in ("bad", "good", "unplanned", "running"):
        (tmp_path / name).mkdir()
        if name in ("bad", "good"):
            PLAN.save(tmp_path / name / "plan.json")
        if name != "running":
            write_json(tmp_path / name / "receipt.json", receipt())
    (tmp_path / "bad" / "receipt.json").write_text(damage)
    said: list[str] = []
    assert [p.run for p in read(tmp_path, said.append)] == ["good"]
    assert len(said) == 2
    assert any("bad" in line for line in said)
    assert not any("\n" in line for line in said)


def test_ratios_are_logarithms_of_what_was_measured():
    assert run(0.9, corrected=0.8).log_ratio == pytest.approx(math.log(0.72))
