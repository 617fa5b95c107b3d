"""The audit before a run: each finding from a composed situation, and the command and the starts that go through it."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
from helpers.made import MODULES, ROOT, make_plan

from spillcliff.errors import Refused, UserError
from spillcliff.hardware.device import DeviceFacts
from trainer.cli import cli
from trainer.config import ModelConfig
from trainer.data import tokens
from trainer.data.tokens import Tokens, scan_file
from trainer.plan import Predicted, Span
from trainer.run import preflight, preflight_facts
from trainer.run_folder import RunFolder

ANY = Span(1.0, 2.0, 3.0)
PLAN = dataclasses.replace(make_plan("card-a"), predicted=Predicted(ANY, Span(3.9e9, 4e9, 4.1e9), ANY),
                           limit_bytes=5 * 10**9, software={"torch": "2.10.0", "driver": "550"})
CHECKPOINT = 12 * PLAN.model.parameters
CARD = preflight.Situation(
    PLAN, power_source=0, kind="cuda", fingerprint="card-a", software={"torch": "2.10.0", "driver": "550"},
    free_bytes=6 * 10**9, total_bytes=6 * 10**9, tokens=2000, disk_free_bytes=10**12, others={}, busy_percent=0,
    temperature_c=50, throttle=1, held=False)
CPU = dataclasses.replace(CARD, kind="cpu", power_source=None, others=None, busy_percent=None, temperature_c=None,
                          throttle=None, busy_share=0.1)


def finding(what, situation=CARD, **changes):
    found = {f.what: f for f in preflight.judge(dataclasses.replace(situation, **changes))}
    return found.get(what)


def plan(**changes):
    return dataclasses.replace(PLAN, **changes)


@pytest.mark.parametrize("situation", [CARD, CPU])
def test_a_machine_in_order_has_nothing_against_it(situation):
    findings = preflight.judge(situation)
    assert {f.level for f in findings} == {"ok"} and preflight.refusal(findings) is None and not preflight.warnings(findings)


@pytest.mark.parametrize(("what", "level", "words", "changes"), [
    ("power", "refuse", "--allow-battery", {"on_battery": True}),
    ("power", "refuse", "on battery", {"power_source": 1}),
    ("power", "warn", "on battery", {"on_battery": True, "allow_battery": True}),
    ("power", "warn", "supply", {"power_source": 2}),
    ("precision", "refuse", "TF32_OVERRIDE=1", {"tf32": "NVIDIA_TF32_OVERRIDE=1 is set"}),
    ("card", "warn", "planned on card-a, this is card-b", {"fingerprint": "card-b"}),
    ("build", "refuse", "no kernels", {"build": "this torch has no kernels", "kind": None}),
    ("engine", "refuse", "engine graph", {"engine": "engine graph records CUDA graphs"}),
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
    ("data", "ok", "each seen 2.0 times", {"tokens": 1000, "plan": plan(epochs=2)}),
    ("disk", "refuse", "make room for 3", {"disk_free_bytes": 2 * CHECKPOINT - 1}),
    ("disk", "warn", "2 are kept", {"disk_free_bytes": 2 * CHECKPOINT}),
    ("disk", "ok", "a checkpoint takes 1.36 MB", {"disk_free_bytes": 3 * CHECKPOINT}),
    ("disk", "refuse", "make room for 1", {"disk_free_bytes": CHECKPOINT - 1, "checkpoints_there": 2}),
    ("disk", "ok", "free", {"disk_free_bytes": CHECKPOINT, "checkpoints_there": 2}),
    ("disk", "ok", "not known", {"disk_free_bytes": None}),
    ("others", "warn", "process 8 with 2.0 GB, process 7 with 1.0 GB; end them",
     {"others": {7: 10**9, 8: 2 * 10**9, 9: None}}),
    ("others", "ok", "not known", {"others": {7: None}}), ("others", "ok", "not known", {"others": None}),
    ("others", "warn", "80% busy (on it: process 7)", {"others": {7: None}, "busy_percent": 80}),
    ("thermal", "warn", "86 C; let it cool", {"temperature_c": 86}), ("thermal", "ok", "85 C", {"temperature_c": 85}),
    ("thermal", "warn", "throttle bits 0x20", {"throttle": 0x21}),
    ("lock", "refuse", "another process", {"held": True}),
    ("run folder", "refuse", "--resume", {"run_problem": "x holds a run already; go on with it by --resume"})])
def test_a_point_says_what_was_seen_and_what_would_be_right(what, level, words, changes):
    findings = preflight.judge(dataclasses.replace(CARD, **changes))
    (found,) = [f for f in findings if f.what == what]
    assert (found.level, words in found.seen) == (level, True), found
    assert "\n" not in found.seen
    assert (preflight.refusal(findings) is None) == (level != "refuse")


@pytest.mark.parametrize(("share", "level"), [(0.5, "ok"), (0.51, "warn")])
def test_a_processor_that_others_use_is_warned_of_where_it_trains(share, level):
    assert finding("processor", CPU, busy_share=share).level == level
    assert finding("processor", busy_share=share) is None


def test_a_held_folder_is_not_also_called_used():
    """A start then ends as refused, exit 4, not as bad input."""
    assert finding("run folder", held=True, run_problem="x holds a run already") is None


def test_a_refusal_names_all_that_refuse_and_is_bad_input_only_for_what_was_asked():
    both = preflight.refusal(preflight.judge(dataclasses.replace(CARD, on_battery=True, free_bytes=10**9)))
    assert isinstance(both, Refused) and str(both).startswith("power: ") and "; memory: " in str(both)
    asked = preflight.refusal(preflight.judge(dataclasses.replace(CARD, on_battery=True, engine="graph needs a card")))
    assert type(asked) is UserError and "power: " in str(asked) and "engine: " in str(asked)


def test_the_table_fits_80_columns_and_every_warning_is_a_line():
    findings = preflight.judge(dataclasses.replace(CARD, on_battery=True, fingerprint="card-b", run_problem="x" * 200))
    table = list(preflight.lines(findings))
    assert max(map(len, table)) <= 80 and len(table) > len(findings)
    assert table[0].startswith("REFUSE  power       on battery")
    (warning,) = preflight.warnings(findings)
    assert warning.startswith("warning: card: planned on card-a")


def test_a_card_is_looked_at_through_the_driver(monkeypatch, tmp_path):
    facts = DeviceFacts("card-a", "Card A", "cuda", 6 * 10**9, (6, 1), 10, "GPU-1", "2.10.0", "12.6", "550", "3.12",
                        "x", "native")
    monkeypatch.setattr(preflight_facts, "facts", lambda where: facts)
    for name, value in (("free_bytes", 5 * 10**9), ("power_source", 2), ("processes", {os.getpid(): 1, 7: 10**9}),
                        ("readings", {"utilization": 3, "temperature_c": 90, "throttle": 0x40})):
        monkeypatch.setattr(preflight_facts.nvml, name, lambda uuid, value=value: value)
    found = {f.what: f for f in preflight.judge(preflight_facts.look(PLAN, "cuda", tmp_path / "run", tokens=1000))}
    assert [w for w, f in found.items() if f.level == "warn"][-3:] == ["data", "others", "thermal"]
    assert found["power"].level != "ok" and "process 7 with 1.0 GB;" in found["others"].seen
    assert found["memory"].seen.startswith("5.0 GB free") and found["disk"].level == "ok"
    assert not (tmp_path / "run").exists()


def test_a_build_without_the_kernels_is_a_finding(monkeypatch, tmp_path):
    def resolve(name):
        raise preflight_facts.NoKernels("this torch has no kernels for compute capability 6.1")

    monkeypatch.setattr(preflight_facts, "resolve", resolve)
    findings = preflight.judge(preflight_facts.examine(PLAN, None, None, tmp_path / "run", None, False))
    assert "no kernels" in str(preflight.refusal(findings)) and not {"engine", "memory"} & {f.what for f in findings}


@pytest.fixture
def home(tmp_path, token_file):
    token_file([i % 500 for i in range(4000)])
    make_plan("cpu-of-another").save(tmp_path / "plan.json")
    return tmp_path


def scan(home):
    return json.loads((home / "tokens.bin.scan.json").read_text())


def test_the_command_lists_what_it_saw_and_writes_no_run(home, command):
    done = command("train", "audit", "--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu")
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = done.stdout.splitlines()
    assert max(map(len, rows)) <= 80 and any(r.startswith("warn    card") for r in rows)
    assert sorted(p.name for p in home.iterdir()) == ["plan.json", "tokens.bin", "tokens.bin.json", "tokens.bin.scan.json"]


def test_the_command_refuses_an_id_past_the_vocabulary(home, command):
    make_plan("cpu", ModelConfig.named("1M", 400)).save(home / "plan.json")
    done = command("train", "audit", "--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu", "--json")
    out = json.loads(done.stdout)
    assert done.returncode == 4 and out["refused"]
    (refused,) = [f for f in out["findings"] if f["level"] == "refuse"]
    assert refused["what"] == "data" and "id 400 at position 400 is past the model's vocabulary of 400" in refused["seen"]
    assert done.stderr.splitlines()[-1].startswith("error: data: ")


def test_a_start_on_battery_is_refused_unless_it_is_allowed(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setattr(preflight_facts, "on_battery", lambda: True)
    arguments = ["--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu", "--run", "run"]
    with pytest.raises(Refused, match="^power: on battery.*--allow-battery$"):
        cli.main(arguments, standalone_mode=False)
    assert "warning: card: planned on cpu-of-another" in capsys.readouterr().out and not (home / "run").exists()
    cli.main([*arguments, "--allow-battery", "--dry-run"], standalone_mode=False)
    assert "warn    power       on battery" in capsys.readouterr().out and not (home / "run").exists()


def test_a_start_with_too_little_disk_is_refused(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr(preflight_facts, "_disk_free", lambda path: 10**6)
    with pytest.raises(Refused, match="^disk: 1.0 MB free, a checkpoint takes 1.36 MB; make room for 3"):
        cli.main(["--plan", "plan.json", "--data", "tokens.bin", "--device", "cpu", "--run", "run"], standalone_mode=False)


def test_of_two_starts_at_once_one_is_refused_and_a_killed_one_leaves_the_folder_free(home):
    dataclasses.replace(make_plan("cpu"), steps=10**6, eval=10**6, checkpoint=10**6, epochs=10**5).save(home / "plan.json")
    (home / "run").mkdir()
    starts = [subprocess.Popen(
        [sys.executable, "-m", MODULES["train"], "--plan", "plan.json", "--data", "tokens.bin", "--run", "run",
         "--device", "cpu"], cwd=home, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)}) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while not (ended := [p for p in starts if p.poll() is not None]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (line,) = ended[0].stderr.read().strip().splitlines()
        assert ended[0].returncode == 4 and "another process runs in" in line
        assert RunFolder.held(home / "run") and sum(p.poll() is None for p in starts) == 1
        with pytest.raises(Refused, match="another process"), RunFolder.alone(home / "run"):
            pass
    finally:
        for p in starts:
            p.kill()
            p.communicate()
    assert RunFolder.held(home / "run") is False
    with RunFolder.alone(home / "run"):
        pass


@pytest.fixture
def reads(monkeypatch):
    """Counts the pieces of a token file that are read."""
    seen = []

    def counted(*bounds):
        seen.append(len(range(*bounds)))
        return range(*bounds)

    monkeypatch.setattr(tokens, "range", counted, raising=False)
    return seen


def test_a_scan_is_kept_and_used_while_the_file_is_the_same(home, reads):
    path = home / "tokens.bin"
    Tokens.open(path).check(500)
    stat = path.stat()
    assert scan(home) == {"size": 8000, "mtime_ns": stat.st_mtime_ns, "max_id": 499} and reads == [1]
    Tokens.open(path).check(600)
    Tokens.open(path).split(100)[1].check(500)
    assert reads == [1]
    with pytest.raises(UserError, match="id 499 at position 499"):  # the kept id says that there is one, not where
        Tokens.open(path).check(499)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    Tokens.open(path).check(500)
    assert reads == [1, 1, 1] and scan(home)["mtime_ns"] == stat.st_mtime_ns + 1000


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"size": 8000}', "\u0000", "max_id as text", "max_id below zero"])
def test_a_damaged_scan_is_ignored_and_made_again(home, reads, damage):
    path = home / "tokens.bin"
    Tokens.open(path).check(500)
    whole = scan(home)
    if damage.startswith("max_id"):
        damage = json.dumps(whole | {"max_id": "499" if "text" in damage else -1})
    scan_file(path).write_text(damage)
    Tokens.open(path).check(500)
    assert reads == [1, 1] and scan(home) == whole


def test_a_piece_keeps_no_scan_of_the_file_and_neither_does_a_look_that_may_not_write(home):
    path = home / "tokens.bin"
    Tokens.open(path).split(3999)[0].check(500)
    Tokens.open(path).check(500, keep=False)
    assert not scan_file(path).exists()


def test_a_scan_that_can_not_be_kept_is_no_error(home, reads):
    path = home / "tokens.bin"
    scan_file(path).mkdir()
    for _ in range(2):
        Tokens.open(path).check(500)
    assert reads == [1, 1]
