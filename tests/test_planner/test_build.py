"""From records to hours: the first user's card, several devices and models, and every way of asking."""

import dataclasses
import json
import math

import pytest
from helpers.made import SAMPLES, gtx1060, make_record, there, write_records

from planner.decide.build import PlanRequest, build
from planner.decide.choose import Candidate
from planner.decide.defaults import optimizer, tokens_per_step
from planner.decide.hours import Rates, cadence, run_overheads, steps_for
from planner.decide.inputs import PlanInputs, of_model, read_inputs
from spillcliff.errors import NoPlan, UserError
from spillcliff.hardware.nvml import DriverCard
from trainer.config import ModelConfig, StepConfig
from trainer.plan import Plan

CASE = json.loads((SAMPLES / "gtx1060.json").read_text())
ASK = PlanRequest(corpus_tokens=100_000_000, limit_bytes=5_000_000_000)
RATES = {"disk_write_bytes_s": 1e8, "start_up_s": 5.0}


def test_the_first_users_card_gets_the_plan_it_must_lead_to(command, tmp_path):
    """B=4 L=512; B=6 rejected for both reasons; 6.1, 12.2 and 36.7 hours."""
    write_records(tmp_path / "gtx.jsonl", gtx1060())
    done = command("plan", "--corpus", "100M", "--limit", "5GB", "--records", "gtx.jsonl", "--out", "p.json", "--json")
    assert done.returncode == 0, done.stderr
    out, expected = json.loads(done.stdout), CASE["expected"]
    assert (out["step"]["batch"], out["step"]["length"]) == (expected["batch"], expected["length"])
    (rejected,) = out["rejected"]
    assert rejected["cell"]["batch"] == expected["rejected"]["batch"]
    for wanted, said in zip(expected["rejected"]["because"], rejected["why"], strict=True):
        assert said.startswith(wanted)
    assert {size: round(span["mid"], 1) for size, span in out["hours"].items()} == expected["hours"]
    assert out["predicted"]["tok_s"]["mid"] * 3600 == pytest.approx(expected["tokens_per_hour"], rel=0.001)
    for text in ("6.1 h", "12.2 h", "36.7 h", "5.67 GB is over the 5.0 GB limit", "slower than the smaller batch: spilled"):
        assert text in done.stderr
    assert Plan.load(tmp_path / "p.json").step.batch == 4


def test_no_limit_and_none_known_is_no_plan():
    with pytest.raises(NoPlan, match="--limit 5GB"):
        build(gtx1060(), dataclasses.replace(ASK, limit_bytes=None), PlanInputs())


def test_hours_count_what_was_measured_and_say_what_was_not():
    bare = build([make_record()], ASK, PlanInputs())
    assert any("leave out evaluations, checkpoints, start-up" in line for line in bare.plan.why)
    record = make_record(eval_s=0.5, setup_s=4.0)
    full = build([record], ASK, PlanInputs(RATES))
    assert not any("leave out" in line for line in full.plan.why)
    evaluations = -(-full.plan.steps // full.plan.eval) + 1
    size = 12 * full.plan.model.parameters
    first_step_s = there(record.median_step_s)  # it is in setup_s, and one of the steps
    more = evaluations * 16 * 0.5 + (evaluations - 1) * size / 1e8 + 5 + 4 - first_step_s
    assert (full.plan.predicted.hours.mid - bare.plan.predicted.hours.mid) * 3600 == pytest.approx(more, rel=0.001)


def test_hours_asked_for_come_out():
    forecast = build([make_record(eval_s=0.5, setup_s=1.0)], dataclasses.replace(ASK, corpus_tokens=None, hours=12.0),
                     PlanInputs(RATES))
    assert forecast.plan.predicted.hours.mid == pytest.approx(12, rel=0.002)
    assert forecast.plan.corpus_tokens == pytest.approx(12 * 3600 * 1000, rel=0.03)
    with pytest.raises(NoPlan, match="too short"):
        build([make_record(setup_s=1.0)], dataclasses.replace(ASK, corpus_tokens=None, hours=0.001), PlanInputs(RATES))


def test_a_card_s_run_waits_for_copies_and_the_last_write_alone():
    """Ten checkpoints of 1.2 GB: the first copied at 1 GB/s, nine at 10, the last written at 0.5 GB/s."""
    record = make_record(eval_s=0.5, setup_s=4.0)
    pick, size = Candidate(record, 1), 12 * there(record.model).parameters
    rates = Rates(5.0, 0.5e9, 1e9, 10e9)
    copies_s, last_write_s = size / 1e9 + 9 * size / 10e9, size / 0.5e9
    assert run_overheads(pick, 1e8, 1000, 100, rates).checkpoint_s == pytest.approx(copies_s + last_write_s)
    step_s = there(record.median_step_s)
    slow = dataclasses.replace(rates, disk_write_bytes_s=size / (150 * step_s))
    ten_s, one_s = (there(run_overheads(pick, 1e8, 1000, every, slow).checkpoint_s) for every in (100, 1000))
    waited_s = ten_s - one_s
    assert waited_s == pytest.approx(9 * size / 10e9 + 9 * 50 * step_s)


def test_the_band_holds_the_raw_times_and_what_runs_differ_by():
    r = make_record(step_s=(1.0,) * 8 + (2.0, 2.0))
    p = build([r], ASK, PlanInputs()).plan.predicted
    assert p.tok_s.low < 1024
    assert p.tok_s.mid == pytest.approx(2048)
    assert p.hours.high > 2 * p.hours.mid
    assert p.hours.low < p.hours.mid
    steady = build([make_record()], ASK, PlanInputs()).plan.predicted.tok_s
    # a card nobody ran on: 2% that all runs may be off by and 1% of their own, 1.645 times for 90%
    assert steady.high / steady.mid - 1 == pytest.approx(1.645 * math.hypot(0.02, 0.01), rel=0.05)


def test_steps_cover_the_corpus_and_no_more():
    assert [steps_for(n, 1000) for n in (1, 1000, 1001, 5000)] == [1, 1, 2, 5]
    assert cadence(100, 0.1) == 10
    assert cadence(1_000_000, 0.9) == 1000
    assert cadence(3, 5000) == 1


def test_devices_are_never_mixed(tmp_path):
    here, there = make_record(), make_record(device="nvidia-h200")
    path = write_records(tmp_path / "both.jsonl", [here, there])
    with pytest.raises(UserError, match="nvidia-geforce-gtx-1060, nvidia-h200"):
        read_inputs(tmp_path, (path,), None, print)
    assert read_inputs(tmp_path, (path,), "nvidia-h200", print)[0] == [there]
    alone = write_records(tmp_path / "one.jsonl", [here])
    assert read_inputs(tmp_path, (alone,), None, print)[0] == [here]
    with pytest.raises(UserError, match="nvidia-geforce-gtx-1060"):
        read_inputs(tmp_path, (alone,), "tpu", print)


def test_another_machines_records_are_not_taken_unnamed(tmp_path):
    """Those that come with a fresh clone, say."""
    write_records(tmp_path / "nvidia-geforce-gtx-1060/records.jsonl", [make_record()])
    with pytest.raises(UserError, match=r"probe grid.*nvidia-geforce-gtx-1060"):
        read_inputs(tmp_path, (), None, print)


def test_this_machines_records_are_taken_among_others(tmp_path, monkeypatch):
    monkeypatch.setattr("spillcliff.hardware.nvml.cards", lambda: (DriverCard("GPU-1", "NVIDIA H200"),))
    there = make_record(device="nvidia-h200")
    write_records(tmp_path / "nvidia-geforce-gtx-1060/records.jsonl", [make_record()])
    write_records(tmp_path / "nvidia-h200/records.jsonl", [there])
    for name in (None, "cuda"):
        assert read_inputs(tmp_path, (), name, print)[0] == [there]


def test_the_card_that_is_visible_is_planned_for(tmp_path, monkeypatch):
    """Which of two is hidden by the environment; where CUDA's own order of them can't be told, none is guessed."""
    old, new = DriverCard("GPU-1", "NVIDIA GeForce GTX 1060", speed=2.2e6), DriverCard("GPU-2", "NVIDIA H200", speed=33e6)
    made = {name: make_record(device=name) for name in ("nvidia-geforce-gtx-1060", "nvidia-h200")}
    for name, record in made.items():
        write_records(tmp_path / name / "records.jsonl", [record])

    def planned_for(device=None, **environment):
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return read_inputs(tmp_path, (), device, print)[0][0].device

    monkeypatch.setattr("spillcliff.hardware.nvml.cards", lambda: (old, new))
    assert planned_for() == "nvidia-h200"
    assert planned_for("cuda:1") == "nvidia-geforce-gtx-1060"
    assert planned_for(CUDA_VISIBLE_DEVICES="1") == "nvidia-geforce-gtx-1060"
    assert planned_for(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == "nvidia-h200"
    assert planned_for(CUDA_VISIBLE_DEVICES="GPU-1") == "nvidia-geforce-gtx-1060"
    with pytest.raises(UserError, match="hides 2 of its cards"):
        planned_for(CUDA_VISIBLE_DEVICES="")
    with pytest.raises(UserError, match=r"cuda:1 is not here.*hides 1"):
        planned_for("cuda:1", CUDA_VISIBLE_DEVICES="0")
    monkeypatch.setattr("spillcliff.hardware.nvml.cards", lambda: (old._replace(speed=None), new))
    for device, environment in ((None, {}), ("cuda", {}), (None, {"CUDA_VISIBLE_DEVICES": "1"})):
        with pytest.raises(UserError, match=r"can't be told.*nvidia-h200|can't be told.*NVIDIA H200"):
            planned_for(device, **environment)
    assert planned_for("nvidia-h200") == "nvidia-h200"


def test_models_are_never_mixed():
    a = make_record()
    b = make_record(cell=dataclasses.replace(a.cell, model="10M"), model=ModelConfig.named("10M"))
    with pytest.raises(UserError, match=r"--model 150M.*--model 10M"):
        of_model([a, b], None, None)
    assert of_model([a, b], "10m", None) == [b]
    assert of_model([a], None, None) == [a]
    with pytest.raises(UserError, match="--model 150M"):
        of_model([a, b], "1B", None)
    with pytest.raises(UserError, match="--vocab 32000"):
        of_model([a], None, 99)


def test_defaults_follow_their_law_and_name_it():
    tokens, why = tokens_per_step(100_000_000)
    assert 21_000 < tokens < 22_000
    assert "2503.04715" in why
    model = ModelConfig.named("150M")
    full, _ = optimizer(model, 100_000_000, 1000, StepConfig(1, tokens))
    small, _ = optimizer(model, 100_000_000, 1000, StepConfig(1, tokens // 4))
    assert full.lr == pytest.approx(8.6e-4, rel=0.02)
    assert small.lr == pytest.approx(full.lr / 2, rel=0.02)
    assert full.warmup_steps == 20


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["--corpus", "100M"], 2, "no records"), ([], 2, "--corpus"), (["--corpus", "1M", "--hours", "2"], 2, "--corpus"),
    (["--corpus", "many", "--records", "r.jsonl"], 2, "many"),
    (["--corpus", "1M", "--records", "gone.jsonl"], 2, "gone.jsonl"),
    (["--corpus", "1M", "--records", "r.jsonl", "--limit", "5 apples"], 2, "--limit"),
    (["--corpus", "1M", "--records", "r.jsonl", "--limit", "1GB"], 3, "4.04 GB is over the 1.0 GB limit"),
    (["--corpus", "1M", "--records", "r.jsonl", "--device", "tpu"], 2, "nvidia-geforce-gtx-1060"),
    (["--corpus", "1M", "--records", "r.jsonl", "--epochs", "0"], 2, "epochs"),
    (["--corpus", "bad.bin", "--records", "r.jsonl"], 2, "bad.bin is text"),
    (["--corpus", "1M", "--records", "r.jsonl", "--limit", "5GB", "--out", "r.jsonl/x.json"], 2, "r.jsonl/x.json")])
def test_bad_input_is_one_line_that_names_it(refused, tmp_path, arguments, code, words):
    write_records(tmp_path / "r.jsonl", gtx1060())
    (tmp_path / "bad.bin").write_bytes(b"1234")
    assert words in refused(code, "plan", *arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.bin", "r.jsonl"]


def test_a_corpus_smaller_than_a_step_is_refused_or_given_a_smaller_step(command, refused, token_file, tmp_path):
    """Lightning 3259: 300 tokens for a step of 1,024."""
    write_records(tmp_path / "r.jsonl", [make_record(2, 512)])
    token_file(range(300), name="small.bin")
    ask = ("plan", "--limit", "5GB", "--records", "r.jsonl", "--corpus")
    for corpus in ("300", "small.bin"):
        line = refused(3, *ask, corpus)
        assert "300 tokens have 0 sequences of 512" in line
        assert line.endswith("probe grid --model 150M --batch 1 --length 64")
    write_records(tmp_path / "r.jsonl", [make_record(2, 512), make_record(1, 64), make_record(8, 64)])
    done = command(*ask, "small.bin", "--out", "p.json")
    assert done.returncode == 0, done.stderr
    assert (Plan.load(tmp_path / "p.json").step.batch, Plan.load(tmp_path / "p.json").step.length) == (1, 64)
    audit = command("train", "audit", "--plan", "p.json", "--data", "small.bin", "--device", "cpu").stdout
    assert "ok      data" in audit


def test_the_plan_says_how_its_rate_goes():
    plan = build([make_record()], ASK, PlanInputs()).plan
    assert f"schedule: {plan.optimizer.describe(plan.steps)}" in plan.why
