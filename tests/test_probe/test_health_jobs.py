"""Jobs that run are named for what they are, out of order on purpose, or well; and nothing is done to them."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.jobs import (
    WINDOW,
    disorder,
    end,
    findings_in,
    findings_of,
    processes,
    start_health,
    start_run,
    wait_for_findings,
)
from helpers.made import make_cliff
from helpers.waiting import PATIENCE_S, wait_for

from probe.health import job_files
from probe.health.cards import card_called, card_of
from probe.health.diagnose import diagnose, lines
from probe.health.observe import JobObserver, newest_running
from probe.health.run_log import RunLogReader
from probe.store import DeviceFolder
from spillcliff.errors import UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.nvml import DriverCard
from spillcliff.hardware.windows_counters import GpuMemory
from trainer.plan import Plan
from trainer.run_folder import RunFolder

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
RUN = Path("results/runs/job")


@pytest.fixture(scope="module")
def home(home):
    """With a plan whose run would take hours, in steps of some ten milliseconds."""
    plan = Plan.load(home / "plan.json")
    dataclasses.replace(plan, steps=10**6, eval=10, checkpoint=60).save(home / "plan.json")
    return home


def write_run(home: Path, name: str | Path, pid: int, started_at: float) -> RunFolder:
    """A run's folder with a process file and a checkpoint."""
    folder = RunFolder(home / name)
    folder.checkpoint(30).mkdir(parents=True)
    shutil.copy(home / "plan.json", folder.plan)
    folder.process.write_text(json.dumps({"pid": pid, "started_at": started_at, "ran_on": "cpu-x"}))
    return folder


@pytest.fixture(scope="module")
def findings(home):
    """What is found of one run that is well, then out of order in each way, and at last killed while it is watched without
    being named; of it as any other process, too: {what it is: findings by check}."""
    results = home / "results"
    write_run(home, "results/runs/older", os.getpid(), psutil.Process().create_time())
    job, states = start_run(home, str(RUN)), {}
    try:
        wait_for(lambda: RunFolder(home / RUN).checkpoint_steps())
        assert newest_running(results) == home / RUN
        observer = JobObserver.of_run(home / RUN, None, results, WINDOW)
        states["well"] = wait_for_findings(observer, speed="steady")
        disorder(home, "evaluating")
        states["evaluating"] = wait_for_findings(observer, speed="evaluation stall")
        disorder(home, "starved")
        states["starved"] = wait_for_findings(observer, speed="data bubble")
        foreign = JobObserver(job.pid, None, None, results, WINDOW)
        states["foreign"] = wait_for_findings(foreign, speed="data bubble")
        if sys.platform != "win32":
            job.send_signal(signal.SIGSTOP)
            states["paused"] = wait_for_findings(observer, alive="stopped")
            job.send_signal(signal.SIGCONT)
        disorder(home, "stuck")
        states["stuck"] = wait_for_findings(observer, alive="stuck")
        assert job.poll() is None  # which observing has not harmed
        watch = start_health(home, "--watch", "--json")
        assert watch.stderr
        assert f"run {RUN}, pid {job.pid}" in watch.stderr.readline()
        end(job)
        out, err = watch.communicate(timeout=PATIENCE_S)
        assert watch.returncode == 0, err
        return states | {"killed": findings_in(out)}
    finally:
        end(job)


@pytest.mark.parametrize(("job", "check", "level", "words"), [
    ("well", "alive", "ok", "log lines"),
    ("well", "speed", "ok", "tok/s"),
    ("well", "checkpoints", "ok", "every 60 steps"),
    ("well", "sources", "ok", "no source file"),
    ("starved", "speed", "bad", "data "),
    ("starved", "alive", "ok", "log lines"),
    ("foreign", "speed", "bad", "busy"),
    ("evaluating", "speed", "bad", "evaluation "),
    ("stuck", "alive", "bad", "no line in the log"),
    ("killed", "alive", "bad", f"--run {RUN} --resume"),
    pytest.param("paused", "alive", "bad", "SIGCONT", marks=POSIX),
])
def test_a_run_is_named_for_what_it_is(findings, job, check, level, words):
    assert findings[job][check].level == level
    assert words in findings[job][check].line


def test_doubled_processes_and_a_stub_of_another_program(tmp_path):
    """Beside one worker a stub costs nothing; a second worker is told."""
    with processes(tmp_path, "worker", "stub") as (worker, stub):
        of_worker, of_stub = (JobObserver(p.pid, None, "cpu", tmp_path, WINDOW) for p in (worker, stub))
        assert f"the worker is pid {worker.pid} " in wait_for_findings(of_worker, doubled="stubs")["doubled"].line
        assert f"the worker is pid {worker.pid} " in wait_for_findings(of_stub, doubled="stub")["doubled"].line
        with processes(tmp_path, "worker") as (second,):
            both = wait_for_findings(JobObserver(worker.pid, None, "cpu", tmp_path, WINDOW), doubled="doubled")
            assert both["doubled"].level == "bad"
            assert str(second.pid) in both["doubled"].line


def test_a_launcher_is_told_from_its_worker_and_an_edited_script_is_told(tmp_path):
    with processes(tmp_path, "launcher") as (launcher,):
        script = tmp_path / "job.py"
        os.utime(script, (time.time() + 60,) * 2)
        child = psutil.Process(launcher.pid).children()[0].pid
        of_launcher, of_child = (JobObserver(pid, None, "cpu", tmp_path, WINDOW) for pid in (launcher.pid, child))
        findings = wait_for_findings(of_launcher, alive="running", doubled="launcher", sources="newer")
        assert f"the worker is pid {child} " in findings["doubled"].line
        assert "job.py" in findings["sources"].line
        assert f"the worker is pid {child} " in wait_for_findings(of_child, doubled="launcher")["doubled"].line


def test_sources_of_our_runs_are_looked_for_in_the_trainers_sub_folders(monkeypatch, tmp_path):
    """An edit of the loop counts as much as one of the command line."""
    for name in ("cli.py", "run/loop.py"):
        (tmp_path / "trainer" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "trainer" / name).touch()
        os.utime(tmp_path / "trainer" / name, (0, 0))
    monkeypatch.chdir(tmp_path)
    itself = psutil.Process()
    assert job_files.newer_sources(itself, is_ours=True) == ()
    os.utime(tmp_path / "trainer/run/loop.py", (itself.create_time() + 60,) * 2)
    newer = job_files.newer_sources(itself, is_ours=True)
    assert newer
    (name, younger_s), = newer
    assert name == "loop.py"
    assert younger_s == pytest.approx(60, abs=1)


def test_what_cannot_be_observed_is_told_in_one_line(called, home, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    refused: dict[str, tuple[object, ...]] = {
        "no such process": ("--pid", ended.pid), "such process;": ("--pid", 2**40), "not in the range": ("--pid", 0),
        "no plan.json": ("--run", tmp_path), "give one of them": ("--run", "whole", "--pid", 1),
        "under empty": ("--results", "empty"), "can be read here": ("--pid", os.getpid(), "--device", "cuda:99")}
    for words, arguments in refused.items():
        code, out, err = called(home, "probe", "health", *arguments)
        assert code == 2
        assert out == ""
        assert words in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1


H200S = (DriverCard("GPU-1", "NVIDIA H200"), DriverCard("GPU-2", "NVIDIA H200"))


@pytest.mark.parametrize(("ran_on", "recorded", "uuid"), [
    (None, "", "GPU-2"), ("nvidia-h200", "", "GPU-2"), ("nvidia-h200-x2", "", "GPU-2"),
    ("nvidia-h200-x2-sharded", "", "GPU-2"), ("nvidia-a2", "", "GPU-3"), ("cpu-x", "", None),
    ("nvidia-h200", "GPU-1", "GPU-1"), ("nvidia-h200", "GPU-of-another-machine", "GPU-2"),
    ("amd-mi300x", "", ""), ("mps-apple-m4", "", "")])
def test_the_card_of_a_job_is_the_one_that_it_holds_memory_on_or_ran_on(monkeypatch, ran_on, recorded, uuid):
    """A card that can't be read is none that can, and no processor."""
    monkeypatch.setattr(nvml, "cards", lambda: (*H200S, DriverCard("GPU-3", "NVIDIA A2")))
    monkeypatch.setattr(nvml, "processes", lambda uuid: {7: 10**9} if uuid == "GPU-2" else {8: 10**10})
    monkeypatch.setattr(nvml, "used_bytes", lambda uuid: 10**9)
    assert card_of({7}, ran_on, recorded, None, {}) == uuid


@pytest.mark.parametrize(("environment", "uuid"), [
    ({"CUDA_VISIBLE_DEVICES": "1"}, "GPU-2"), ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, "GPU-1"), ({}, ""),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, "")])
def test_a_job_that_the_driver_does_not_name_is_on_the_card_that_it_can_see(monkeypatch, environment, uuid):
    """Under Windows and in containers; of several that it sees none is guessed, the fullest as little as the first."""
    monkeypatch.setattr(nvml, "cards", lambda: H200S)
    monkeypatch.setattr(nvml, "processes", lambda uuid: {})
    monkeypatch.setattr(nvml, "used_bytes", lambda uuid: 10**9 if uuid == "GPU-1" else 0)
    assert card_of({7}, "nvidia-h200", "", None, environment) == uuid
    assert card_of({7}, None, "", {7: {"luid": GpuMemory(10**9, 0)}}, environment) == uuid
    assert card_of({7}, None, "", None, environment) is None


def test_the_card_that_is_named_is_the_one_that_is_visible_by_that_name(monkeypatch):
    monkeypatch.setattr(nvml, "cards", lambda: (*H200S, DriverCard("GPU-3", "NVIDIA A2")))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    found = {name: card_called(name) for name in ("cpu", "cuda", "cuda:0", "cuda:1", "nvidia-h200", "nvidia-a2")}
    assert list(found.values()) == [None, "GPU-3", "GPU-3", "GPU-2", "GPU-2", "GPU-3"]
    with pytest.raises(UserError, match=r"cuda:2.*one of cpu, cuda:0, cuda:1, nvidia-h200, nvidia-a2"):
        card_called("cuda:2")


@pytest.mark.parametrize("readings", [{}, {"clock_mhz": 1410.0, "temperature_c": 40.0}])
def test_a_card_that_tells_nothing_gets_no_verdict(monkeypatch, tmp_path, readings):
    """An instance of MIG refuses how busy it is: neither an idle card, nor the processor's time as the card's."""
    monkeypatch.setattr(nvml, "cards", lambda: (DriverCard("GPU-1", "NVIDIA A100", (("MIG-1", "NVIDIA A100 MIG 1g.5gb"),)),))
    monkeypatch.setattr(nvml, "processes", lambda uuid: {os.getpid(): None} if uuid == "MIG-1" else {})
    monkeypatch.setattr(nvml, "readings", lambda uuid: readings)
    observer = JobObserver(os.getpid(), None, None, tmp_path, WINDOW)
    for _ in range(3):
        observer.sample()
    assert observer.title.endswith("on nvidia-a100-mig-1g-5gb")
    o = observer.observation()
    for still in (o, dataclasses.replace(o, cpu_s=0.0, seconds=60.0)):
        found = {f.check: f for f in diagnose(still)}
        assert (found["speed"].level, found["speed"].what) == ("ok", "unknown")
        assert "does not tell how busy" in found["speed"].line
        assert "% busy" not in found["speed"].line
        assert found["alive"].what == "running"


def test_a_job_on_a_card_is_observed_by_what_the_driver_says(monkeypatch, tmp_path):
    """Its own memory and not all that is taken, the busiest of the others, the card's limits and its measured cliff."""
    itself, cliff = os.getpid(), make_cliff("collapse", 5e9, 5.2e9)
    cliff.save(DeviceFolder(tmp_path / "nvidia-geforce-gtx-1060").cliff)
    answers = {
        "cards": (DriverCard("GPU-1", "NVIDIA GeForce GTX 1060"),), "processes": {itself: 4 * 10**9, 7: 10**9},
        "used_bytes": 5 * 10**9, "free_bytes": 10**9, "power_source": 1,
        "utilization_since": {itself: 60.0, 7: 30.0, 8: 2.0},
        "readings": {"utilization": 97.0, "clock_mhz": 1500.0, "throttle": 4}, "limits": {"clock_max_mhz": 1670.0}}
    for name, answer in answers.items():
        monkeypatch.setattr(nvml, name, lambda *arguments, answer=answer: answer)
    observer = JobObserver(itself, None, None, tmp_path, WINDOW)
    observer.sample()
    o = observer.observation()
    assert observer.title == f"pid {itself} on nvidia-geforce-gtx-1060"
    assert (o.kind, o.card_bytes, o.fast_bytes, o.clock_max_mhz, o.power_limit_w) == (
        "cuda", 6 * 10**9, cliff.device_bytes, 1670.0, None)
    assert (o.other_pid, o.other_percent, o.on_battery) == (7, 30.0, True)
    (sample,) = o.samples
    assert (sample.memory_bytes, sample.utilization, sample.throttle, sample.power_w) == (4 * 10**9, 97.0, 4, None)


def denied(*arguments):
    raise psutil.AccessDenied()


def test_a_process_of_another_user_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil.Process, "cpu_times", denied)
    with pytest.raises(UserError, match="another user's"):
        JobObserver(os.getpid(), None, None, tmp_path, WINDOW)


def test_a_process_that_keeps_its_files_to_itself_is_judged_by_the_rest(monkeypatch, tmp_path):
    """Its command line, folder, environment and memory can't be read, as of another user's on some systems."""
    for name in ("cmdline", "cwd", "environ", "memory_info"):
        monkeypatch.setattr(psutil.Process, name, denied)
    observer = JobObserver(os.getpid(), None, "cpu", tmp_path, WINDOW)
    observer.sample()
    assert "alive" in findings_of(observer)


def test_ended_runs_are_told_with_how_to_go_on(called, home):
    """Finished; killed; killed and its pid another program's since; not begun; going on just now."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_run(home, "killed", ended.pid, time.time())
    write_run(home, "reused", os.getpid(), time.time() - 10**6)
    (home / "early").mkdir()
    shutil.copy(home / "plan.json", home / "early/plan.json")
    resumed = write_run(home, "resumed", ended.pid, time.time())
    alive = {}
    with resumed.locked():  # by a process that reads its data still
        for name in ("whole", "killed", "reused", "early", "resumed"):
            code, out, err = called(home, "probe", "health", "--run", name, "--json")
            assert code == 0, err
            alive[name] = findings_in(out)["alive"]
    assert (alive["resumed"].level, alive["resumed"].what) == ("ok", "starting")
    assert (alive["whole"].level, alive["whole"].what) == ("ok", "finished")
    for name in ("killed", "reused", "early"):
        assert (alive[name].level, alive[name].what) == ("bad", "gone")
        assert f"--run {name}" in alive[name].line
    assert "step 30" in alive["killed"].line
    assert "--resume" in alive["killed"].line
    assert "--resume" not in alive["early"].line
    assert "another program" in alive["reused"].line


@POSIX
def test_a_watch_ends_by_ctrl_c_and_by_a_closed_pipe(tmp_path):
    with processes(tmp_path, "worker") as (worker,):
        watch, piped = (start_health(tmp_path, "--pid", worker.pid, "--watch", *more) for more in (("--json",), ()))
        assert watch.stderr
        assert piped.stdout
        assert piped.stderr
        piped.stdout.close()
        watch.stderr.readline()
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=PATIENCE_S)
        assert watch.returncode == 130
        assert json.loads(out)["findings"]
        assert "Traceback" not in err
        assert piped.wait(PATIENCE_S) == 0
        assert "Traceback" not in piped.stderr.read()
        piped.stderr.close()
        assert worker.poll() is None


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_log_is_read_as_far_as_it_goes(home, tmp_path, seed):
    """Bytes changed, cut out and doubled, values that are no numbers: verdicts, but nothing else."""
    r, folder = random.Random(seed), RunFolder(tmp_path)
    text = bytearray(RunFolder(home / "whole").log.read_bytes())
    for _ in range(40):
        at = r.randrange(len(text))
        text[at:at + r.choice([0, 1, 40])] = r.choice([b"", b"\n", b"9" * 30, b"NaN", b"-1e999", b"null", b"[" * 5, b"\xff"])
    shutil.copy(home / "plan.json", folder.plan)
    folder.log.write_bytes(text)
    observer = JobObserver(os.getpid(), None, "cpu", tmp_path, WINDOW)
    observer.sample()
    status = RunLogReader(folder).status(0, 0.0)
    assert list(lines(diagnose(dataclasses.replace(observer.observation(), page=status))))
