"""A run leaves a spill by itself, by a smaller step that is known to need less, and nothing else makes it do so."""

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.made import ROOT, make_plan
from helpers.runs import Clock, log, open_run

from trainer.config import StepConfig
from trainer.plan import SmallerStep
from trainer.run.slowdown import SpeedReadings, only_a_spill_explains
from trainer.run.speed_watch import SpeedWatch
from trainer.run.spill_escape import SpillEscape
from trainer.run.step import TrainStep

SPILLED = SpeedReadings(kind="cuda", tok_s=500.0, planned_tok_s=2000.0, data_share=0.0)


def told(*step_s: float) -> SpillEscape:
    escape = SpillEscape()
    for seconds in step_s:
        escape.add(seconds)
    return escape


def test_twenty_steps_show_it_and_two_of_them_may_be_fast():
    assert told(*[1.0] * 40, *[4.0] * 17).fall() is None
    assert told(*[1.0] * 40, *[4.0] * 18).fall() == 4.0
    assert told(*[1.0] * 40, *[4.0] * 10, 1.0, 1.0, *[4.0] * 8).fall() == 4.0
    assert told(*[1.0] * 40, *[1.9] * 30).fall() is None
    assert told(*[4.0] * 60).fall() is None  # nothing says that it was ever faster
    assert told(*[1.0] * 20, *[4.0] * 18).fall() is None  # nor do so few steps


def test_it_is_halved_twice_at_most_and_not_for_what_two_halves_rightly_take():
    escape = told(*[1.0] * 40, *[9.0] * 20)
    escape.halve()
    for _ in range(20):
        escape.add(3.9)  # of two launches for one each may take its own time
    assert escape.fall() is None
    for _ in range(5):
        escape.add(9.0)
    assert escape.fall() is None
    for _ in range(20):
        escape.add(9.0)
    assert escape.fall() == 9.0
    escape.halve()
    for _ in range(40):
        escape.add(9.0)
    assert escape.fall() is None


def test_the_planned_step_is_tried_again_at_ever_fewer_checkpoints():
    escape = told(*[1.0] * 40, *[9.0] * 20)
    assert not escape.is_retry_due()
    tries = []
    escape.halve()
    for checkpoint in range(1, 16):
        if escape.is_retry_due():
            tries.append(checkpoint)
            for _ in range(5):
                assert escape.fall() is None
                escape.add(9.0)
            assert escape.fall() == 9.0  # five steps are enough by now
            escape.halve()
    assert tries == [1, 3, 7, 15]


@pytest.mark.parametrize(("fall", "changes", "is_spill"), [
    (4.0, {}, True), (4.0, {"kind": "cpu"}, False), (4.0, {"on_battery": True}, False), (4.0, {"data_share": 0.5}, False),
    (4.0, {"other_percent": 50.0}, True), (2.9, {"other_percent": 50.0}, False), (4.0, {"other_percent": 80.0}, False),
    (2.5, {"throttle": 0x40}, True), (2.5, {"throttle": 0x40, "clock_share": 0.4}, False), (2.5, {"throttle": 0x4}, True),
    (4.0, {"spilled_bytes": 1 << 20}, False), (2.0, {"spilled_bytes": 1 << 30, "other_percent": 90.0}, True)])
def test_only_what_nothing_else_explains_is_left(fall, changes, is_spill):
    assert only_a_spill_explains(dataclasses.replace(SPILLED, **changes), fall) is is_spill


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("**/log.jsonl")), ids=lambda path: path.parent.name)
def test_no_run_that_was_kept_would_have_been_left(path: Path):
    """Hours of steps on an H200 and on a processor, without a spill."""
    escape = SpillEscape()
    for line in path.read_text().splitlines():
        values = json.loads(line)
        if values["kind"] == "step":
            escape.add(values["step_s"])
            assert escape.fall() is None


def test_a_smaller_step_is_known_to_need_less():
    """A first accumulation holds the gradients through the forward pass, which may be more than half a batch saves."""
    assert not make_plan(step=StepConfig(4, 32)).needs_less(2)
    assert make_plan(step=StepConfig(4, 32, 2)).needs_less(2)
    named = make_plan(step=StepConfig(4, 32), smaller_steps=[SmallerStep(2, 2, 1e9)])
    assert named.needs_less(2)
    assert not named.needs_less(1)


@pytest.fixture
def spills(monkeypatch):
    """From the 41st step to the 75th a micro-step of four sequences takes ten times as long, on what seems to be a card."""
    clock, real, real_readings, steps = Clock(monkeypatch), TrainStep.__call__, SpeedWatch.readings, list[int]()

    def step(self, tokens, *more, **others):
        steps.append(len(steps) + 1)
        clock.wait(10.0 if 41 <= len(steps) <= 75 and tokens.shape[1] == 4 else 1.0)
        return real(self, tokens, *more, **others)
    monkeypatch.setattr(TrainStep, "__call__", step)
    monkeypatch.setattr(SpeedWatch, "readings", lambda *told: dataclasses.replace(real_readings(*told), kind="cuda"))


def test_a_run_leaves_a_spill_with_the_same_tokens_and_goes_back_when_it_is_over(tmp_path, spills):
    said: list[str] = []
    run = open_run(tmp_path, 120, 50, shape=StepConfig(4, 16, 2), name="left", say=said.append)
    receipt = run.train()
    left, back = log(run.folder.path, "spill")
    assert 58 <= left.pop("step") <= 61
    assert (left["batch"], left["accum"]) == (2, 4)
    assert (back["step"], back["batch"], back["accum"]) == (100, 4, 2)
    assert len(receipt["spills"]) == 1
    assert receipt["spills"][0]["fall"] == pytest.approx(10, rel=0.2)
    assert any("memory has spilled: going on with batch 2 and accum 4" in line for line in said)
    times = [line["step_s"] for line in log(run.folder.path, "step")]
    assert max(times[61:75]) < 5 < min(times[41:57])
    assert len(times) == 120


def test_a_run_that_is_to_keep_its_step_keeps_it(tmp_path, spills):
    run = open_run(tmp_path, 80, 50, shape=StepConfig(4, 16, 2), name="kept")
    run.options = dataclasses.replace(run.options, keep_step=True)
    run.train()
    assert not log(run.folder.path, "spill")
