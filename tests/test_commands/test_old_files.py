"""What 0.1.0 wrote is read as before. tests/samples/from-0.1.0 has a whole chain of it, made on a processor: a grid, a soak,
a plan, a run that finished and one that was stopped after 15 of 20 steps."""

import json
import shutil

import pytest
from helpers.made import ROOT, SAMPLES

from planner.decide import calibration
from planner.decide.inputs import read_inputs
from probe import records, soak
from probe.cliff import Cliff
from probe.store import measured_devices
from trainer.plan import Plan
from trainer.run_folder import RunFolder

OLD = SAMPLES / "from-0.1.0"
DEVICE = "cpu-intel-xeon-processor-2-cores"


def has_all(written: object, values: object) -> bool:
    """Whether what is written now says all that `values` said; fields that were added since may come beside."""
    if isinstance(values, dict):
        return isinstance(written, dict) and all(has_all(written.get(name), value) for name, value in values.items())
    if isinstance(values, list):
        return isinstance(written, list) and len(written) == len(values) and all(map(has_all, written, values))
    return written == values


def told(line: str) -> None:
    pytest.fail(line)


@pytest.fixture
def old(tmp_path):
    """A copy, with the tokens where its run had them."""
    return shutil.copytree(OLD, tmp_path / "old")


@pytest.mark.parametrize("path", sorted([*ROOT.glob("results/*/records.jsonl"), *OLD.glob("results/*/records.jsonl")]),
                         ids=lambda p: f"{p.parents[2].name}-{p.parent.name}")
def test_every_record_is_read_with_all_it_says(path):
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    read = records.load(path, told)
    assert len(read) == len(kept)
    for record, values in zip(read, kept, strict=True):
        assert has_all(json.loads(json.dumps(record.to_json())), values)


def test_what_is_known_of_a_device_leads_to_a_plan():
    measured, inputs = read_inputs(OLD / "results", (), DEVICE, told)
    assert [(r.cell.batch, r.cell.accum) for r in measured] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert all(r.fits for r in measured)
    assert inputs.device["memory"] == {"process_bytes": 330247952}
    assert inputs.calibration(measured[0]).soak == pytest.approx(inputs.soaks[0].factor)
    assert [p.run for p in calibration.read(OLD / "results/runs", told)] == ["finished"]


def test_the_same_plan_comes_of_the_same_records(called, old, tmp_path):
    """But for what the soak and the run, which came after it, correct."""
    for name in ("runs", f"{DEVICE}/soak.jsonl"):
        path = old / "results" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, _, err = called(old, "plan", "--corpus", "30k", "--device", DEVICE, "--out", "again.json")
    assert code == 0, err
    before, again = Plan.load(old / "plan.json"), Plan.load(old / "again.json")
    for name in ("model", "step", "steps", "optimizer", "eval", "checkpoint", "limit_bytes"):
        assert getattr(again, name) == getattr(before, name), name
    assert [r.cell for r in again.runners_up] == [r.cell for r in before.runners_up]
    for name in ("tok_s", "peak_bytes"):
        assert getattr(again.predicted, name) == getattr(before.predicted, name), name
    # evaluations are of other windows since
    assert again.predicted.hours.mid == pytest.approx(before.predicted.hours.mid, rel=0.02)


@pytest.mark.parametrize("path", sorted([OLD / "plan.json", *OLD.glob("results/runs/*/plan.json"),
                                         *ROOT.glob("results/**/plan.json")]), ids=lambda p: p.parent.name)
def test_every_plan_is_read_with_all_it_says(path):
    values = json.loads(path.read_text())
    assert has_all(json.loads(json.dumps(Plan.load(path).to_json())), values)


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*/cliff.json")), ids=lambda p: p.parent.name)
def test_every_cliff_is_read(path):
    cliff = Cliff.load(path)
    assert cliff is not None
    assert cliff.fast_bytes == json.loads(path.read_text())["fast_bytes"]


def test_every_soak_and_device_is_read():
    for results in (ROOT / "results", OLD / "results"):
        for folder in measured_devices(results).values():
            assert folder.load_device()["fingerprint"] == folder.path.name
            if folder.soaks.exists():
                assert soak.load(folder.soaks, told)


def test_a_stopped_run_goes_on_from_its_checkpoint(called, old):
    """To what it would have come to: the log of the run that was not stopped says so, as far as another processor's products
    round the same."""
    code, out, err = called(old, "train", "--plan", "stopped/plan.json", "--data", "data.bin", "--run", "stopped",
                            "--device", "cpu", "--resume")
    assert code == 0, err
    assert "resuming after step 15" in out
    logs = [[json.loads(line) for line in RunFolder(old / name).log.read_text().splitlines()]
            for name in ("results/runs/finished", "stopped")]
    expected, actual = ([(x["step"], x["loss"]) for x in log if x["kind"] == "step"] for log in logs)
    assert [step for step, _ in actual] == [step for step, _ in expected]
    assert [loss for _, loss in actual] == pytest.approx([loss for _, loss in expected], abs=1e-4)
