"""Records outlive whatever happens to the process that writes them, and damage is named by file and line."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.made import ROOT, SAMPLES, make_record

from planner.decide import calibration
from probe.cell import Cell, grid
from probe.grid.bench import Bench
from probe.outcome import CellProgress, Outcome
from probe.records import Measurement, Record, Status, append, digest, frame, latest, load, of_device
from probe.soak import Soak, Window
from probe.store import DeviceFolder
from probe.tasks.table import MeasureCell
from probe.tasks.worker import Workers
from spillcliff.errors import UserError
from spillcliff.hardware.device import DeviceFacts
from trainer.config import ModelConfig
from trainer.plan import Plan


def test_a_record_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "a" / "records.jsonl"
    for batch in (1, 2):
        append(path, make_record(batch))
    assert load(path) == [make_record(1), make_record(2)]
    assert json.loads(path.read_text().splitlines()[0])["model"]["parameters"] == 150_436_608


def test_throughput_counts_every_micro_step():
    """Low by the accumulation factor is a known fault of throughput meters."""
    r = make_record(4, 512, accum=3, step_s=(2.0, 1.0, 1.5))
    assert r.tok_s == 4 * 512 * 3 / 1.5


def test_the_peak_is_the_best_figure_there_is():
    assert make_record(reserved_peak_bytes=3, device_peak_bytes=5).peak_bytes == 5
    assert make_record(reserved_peak_bytes=3, device_peak_bytes=None).peak_bytes == 3


def test_a_torn_last_line_is_set_aside_and_nothing_else_is_lost(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, make_record(1))
    with path.open("a") as f:
        f.write('{"schema": 1, "at": "2026')
    said: list[str] = []
    assert len(load(path, said.append)) == 1
    assert "line 2 is torn" in said[0]
    append(path, make_record(2))
    assert load(path) == [make_record(1), make_record(2)]
    assert (tmp_path / "records.jsonl.torn").read_text().startswith('{"schema": 1, "at"')


@pytest.mark.parametrize(("change", "words"), [
    (dict(schema=2), "newer than this version reads"), (dict(schema=None), "schema"), (dict(status="great"), "status"),
    (dict(step_s=[0.0]), "step_s"), (dict(step_s=[]), "step_s"), (dict(step_s="fast"), "step_s"), (dict(cell=None), "cell"),
    (dict(cell={"model": "150M"}), "batch"), (dict(model={}), "model"), (dict(device=5), "device"),
    (dict(device_peak_bytes="4GB"), "device_peak_bytes"), (dict(device_peak_bytes=-1), "device_peak_bytes"),
    (dict(readings=[]), "readings"), (dict(micro_s=True), "micro_s")])
def test_damage_is_named_by_line_and_field(tmp_path, change, words):
    path = tmp_path / "records.jsonl"
    good = make_record().to_json()
    path.write_text("\n".join(json.dumps(v) for v in (good, good | change, good)) + "\n")
    with pytest.raises(UserError, match=rf"line 2.*{words}"):
        load(path)


def test_unknown_fields_are_ignored_and_optional_ones_may_lack():
    values = make_record().to_json() | {"colour": "blue"}
    for name in ("readings", "software", "why", "warmup_s", "micro_s", "alloc_retries"):
        del values[name]
    assert Record.from_json(values).tok_s == pytest.approx(1000)


def test_the_newest_record_of_a_cell_counts():
    old, new = make_record(tok_s=1000), make_record(tok_s=2000)
    assert list(latest([old, make_record(8), new]).values()) == [new, make_record(8)]


def test_a_frame_has_a_row_for_each_record():
    table = frame([make_record(1), make_record(2, status="oom", step_s=())])
    assert table.status.tolist() == ["fits", "oom"]
    assert table.tok_s.isna().tolist() == [False, True]


def test_a_grid_runs_small_cells_first():
    cells = grid(("10M", "1M"), {"batch": (4, 1), "length": (256, 128), "accum": (1, 2)})
    assert len(cells) == len(set(cells)) == 16
    assert [c.model for c in cells] == ["10M"] * 8 + ["1M"] * 8
    sizes = [c.batch * c.length for c in cells[:4]]
    assert sizes == sorted(sizes)


def test_a_cell_needs_no_more_than_a_larger_one():
    small = Cell.of("10M", 2, 128)
    assert small.within(Cell.of("10M", 4, 128))
    assert small.within(Cell.of("10M", 2, 256, accum=2))
    assert not small.within(Cell.of("10M", 1, 512))
    assert not small.within(Cell.of("20M", 4, 128))
    assert Cell.of("10M", 2, 128, accum=2).within(Cell.of("10M", 2, 128, accum=3))
    assert not Cell.of("10M", 2, 128, accum=2).within(Cell.of("10M", 4, 256))


def test_a_device_s_records_are_read_in_order_whoever_wrote_them(tmp_path):
    """The second line is written without blanks, as another program might, and is the newest but one."""
    a, b = make_record(1, tok_s=1000), make_record(1, tok_s=2000, device="nvidia-h200")
    compact = json.dumps(make_record(1, tok_s=3000).to_json(), separators=(",", ":"))
    lines = [json.dumps(a.to_json()), compact, json.dumps(b.to_json()), json.dumps(make_record(1, tok_s=4000).to_json())]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines) + "\n" + lines[0][:50])
    said: list[str] = []
    devices: list[str] = []

    def choose(names: list[str]) -> str:
        devices.extend(names)
        return a.device

    records = of_device([path], choose, said.append)
    assert [round(r.tok_s) for r in records] == [1000, 3000, 4000]
    assert set(devices) == {a.device, b.device}
    assert len(said) == 1
    assert "torn" in said[0]
    path.write_text("")
    assert of_device([path], lambda names: names[0]) == []


def test_a_cell_s_options_measure_that_cell():
    assert Cell.of("10M", 2, 128).command_options() == ""
    assert Cell.of("10M", 2, 128, 2, vocab=500, engine="graph", recompute="block").command_options() == (
        " --accum 2 --engine graph --recompute block --vocab 500")


FACTS = DeviceFacts("cpu-x", "X", "cpu", 10**10, None, 2, "", "2.13", None, None, "3.11", "linux", "default")
FULL = Measurement(
    warmup_s=(0.5, 0.25), step_s=(0.125,) * 5, micro_s=0.1, optimizer_s=0.02, eval_s=0.03, setup_s=1.5, start_up_s=2.5,
    allocated_peak_bytes=11, reserved_peak_bytes=12, device_peak_bytes=13, free_at_start_bytes=14,
    non_local_growth_bytes=15, alloc_retries=16, timed_retries=0, energy_j=17.5,
    readings={"clock_mhz": 1500, "others": {"grown_bytes": 7, "largest_bytes": None, "busy_percent": 1.5, "pid": 8}})
"""No field is at its default but the one that says thrashing."""


class Sent(Workers):
    """Workers whose process sends this of its cell."""

    def __init__(self, outcome: Outcome[Measurement, CellProgress]) -> None:
        super().__init__()
        self.outcome = outcome

    def run(self, task: Any, *arguments: Any, **options: Any) -> Any:
        assert isinstance(task, MeasureCell)
        return self.outcome


@pytest.mark.parametrize("outcome", [
    Outcome(answer=FULL), Outcome(progress=CellProgress(False, dataclasses.replace(FULL, timed_retries=3)), exit_code=-6)],
    ids=["to its end", "till it died"])
def test_nothing_that_was_measured_is_dropped(tmp_path: Path, outcome: Outcome[Measurement, CellProgress]) -> None:
    """Of a cell that came to its end and of one that died."""
    sent = outcome.answer or (outcome.progress or CellProgress()).measured
    cell = Cell.of("1M", 2, 32, vocab=500)
    path = tmp_path / "records.jsonl"
    record = Bench(Sent(outcome), "cpu", FACTS, path, seconds=1.0).measure(cell)
    on_disk = json.loads(path.read_text())
    (loaded,) = load(path)
    assert loaded == record
    assert loaded.status is (Status.FITS if outcome.answer else Status.CRASHED)
    for field in dataclasses.fields(Measurement):
        value = getattr(sent, field.name)
        assert getattr(loaded, field.name) == value, field.name
        assert on_disk[field.name] == json.loads(json.dumps(value)), field.name
    assert loaded.device == FACTS.fingerprint
    assert loaded.software == FACTS.software
    assert loaded.predicted_bytes


def test_a_digest_depends_on_what_was_measured_alone() -> None:
    """Not on the order, nor on fields that are at their defaults, which a later version may add."""
    records = [make_record(b, n, accum=a) for b in (1, 2) for n in (256, 512) for a in (1, 2)]
    shuffled = random.Random(0).sample(records, len(records))
    whole = digest(records)
    assert digest(shuffled) == whole
    assert digest(records[1:]) != whole

    def without_defaults(values: dict[str, Any]) -> dict[str, Any]:
        usual = ("schema", "why", "software", "warmup_s", "readings", "alloc_retries", "timed_retries", "eval_s", "cell_s")
        short = {name: value for name, value in values.items() if name not in usual}
        return short | {"schema": 1, "cell": {k: v for k, v in values["cell"].items() if k not in ("engine", "update")}}

    assert digest([Record.from_json(without_defaults(r.to_json())) for r in records]) == whole
    for change in ({"step_s": (1.0,)}, {"device_peak_bytes": 5}, {"status": Status.OOM}, {"device": "other"},
                   {"alloc_retries": 1}, {"cell": Cell.of("150M", 1, 256, engine="graph")}, {"readings": {"power_w": 5}},
                   {"model": dataclasses.replace(ModelConfig.named("150M"), layers=3)}):
        assert digest([dataclasses.replace(records[0], **change), *records[1:]]) != whole, change


def test_a_digest_of_today_is_that_of_tomorrow() -> None:
    """A plan bears it for good: whoever adds a field to a record, with a default, leaves it as it is."""
    old = SAMPLES / "from-0.1.0/results/cpu-intel-xeon-processor-2-cores/records.jsonl"
    assert digest(load(old)) == "9bd7437aada17d3e4a4a99000ebfff79fa048fb64111be6ea04e737be4d521ba"


def test_what_was_written_by_earlier_versions_is_still_read() -> None:
    """All that lies under results/: records, devices, cliffs, soaks, plans and receipts."""
    for name in ("nvidia-h200", "cpu-amd-epyc-2-cores"):
        folder = DeviceFolder(ROOT / "results" / name)
        lines = folder.records.read_text().splitlines()
        records = load(folder.records)
        assert len(records) == len(lines) > 0
        for line, record in zip(lines, records, strict=True):
            written, again = json.loads(line), json.loads(json.dumps(record.to_json()))
            assert written.items() <= (again | {"cell": written["cell"]}).items()
            assert written["cell"].items() <= again["cell"].items()
        assert folder.load_device()["kind"] in ("cuda", "cpu")
    cliff = DeviceFolder(ROOT / "results" / "nvidia-h200").load_cliff()
    assert cliff is not None
    assert cliff.device_bytes > 100e9
    plans = sorted((ROOT / "results").rglob("plan.json"))
    assert len(plans) >= 4
    assert all(Plan.load(path).steps > 0 for path in plans)
    said: list[str] = []
    runs = [run for folder in ("nvidia-h200/runs", "cpu-amd-epyc-2-cores")
            for run in calibration.read(ROOT / "results" / folder, said.append)]
    assert not said
    assert len(runs) == len(list((ROOT / "results").rglob("receipt.json"))) >= 4


def test_a_soak_of_an_earlier_version_is_still_read() -> None:
    """As the first that kept them wrote a line."""
    window: dict[str, Any] = {"at_s": 5.0, "steps": 5, "step_s": 0.9, "clock_mhz": 1500.0, "temperature_c": 60.0,
                              "power_w": 90.0,
              "utilization": 99.0, "throttle": 4}
    cell = {"model": "150M", "batch": 4, "length": 512, "accum": 1, "engine": "eager", "recompute": "none", "vocab": 32000,
            "update": "after"}
    kept = Soak.from_json({"schema": 1, "at": "2026-11-01T00:00:00+00:00", "device": "gtx", "software": {"torch": "2.11"},
                           "cell": cell, "minutes": 10.0, "seconds": 10.0, "windows": [window, window | {"at_s": 10.0}],
                           "settled": False})
    assert kept.cell == Cell.of("150M", 4, 512)
    assert kept.windows[0] == Window(**window)
    assert not kept.on_battery
