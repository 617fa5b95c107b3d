"""The audit before a run: each finding from a composed situation, and the command and the starts that go through it."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.made import MODULES, ROOT, SPAN, make_plan
from helpers.waiting import wait_for

from spillcliff.errors import NoKernels, Refused, UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.device import DeviceFacts
from trainer.cli import cli
from trainer.config import ModelConfig, StepConfig
from trainer.data import shards
from trainer.data.scan import scan_file
from trainer.data.tokens import Tokens
from trainer.plan import Predicted, Span
from trainer.run import preflight, preflight_facts
from trainer.run_folder import RunFolder

PLAN = make_plan("card-a", predicted=Predicted(tok_s=SPAN, peak_bytes=Span(3.9e9, 4e9, 4.1e9), hours=SPAN),
                 limit_bytes=5 * 10**9, software={"torch": "2.10.0", "driver": "550"})
CHECKPOINT = 12 * PLAN.model.parameters
CARD = preflight.PreflightFacts(
    plan=PLAN, power_source=0, kind="cuda", fingerprint="card-a", software={"torch": "2.10.0", "driver": "550"},
    free_bytes=6 * 10**9, total_bytes=6 * 10**9, tokens=2000, disk_free_bytes=10**12, others_bytes={}, busy_percent=0,
    temperature_c=50, throttle=1, is_locked=False)
CPU = dataclasses.replace(CARD, kind="cpu", power_source=None, others_bytes=None, busy_percent=None, temperature_c=None,
                          throttle=None, busy_share=0.1)


def finding(what, facts=CARD, **changes):
    return next((f for f in preflight.check(dataclasses.replace(facts, **changes)) if f.what == what), None)


def plan(**changes):
    return dataclasses.replace(PLAN, **changes)


@pytest.mark.parametrize("facts", [CARD, CPU])
def test_a_machine_in_order_has_nothing_against_it(facts):
    findings = preflight.check(facts)
    assert {f.level for f in findings} == {"ok"}
    assert preflight.refusal(findings) is None
    assert not preflight.warnings(findings)


@pytest.mark.parametrize(("what", "level", "words", "changes"), [
    ("power", "refuse", "--allow-battery", {"on_battery": True}),
    ("power", "refuse", "on battery", {"power_source": 1}),
    ("power", "warn", "on battery", {"on_battery": True, "allow_battery": True}),
    ("power", "warn", "supply", {"power_source": 2}),
    ("precision", "refuse", "TF32_OVERRIDE=1", {"tf32_problem": "NVIDIA_TF32_OVERRIDE=1 is set"}),
    ("card", "warn", "planned on card-a, this is card-b", {"fingerprint": "card-b"}),
    ("build", "refuse", "no kernels", {"build_problem": "this torch has no kernels", "kind": None}),
    ("engine", "refuse", "engine graph", {"engine_problem": "engine graph records CUDA graphs"}),
    ("software", "warn", "driver 550 (now 560)", {"software": {"torch": "2.10.0", "driver": "560"}}),
    ("model", "refuse", "out of memory", {"total_bytes": CHECKPOINT - 1}),
    ("model", "ok", "113.1k parameters", {"total_bytes": CHECKPOINT}),
    ("memory", "refuse", "3.99 GB free, the plan's peak is 4.0 GB", {"free_bytes": 3_990_000_000}),
    ("memory", "warn", "leaves 0.1 GB", {"free_bytes": 4_100_000_000}),
    ("memory", "ok", "4.13 GB free", {"free_bytes": 4_130_000_000}),
    ("memory", "ok", "not known", {"free_bytes": None}),
    ("limit", "refuse", "over its own limit of 3.5 GB", {"plan": plan(limit_bytes=3_500_000_000)}),
    ("data", "refuse", "no such file", {"data_problem": "token file x: no such file", "tokens": None}),
    ("data", "ok", "--data", {"tokens": None}),
    ("data", "ok", "each seen 1.5 times", {"tokens": 1366}),  # 32 steps of 64 tokens
    ("data", "warn", "each seen 1.5 times by 32 steps of 64, where the plan has 1 x 1k tokens", {"tokens": 1365}),
    ("data", "refuse", "a step of 2 x 1 sequences is larger than the data, which has 1 to train on", {"sequences": 1}),
    ("data", "ok", "each seen", {"sequences": 2}), ("data", "ok", "each seen", {"sequences": 1, "checkpoints": 1}),
    ("data", "ok", "each seen 1.8 times", {"tokens": 36, "plan": plan(corpus_tokens=69, steps=1)}),  # as it was planned
    ("data", "warn", "each seen 1.8 times", {"tokens": 35, "plan": plan(corpus_tokens=69, steps=1)}),
    ("data", "warn", "each seen 5.3 times", {"tokens": 36, "plan": plan(corpus_tokens=69, steps=3)}),
    ("data", "ok", "each seen 2.0 times", {"tokens": 1000, "plan": plan(epochs=2)}),
    ("disk", "refuse", "make room for 4", {"disk_free_bytes": 2 * CHECKPOINT - 1}),
    ("disk", "warn", "make room for 4: the newest 2 and the best are kept", {"disk_free_bytes": 2 * CHECKPOINT}),
    ("disk", "warn", "make room for 4", {"disk_free_bytes": 4 * CHECKPOINT - 1}),
    ("disk", "ok", "a checkpoint takes 1.36 MB", {"disk_free_bytes": 4 * CHECKPOINT}),
    ("disk", "refuse", "make room for 3", {"disk_free_bytes": CHECKPOINT - 1, "checkpoints": 1}),
    ("disk", "warn", "make room for 2", {"disk_free_bytes": 0, "checkpoints": 2}),
    ("disk", "ok", "free", {"disk_free_bytes": CHECKPOINT, "checkpoints": 3}),
    ("disk", "ok", "free", {"disk_free_bytes": CHECKPOINT, "plan": plan(steps=10)}),  # which writes one
    ("disk", "refuse", "make room for 1", {"disk_free_bytes": CHECKPOINT - 1, "plan": plan(steps=10)}),
    ("disk", "ok", "not known", {"disk_free_bytes": None}),
    ("others", "warn", "process 8 with 2.0 GB, process 7 with 1.0 GB; end them",
     {"others_bytes": {7: 10**9, 8: 2 * 10**9, 9: None}}),
    ("others", "ok", "not known", {"others_bytes": {7: None}}), ("others", "ok", "not known", {"others_bytes": None}),
    ("others", "warn", "80% busy (on it: process 7)", {"others_bytes": {7: None}, "busy_percent": 80}),
    ("thermal", "warn", "86 C; let it cool", {"temperature_c": 86}), ("thermal", "ok", "85 C", {"temperature_c": 85}),
    ("thermal", "warn", "throttle bits 0x20", {"throttle": 0x21}),
    ("lock", "refuse", "another process", {"is_locked": True}),
    ("run folder", "refuse", "--resume", {"folder_problem": "x holds a run already; go on with it by --resume"})])
def test_a_point_says_what_was_seen_and_what_would_be_right(what, level, words, changes):
    findings = preflight.check(dataclasses.replace(CARD, **changes))
    (point,) = [f for f in findings if f.what == what]
    assert (point.level, words in point.seen) == (level, True), point
    assert "\n" not in point.seen
    assert (preflight.refusal(findings) is None) == (level != "refuse")


@pytest.mark.parametrize(("share", "level"), [(0.5, "ok"), (0.51, "warn")])
def test_a_processor_that_others_use_is_warned_of_where_it_trains(share, level):
    assert finding("processor", CPU, busy_share=share).level == level
    assert finding("processor", busy_share=share) is None


def test_a_locked_folder_is_not_also_called_used():
    """A start then ends as refused, exit 4, not as bad input."""
    assert finding("run folder", is_locked=True, folder_problem="x holds a run already") is None


def test_a_refusal_names_all_that_refuse_and_is_bad_input_only_for_what_was_asked():
    both = preflight.refusal(preflight.check(dataclasses.replace(CARD, on_battery=True, free_bytes=10**9)))
    assert isinstance(both, Refused)
    assert str(both).startswith("power: ")
    assert "; memory: " in str(both)
    facts = dataclasses.replace(CARD, on_battery=True, engine_problem="graph needs a card")
    asked = preflight.refusal(preflight.check(facts))
    assert type(asked) is UserError
    assert "power: " in str(asked)
    assert "engine: " in str(asked)


def test_the_table_fits_80_columns_and_every_warning_is_a_line():
    findings = preflight.check(dataclasses.replace(CARD, on_battery=True, fingerprint="card-b", folder_problem="x" * 200))
    table = list(preflight.lines(findings))
    assert max(map(len, table)) <= 80
    assert len(table) > len(findings)
    assert table[0].startswith("REFUSE  power       on battery")
    (warning,) = preflight.warnings(findings)
    assert warning.startswith("warning: card: planned on card-a")


def test_a_card_is_looked_at_through_the_driver(monkeypatch, tmp_path):
    card = DeviceFacts(fingerprint="card-a", name="Card A", kind="cuda", total_bytes=6 * 10**9, capability=(6, 1), cores=10,
                       uuid="GPU-1", torch="2.10.0", cuda="12.6", driver="550", python="3.12", platform="x",
                       allocator="native")
    monkeypatch.setattr(preflight_facts, "device_facts", lambda device: card)
    for name, value in (("free_bytes", 5 * 10**9), ("power_source", 2), ("processes", {os.getpid(): 1, 7: 10**9}),
                        ("readings", {"utilization": 3, "temperature_c": 90, "throttle": 0x40})):
        monkeypatch.setattr(nvml, name, lambda uuid, value=value: value)
    run = RunFolder(tmp_path / "run")
    points = {f.what: f for f in preflight.check(preflight_facts.gather(PLAN, torch.device("cuda"), run, tokens=1000))}
    assert [what for what, f in points.items() if f.level == "warn"][-3:] == ["data", "others", "thermal"]
    assert points["power"].level != "ok"
    assert "process 7 with 1.0 GB;" in points["others"].seen
    assert points["memory"].seen.startswith("5.0 GB free")
    assert points["disk"].level == "ok"
    assert not run.path.exists()


def test_a_build_without_the_kernels_is_a_finding(monkeypatch, tmp_path):
    def resolve(name):
        raise NoKernels("this torch has no kernels for compute capability 6.1")

    monkeypatch.setattr(preflight_facts, "resolve_device", resolve)
    run = RunFolder(tmp_path / "run")
    findings = preflight.check(preflight_facts.gather_for_audit(PLAN, (), (), run, device_name=None, allow_battery=False))
    assert "no kernels" in str(preflight.refusal(findings))
    assert not {"engine", "memory"} & {f.what for f in findings}


@pytest.fixture
def home(tmp_path, token_file):
    token_file([i % 500 for i in range(4000)])
    make_plan("cpu-of-another").save(tmp_path / "plan.json")
    return tmp_path


def scan(home):
    return json.loads((home / "tokens.bin.scan.json").read_text())


def test_the_command_lists_what_it_saw_and_writes_no_run(home, called):
    code, out, err = called(home, "train", "audit", "--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu")
    assert code == 0, err
    assert not err
    rows = out.splitlines()
    assert max(map(len, rows)) <= 80
    assert any(r.startswith("warn    card") for r in rows)
    assert sorted(p.name for p in home.iterdir()) == ["plan.json", "tokens.bin", "tokens.bin.json", "tokens.bin.scan.json"]


def test_the_command_refuses_an_id_past_the_vocabulary(home, called):
    make_plan(model=ModelConfig.named("1M", 400)).save(home / "plan.json")
    code, out, err = called(home, "train", "audit", "--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu",
                            "--json")
    told = json.loads(out)
    assert code == 4
    assert told["refused"]
    (refused,) = [f for f in told["findings"] if f["level"] == "refuse"]
    assert refused["what"] == "data"
    assert "id 400 at position 400 is past the model's vocabulary of 400" in refused["seen"]
    assert err.splitlines()[-1].startswith("error: data: ")


def test_a_start_on_battery_is_refused_unless_it_is_allowed(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setattr(preflight_facts, "on_battery", lambda: True)
    arguments = ["--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu", "--run", "run"]
    with pytest.raises(Refused, match=r"^power: on battery.*--allow-battery$"):
        cli.main(arguments, standalone_mode=False)
    assert "warning: card: planned on cpu-of-another" in capsys.readouterr().out
    assert not (home / "run").exists()
    cli.main([*arguments, "--allow-battery", "--dry-run"], standalone_mode=False)
    assert "warn    power       on battery" in capsys.readouterr().out
    assert not (home / "run").exists()


def test_a_start_with_too_little_disk_is_refused(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr(preflight_facts, "_disk_free", lambda path: 10**6)
    with pytest.raises(Refused, match=r"^disk: 1\.0 MB free, a checkpoint takes 1.36 MB; make room for 4"):
        cli.main(["--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu", "--run", "run"], standalone_mode=False)


def test_of_two_starts_at_once_one_is_refused_and_a_killed_one_leaves_the_folder_free(home):
    make_plan(steps=10**6, eval=10**6, checkpoint=10**6, epochs=10**5).save(home / "plan.json")
    run = RunFolder(home / "run")
    run.path.mkdir()
    starts = [subprocess.Popen(
        [sys.executable, "-m", MODULES["train"], "--plan", "plan.json", "--data", "tokens.bin", "--run", "run",
         "--device", "cpu"], cwd=home, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)}) for _ in range(2)]
    try:
        wait_for(lambda: any(p.poll() is not None for p in starts))
        (ended,) = [p for p in starts if p.poll() is not None]
        assert ended.stderr is not None
        (line,) = ended.stderr.read().strip().splitlines()
        assert ended.returncode == 4
        assert "another process runs in" in line
        wait_for(run.log.exists)
        assert run.is_locked()
        with pytest.raises(Refused, match="another process"), run.locked():
            pass
        assert sum(p.poll() is None for p in starts) == 1
    finally:
        for p in starts:
            p.kill()
            p.communicate()
    assert run.is_locked() is False
    with run.locked():
        pass


@pytest.fixture
def reads(monkeypatch):
    """Counts the pieces of a token file that are read."""
    counts: list[int] = []

    def counted(*bounds):
        counts.append(len(range(*bounds)))
        return range(*bounds)

    monkeypatch.setattr(shards, "range", counted, raising=False)
    return counts


def test_a_scan_is_kept_and_used_while_the_file_is_the_same(home, reads):
    path = home / "tokens.bin"
    Tokens.open(path).check(500)
    stat = path.stat()
    assert scan(home)["size"] == 8000
    assert scan(home)["mtime_ns"] == stat.st_mtime_ns
    assert scan(home)["max_id"] == 499
    assert reads == [1]
    Tokens.open(path).check(600)
    Tokens.open(path).split(StepConfig(1, 99))[1].check(500)
    assert reads == [1]
    with pytest.raises(UserError, match="id 499 at position 499"):  # the kept id says that there is one, not where
        Tokens.open(path).check(499)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    Tokens.open(path).check(500)
    assert reads == [1, 1, 1]
    assert scan(home)["mtime_ns"] == stat.st_mtime_ns + 1000


def test_a_file_that_was_changed_within_its_time_s_resolution_is_read_again(home, reads):
    path = home / "tokens.bin"
    Tokens.open(path).check(500)
    stat = path.stat()
    ids = np.fromfile(path, "<u2")
    ids[0] = 77
    ids.tofile(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    Tokens.open(path).check(500)
    assert reads == [1, 1]


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"size": 8000}', "\u0000", "max_id as text", "max_id below zero"])
def test_a_damaged_scan_is_ignored_and_made_again(home, reads, damage):
    path = home / "tokens.bin"
    Tokens.open(path).check(500)
    whole = scan(home)
    if damage.startswith("max_id"):
        damage = json.dumps(whole | {"max_id": "499" if "text" in damage else -1})
    scan_file(path).write_text(damage)
    Tokens.open(path).check(500)
    assert reads == [1, 1]
    assert scan(home) == whole


def test_a_piece_keeps_no_scan_of_the_file_and_neither_does_a_look_that_may_not_write(home):
    path = home / "tokens.bin"
    Tokens.open(path).split(StepConfig(1, 99))[0].check(500)
    Tokens.open(path).check(500, keep=False)
    assert not scan_file(path).exists()


def test_a_scan_that_can_not_be_kept_is_no_error(home, reads):
    path = home / "tokens.bin"
    scan_file(path).mkdir()
    for _ in range(2):
        Tokens.open(path).check(500)
    assert reads == [1, 1]
