"""Power is an energy over a load that lasts long enough for one, and what ran on battery is told from what ran on mains."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.made import make_record, there, write_records

from planner.decide.inputs import PlanInputs, read_inputs
from planner.decide.scaling import scaled_records
from probe.cell import Cell
from probe.grid import bench, run
from probe.grid.bench import Bench
from probe.grid.run import GridOptions, run_grid
from probe.outcome import Outcome
from probe.records import Measurement, Status, load
from spillcliff.console import Output
from spillcliff.errors import Refused
from spillcliff.files import ignore
from spillcliff.hardware import device, nvml
from spillcliff.hardware.device import DeviceFacts
from spillcliff.hardware.energy import EnergyMeter, energy_over

CARD = DeviceFacts("card-x", "X", "cuda", 6 * 10**9, (6, 1), 10, "", "2.13", None, None, "3.11", "linux", "native")


@pytest.mark.parametrize(("seconds", "before_j", "after_j", "powers_w", "joules"), [
    (4.0, 1000.0, 1400.0, [90.0], 400.0), (4.0, None, None, [90.0, 110.0], 400.0), (4.0, 1000.0, None, [90.0], 360.0),
    (4.0, 1000.0, 3.0, [100.0], 400.0), (4.0, 1000.0, 1000.0, [100.0], 400.0), (4.0, None, None, [], None),
    (1.99, 1000.0, 1400.0, [90.0], None), (2.0, 1000.0, 1400.0, [90.0], 400.0), (0.5, None, None, [90.0], None)])
def test_the_counter_goes_before_the_readings_and_a_short_load_has_no_figure(seconds, before_j, after_j, powers_w, joules):
    assert energy_over(seconds, before_j, after_j, powers_w) == joules


def test_a_card_without_a_counter_is_read_while_it_is_loaded(monkeypatch):
    """As all before Volta."""
    now, powers = iter([10.0, 14.0]), iter([80.0, 90.0, 100.0, None])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(nvml, "power_w", lambda uuid: next(powers))
    monkeypatch.setattr(nvml, "energy_j", lambda uuid: None)
    meter = EnergyMeter("GPU-1")
    for _ in range(3):
        meter.look()
    assert meter.joules() == 4.0 * 90.0


@pytest.mark.parametrize(("changes", "power_w"), [
    ({"energy_j": 300.0, "readings": {"power_w": 5.0}}, 100.0), ({"readings": {"power_w": 80.0}}, 80.0), ({}, None),
    ({"step_s": (0.2,) * 5, "readings": {"power_w": 80.0}}, None), ({"readings": {"power_w": 0}}, None),
    ({"step_s": (0.2,) * 5, "warmup_s": (0.5, 0.5), "readings": {"power_w": 80.0}}, 80.0),
    ({"step_s": (), "energy_j": 300.0, "status": Status.OOM}, None)])
def test_a_record_s_power_is_its_energy_or_a_reading_under_a_long_load(changes, power_w):
    """Those of older versions have the reading alone."""
    record = make_record(**{"step_s": (0.6,) * 5} | changes)
    assert record.power_w == (None if power_w is None else pytest.approx(power_w))
    assert PlanInputs().power_w(record) == record.power_w
    for two in scaled_records([record], 2):
        assert PlanInputs().power_w(two) == (None if power_w is None else pytest.approx(2 * power_w))


class Measures:
    """Workers that answer with steps of 0.1 s and never start a process."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def run(self, task: Any, *arguments: Any, **more: Any) -> Outcome:
        self.cells.append(task.cell)
        return Outcome(answer=Measurement(step_s=(0.1,) * 5, device_peak_bytes=10**9))


def test_a_grid_on_battery_is_refused_unless_it_is_allowed(monkeypatch):
    monkeypatch.setattr(run, "on_battery", lambda uuid: True)
    session = cast(Any, SimpleNamespace(facts=CARD, store=None))
    with pytest.raises(Refused, match=r"on battery.*--allow-battery"):
        run_grid(session, [Cell.of("1M", 1, 32)], GridOptions(seconds=1.0), Output(as_json=False))


def test_what_is_measured_on_battery_is_marked_and_measured_again_on_mains(monkeypatch, tmp_path):
    path, cell, workers, shown = tmp_path / "records.jsonl", Cell.of("1M", 1, 32), Measures(), []

    def grid(is_on_battery):
        monkeypatch.setattr(bench, "on_battery", lambda uuid: is_on_battery)
        made = Bench(cast(Any, workers), "cuda:0", CARD, path, seconds=1.0)
        made.run([cell], every_cell=True, again=False, show=lambda cell, record, note: shown.append(note))

    for is_on_battery in (True, True, False, False, True):
        grid(is_on_battery)
    assert [r.on_battery for r in load(path)] == [True, False]
    assert len(workers.cells) == 2
    assert shown == ["on battery", "measured before, on battery", "", "measured before", "measured before"]


def test_a_cell_on_battery_is_not_taken_for_spilled_beside_those_on_mains(monkeypatch, tmp_path):
    """It is three times slower than the smaller one, which had mains."""
    path = tmp_path / "records.jsonl"
    smaller = make_record(1, 32, tok_s=20_000, cell=Cell.of("1M", 1, 32), device=CARD.fingerprint, on_battery=False)
    for is_on_battery, status in ((True, Status.FITS), (False, Status.SPILLS)):
        write_records(path, [smaller])
        monkeypatch.setattr(bench, "on_battery", lambda uuid, answer=is_on_battery: answer)
        made = Bench(cast(Any, Measures()), "cuda:0", CARD, path, seconds=1.0)
        assert made.measure(Cell.of("1M", 4, 32)).status is status


def test_a_plan_leaves_out_what_was_measured_on_battery(tmp_path):
    mains, battery = make_record(1), make_record(4, on_battery=True)
    said: list[str] = []
    path = write_records(tmp_path / "both.jsonl", [mains, battery])
    assert read_inputs(tmp_path, (path,), None, said.append)[0] == [mains]
    assert "left out: 1 records made on battery" in said[-1]
    path = write_records(tmp_path / "battery.jsonl", [battery])
    assert read_inputs(tmp_path, (path,), None, said.append)[0] == [battery]
    assert "the forecast is of that" in said[-1]
    assert read_inputs(tmp_path, (write_records(tmp_path / "m.jsonl", [mains]),), None, ignore)[0] == [mains]
    assert len(said) == 2


@pytest.mark.parametrize(("battery", "source", "answer"), [
    (None, None, False), (SimpleNamespace(power_plugged=False), None, True), (SimpleNamespace(power_plugged=None), 0, False),
    (SimpleNamespace(power_plugged=True), 1, True), (None, 1, True), (None, 2, False)])
def test_the_battery_is_told_by_the_system_or_by_the_card_s_driver(monkeypatch, battery, source, answer):
    monkeypatch.setattr("psutil.sensors_battery", lambda: battery)
    monkeypatch.setattr(nvml, "power_source", lambda uuid: source)
    assert device.on_battery("GPU-1") is answer


def test_records_of_before_were_on_mains_and_have_no_energy():
    values = make_record().to_json()
    for name in ("energy_j", "on_battery"):
        del values[name]
    old = type(make_record()).from_json(values)
    assert (old.energy_j, old.on_battery) == (None, False)
    kept = dataclasses.replace(make_record(), energy_j=12.5, on_battery=True)
    again = type(kept).from_json(kept.to_json())
    assert (there(again.energy_j), again.on_battery) == (12.5, True)
