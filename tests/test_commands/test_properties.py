"""Whatever has happened to a file, reading it ends in UserError, one line that names the file, or in a value that all which
is done with it can bear. `--long` for more."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.damage import damaged, mangled
from helpers.made import make_cliff, make_record, there, write_records
from helpers.runs import open_run
from hypothesis import given
from hypothesis import strategies as st

from planner.decide import calibration
from planner.decide.build import PlanRequest, build
from planner.decide.inputs import PlanInputs, models_in, of_model, read_inputs
from planner.report import terminal
from planner.report.page import html_page
from planner.report.page_data import page_data
from probe import cliff as cliffs
from probe import records, soak
from probe.cell import Cell
from probe.cliff import Cliff
from probe.estimate.peak import CardMemory, estimate
from probe.grid import search
from probe.health.observe import newest_running
from probe.health.run_log import RunLogReader, is_silent
from probe.show import heatmap, text
from probe.show.measured import memory_of
from probe.soak import Soak, Window
from probe.store import Store
from spillcliff.errors import NoPlan, UserError
from spillcliff.files import write_json
from spillcliff.hardware.device import device_facts
from trainer import checkpoint
from trainer.config import StepConfig, update_refusal
from trainer.data.scan import scan_file
from trainer.data.tokens import Tokens, sidecar, write_sidecar
from trainer.plan import Plan, eval_batches, is_due, times_due
from trainer.run import preflight
from trainer.run.log import Throughput, live_line
from trainer.run.receipt import make_receipt, receipt_rows
from trainer.run_folder import RunFolder, new_run_folder

SOFTWARE: dict[str, str | None] = {"torch": "2.13.0", "cuda": "12.6", "driver": "560.94", "python": "3.12.3",
                                   "platform": "Windows", "allocator": "native"}
RECORDS = [make_record(b, n, t, p, software=SOFTWARE, eval_s=0.3, setup_s=2.0, cell_s=9.0, warmup_s=(1.0, 0.9),
                       free_at_start_bytes=5_600_000_000, predicted_bytes=int(p),
                       readings={"power_w": 78.0, "throttle": 0}, **more)
           for b, n, t, p, more in ((2, 512, 2100, 3.2e9, {}), (4, 512, 2269, 4.04e9, {}),
                                    (4, 512, 2280, 4.04e9, {"accum": 2}), (2, 256, 2000, 2.9e9, {}),
                                    (4, 256, 2150, 3.3e9, {}), (6, 512, 1067, 5.67e9, {"status": "spills", "why": "full"}))]
SOAK = Soak(schema=1, at="2026-01-01T00:00:00+00:00", device=RECORDS[0].device, software=SOFTWARE, cell=RECORDS[1].cell,
            minutes=2.0, seconds=120.0, settled=True, windows=tuple(
                Window(10.0 * i, 10, 0.9 + 0.01 * i, 1700.0 - i, 60.0 + i, 78.0, 99.0, 4) for i in range(1, 9)))
DEVICE = {"schema": 1, "fingerprint": RECORDS[0].device, "name": "NVIDIA GeForce GTX 1060", "kind": "cuda",
          "total_bytes": 6442254336, "capability": [6, 1], "cores": 10, "uuid": "GPU-1", **SOFTWARE,
          "memory": {"context_bytes": 784334848, "graph_bytes": 0}, "start_up_s": 8.1, "disk_write_bytes_s": 1.3e9,
          "first_copy_bytes_s": 1.5e9, "copy_bytes_s": 1.3e10}
CLIFF = make_cliff("collapse", 5e9, 5.2e9)
REQUEST = PlanRequest(corpus_tokens=100_000_000, limit_bytes=5_000_000_000)
PLAN = build(RECORDS, REQUEST, PlanInputs(device=DEVICE, cliff=CLIFF, soaks=(SOAK,))).plan
PLAN = dataclasses.replace(PLAN, at=RECORDS[0].at)


def read_or_told(read, *names):
    """What `read` gives; None if it ended in a UserError, whose message must be one line that has all `names`."""
    try:
        return read()
    except UserError as e:
        line = str(e)
    assert len(line.splitlines()) == 1, line
    assert len(line) < 1000
    assert all(str(name) in line for name in names), line
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@given(damaged(PLAN.to_json()))
def test_a_plan(folder, data):
    path = folder / "plan.json"
    path.write_bytes(data)
    plan = read_or_told(lambda: Plan.load(path), path)
    if plan is None:
        return
    plan.save(folder / "again.json")
    assert json.dumps(Plan.load(folder / "again.json").to_json()) == json.dumps(plan.to_json())
    throughput = Throughput(plan.step.tokens)
    for line in (plan.describe(), live_line(plan, 3, 2.0, throughput, 10**9)):
        assert len(line.splitlines()) == 1
    receipt = make_receipt(plan, None, 10**9, 100.0, {})
    assert len(receipt_rows(receipt)) == 3
    assert json.dumps(receipt)
    assert eval_batches(plan.corpus_tokens, plan.step) >= 1
    assert times_due(plan.steps, plan.eval) >= 2
    assert is_due(plan.steps, plan.steps, plan.checkpoint)
    assert update_refusal(plan.step, plan.optimizer) is None
    warm = plan.optimizer.warmup_steps
    for step in (0, 1, warm - 1, warm, plan.steps // 2, plan.steps - 1):
        assert 0 <= plan.optimizer.lr_at(max(0, step), plan.steps) <= plan.optimizer.lr
    run = new_run_folder(folder, plan)
    assert run.path.parent == folder / "runs"
    run.start(plan)
    shutil.rmtree(run.path)
    facts = preflight.PreflightFacts(plan, kind="cuda", fingerprint="a", software=SOFTWARE | {"torch": "1"},
                                     free_bytes=10**9, total_bytes=10**9, tokens=1000, disk_free_bytes=10**9,
                                     others_bytes={})
    findings = preflight.check(facts)
    assert all(len(line) <= 80 for line in preflight.lines(findings))
    assert preflight.refusal(findings) or preflight.warnings(findings)
    assert html_page(page_data(plan, RECORDS[:3], PlanInputs(), [])).encode()


@given(damaged(RECORDS[2].to_json(), *(b"".join(json.dumps(r.to_json()).encode() + b"\n" for r in some)
                                       for some in (RECORDS[:2], RECORDS[3:]))))
def test_records(folder, data):
    path = folder / "records.jsonl"
    path.write_bytes(data.replace(b"}{", b"}\n{"))
    read_or_told(lambda: read_inputs(folder, (path,), PLAN.device, print), path)
    kept = read_or_told(lambda: records.load(path), path)
    if not kept:
        return
    records.append(path, RECORDS[0])
    assert len(records.frame(kept)) == len(kept)
    assert len(records.latest(kept)) <= len(kept)
    assert records.load(write_records(folder / "again.jsonl", kept)) == kept
    for of_series in heatmap.series_of(kept).values():
        assert all(len(line) <= 80 for line in text.map_lines(of_series, 5 * 10**9, None))
        assert search.left_out([r.cell for r in of_series], {r.cell: r for r in of_series[1:]}, 5 * 10**9) is not None
    for r in kept:
        assert text.row(r.cell, r, "")
    text.summary(kept)
    for device in {r.device for r in kept}:
        of_device = [r for r in kept if r.device == device]
        plan = None
        for model, vocab in _models(of_device):
            try:
                forecast = build(of_model(of_device, model, vocab), REQUEST, PlanInputs(device=DEVICE, soaks=(SOAK,)))
            except NoPlan:
                continue
            plan = forecast.plan
            assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
            assert terminal.lines(forecast)
            assert terminal.hour_rows(forecast)
            terminal.runner_rows(forecast)
        assert html_page(page_data(plan, of_device[1:4] or of_device, PlanInputs(), [])).encode()


def _models(measured):
    try:
        return models_in(measured)
    except NoPlan:
        return []


@pytest.fixture(scope="module")
def run(folder):
    run = open_run(folder)
    write_json(run.folder.receipt, run.train() | {"ratio": {"tok_s": 0.9, "peak_bytes": 1.0, "hours": 1.1}})
    return run


@given(st.data())
def test_a_token_file(folder, data):
    """Ids, sidecar or kept scan; a plan's model has 300 rows."""
    path, shape = folder / "tokens.bin", StepConfig(3, 16, 2)
    ids = np.arange(2000) % 300
    ids.astype("<u2").tofile(path)
    write_sidecar(path, len(ids), 300, "tokenizer.json")
    scan_file(path).unlink(missing_ok=True)
    Tokens.open(path).check(300)
    hurt = data.draw(st.sampled_from((path, sidecar(path), sidecar(path), scan_file(path), scan_file(path))))
    how = mangled(path.read_bytes()) if hurt == path else damaged(json.loads(hurt.read_bytes()))
    hurt.write_bytes(data.draw(how))

    def read():
        tokens = Tokens.open(path)
        tokens.check(300)
        return tokens, tokens.windows(16)

    if both := read_or_told(read, path):
        tokens, count = both
        assert count == (len(tokens.ids) - 1) // 16
        assert tokens.checksum() >= 0
        assert tokens.where(7, shape)
        training, _ = tokens.split(shape)
        for some in (tokens.batch(0, 7, shape), *tokens.fixed_batches(3, 16, 2), *training.fixed_batches(3, 16, 2)):
            assert some.dtype == np.int32
            ids = some ^ (some >> 31)  # what fills an evaluation's last batch up is masked
            assert ids.min() >= 0
            assert ids.max() < 300
            assert some.shape[-1] == 17
        assert tokens.tokenizer is None or Path(tokens.tokenizer).is_file() is False


@given(damaged(DEVICE))
def test_a_device_file(folder, data):
    path = folder / RECORDS[0].device / "device.json"
    write_records(path.with_name("records.jsonl"), RECORDS)
    path.write_bytes(data)
    read = read_or_told(lambda: read_inputs(folder, (), RECORDS[0].device, print), path)
    memory = read_or_told(lambda: memory_of(folder, RECORDS[0].device), path)
    assert (read is None) == (memory is None)
    if read is None:
        return
    measured, about = read
    assert estimate(Cell.of("1M", 1, 16), memory[0]).device_bytes > 0
    assert build(measured, REQUEST, about).plan.predicted.hours.mid > 0
    if memory[0] != CardMemory.of(DEVICE):  # of which the estimates of what would fit are made
        with pytest.raises(NoPlan):
            build(measured[:1], dataclasses.replace(REQUEST, limit_bytes=10**9), about)
    here = device_facts(torch.device("cpu"))
    read_or_told(lambda: Store(folder, dataclasses.replace(here, fingerprint=RECORDS[0].device), {}), folder)


@given(damaged(dataclasses.asdict(CLIFF)))
def test_a_cliff(folder, data):
    path = folder / "cliff.json"
    path.write_bytes(data)
    cliff = read_or_told(lambda: Cliff.load(path), path)
    if cliff is None:
        return
    assert len(text.cliff_line(cliff).splitlines()) == 1
    assert there(cliffs.default_limit(RECORDS, cliff))[0] >= 0
    assert there(cliffs.spill_bound(6 * 10**9, cliff, 10**9)[0]) >= 0
    assert cliff.shows_fast(RECORDS[0]) in (True, False)
    html_page(page_data(None, RECORDS[:3], PlanInputs(device=DEVICE, cliff=cliff), []))
    if cliff.device_bytes > 5 * 10**9:
        assert build(RECORDS, dataclasses.replace(REQUEST, limit_bytes=None), PlanInputs(device=DEVICE, cliff=cliff)).plan


@given(damaged(SOAK.to_json(), *[json.dumps(SOAK.to_json()).encode() + b"\n"] * 2))
def test_soaks(folder, data):
    path = folder / "soak.jsonl"
    path.write_bytes(data.replace(b"}{", b"}\n{"))
    soaks = read_or_told(lambda: soak.load(path), path)
    if not soaks:
        return
    for s in soaks:
        assert soak.lines(s)
        assert s.factor > 0
        assert (s.energy_wh or 0) >= 0
        assert Soak.from_json(json.loads(json.dumps(s.to_json()))) == s
    about = PlanInputs(device=DEVICE, cliff=CLIFF, soaks=tuple(soaks))
    assert html_page(page_data(build(RECORDS, REQUEST, about).plan, RECORDS[:3], about, []))


@given(st.data())
def test_a_receipt(folder, run, data):
    """Which is left out, and named, where it can't be read: so is one whose plan can't."""
    copy = folder / "copy/first"
    shutil.rmtree(copy.parent, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in ("receipt.json", "plan.json"):
        shutil.copyfile(run.folder.path / name, copy / name)
    hurt = copy / data.draw(st.sampled_from(("receipt.json", "receipt.json", "receipt.json", "plan.json")))
    hurt.write_bytes(data.draw(damaged(json.loads(hurt.read_bytes()))))
    said: list[str] = []
    past = calibration.read(copy.parent, said.append)
    assert len(past) + len(said) == 1, said
    assert all(str(hurt) in line and len(line.splitlines()) == 1 for line in said), said
    about = PlanInputs(device=DEVICE, past=tuple(past), soaks=(SOAK,))
    forecast = build(RECORDS, REQUEST, about)
    assert terminal.past_rows(forecast, about.past) is not None
    if past:  # without one the page is as it is for any other plan
        assert html_page(page_data(forecast.plan, RECORDS[:3], about, []))


@given(st.data())
def test_a_checkpoint_s_facts(run, data):
    """Damaged, or sealed again after the damage, so that what they say is looked at."""
    said: list[str] = []
    newest = sorted((run.folder.path / "checkpoints").iterdir())[-1]
    path = newest / checkpoint.FACTS
    whole = path.read_bytes()
    hurt = data.draw(damaged(json.loads(whole)))
    try:
        if data.draw(st.booleans()):
            values = json.loads(hurt)
            values.pop("sha256", None)
            hurt = json.dumps(checkpoint._sealed(values)).encode()
    except (AttributeError, RecursionError, TypeError, ValueError):
        pass
    path.write_bytes(hurt)
    try:
        run.say = said.append
        facts = read_or_told(lambda: checkpoint.check(newest), "state.")
        if read_or_told(lambda: run.resume() or True, run.folder.path) and facts:
            assert 0 <= run.start <= run.plan.steps
            assert f"resuming after step {run.start}" in said
            assert json.dumps(run.ledger.of_total(100.0), allow_nan=False)
        assert (facts is None) == any("step-00000008 is broken" in line for line in said), (facts, said)
        checkpoint._prune(run.folder, 8)
    finally:
        path.write_bytes(whole)


@given(st.data())
def test_a_run_s_log_and_its_process_file(folder, run, data):
    """A line of the log that is none is passed over; what is told of the run then is of the others."""
    copy = folder / "results/runs/first"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in ("log.jsonl", "process.json", "plan.json"):
        shutil.copyfile(run.folder.path / name, copy / name)
    lines = (copy / "log.jsonl").read_bytes().splitlines(keepends=True)
    at = data.draw(st.sampled_from((0, 1, 4, len(lines) - 1)))
    if is_log := data.draw(st.booleans()):
        before = data.draw(st.sampled_from((b"", b"".join(lines[:at]))))
        hurt = data.draw(damaged(json.loads(lines[at]), before, b"\n" + b"".join(lines[at + 1:]) if before else b"\n"))
        (copy / "log.jsonl").write_bytes(hurt)
    else:
        (copy / "process.json").write_bytes(data.draw(damaged(json.loads((copy / "process.json").read_bytes()))))
    status = read_or_told(lambda: RunLogReader(RunFolder(copy)).status(0, 0.0), copy / "process.json")
    assert status or not is_log
    if status:
        assert is_silent(status) in (True, False)
        assert status.step <= status.steps or is_log
        if status.tok_s is not None:
            assert status.tok_s > 0
            assert sum(status.shares.values()) == pytest.approx(1.0)
    read_or_told(lambda: newest_running(folder / "results"), folder)
