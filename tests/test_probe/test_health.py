"""A job that runs is named for what it is: ill in each way on purpose, or well; and nothing is done to it."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers.jobs import SLEEPS, end, health, log_lines, start, verdicts, wait_for
from helpers.made import SAMPLES
from helpers.runs import make_home

from probe.health.diagnose import judge, lines
from probe.health.observation import Observed, Peer
from probe.health.run_log import Diary, Page
from probe.health.utilization import Sample
from trainer.config import StepConfig
from trainer.plan import Plan
from trainer.run_folder import RunFolder

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
ME = Peer(10, 0.9, 900_000_000, "itself")
PAGE = Page("runs/x", 1000, 100, 50, 2048, 1500.0, 5_000_000_000, False, 240, 12, "step", 0.5, 0.9, 0.9, 0.91, 0.02, 0.001,
            4.0, 0.3, 200, 200, 36.0)


def series(count=60, every_s=0.25, **columns) -> tuple[Sample, ...]:
    """Readings of a processor that is busy, but for the columns that are given."""
    rows = [{name: values[i] if isinstance(values, list) else values for name, values in columns.items()}
            for i in range(count)]
    return tuple(Sample(1000 + i * every_s, **{"cpu_percent": 99.0, "machine_percent": 60.0, "is_waiting": False} | row)
                 for i, row in enumerate(rows))


def observed(samples=(), **changes) -> Observed:
    values = {"pid": 10, "kind": "cpu", "seconds": 15.0, "state": "running", "cpu_s": 14.0, "samples": samples}
    return Observed(**values | changes)


def sample_of(name) -> Observed:
    """What a file under samples/health holds, as it would have been observed."""
    kept = json.loads((SAMPLES / "health" / f"{name}.json").read_text(encoding="utf-8"))
    count = len(kept["readings"]["utilization"])
    facts = {k: kept[k] for k in ("kind", "card_bytes", "clock_max_mhz", "power_limit_w")}
    return observed(series(count, kept["every_s"], **kept["readings"]), seconds=count * kept["every_s"], **facts)


def ill(o: Observed) -> set[str]:
    return {f.what for f in judge(o) if f.level != "ok"}


def line(o: Observed, what: str) -> str:
    return next(f.line for f in judge(o) if f.what == what)


@pytest.mark.parametrize(("name", "what", "words"), [
    ("bubble-27-percent", "data bubble", ("98% at 5.5 GB", "% at 4.2 GB", "low for")),
    ("persistently-low", "data bubble", ("27% busy",)),
    ("evaluation-stall", "evaluation stall", ("6.5 s", "4.2 GB")),
    ("spill-windows", "spill", ("1.14 GB", "0.53 GB")),
    ("spill-by-power", "spill", ("of 700 W", "5.9 GB")),
    ("throttled", "throttling", ("of 1,670 MHz", "94 degrees", "bits 0x")),
    ("well", None, ()),
])
def test_a_foreign_job_on_a_card_is_named_by_the_shape_of_its_readings(name, what, words):
    o = sample_of(name)
    assert ill(o) == ({what} if what else set())
    for word in words:
        assert word in line(o, what)


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_no_healthy_job_ill(seed):
    """A card at 88 to 100%, with a single low reading now and then, its power cap and a warm clock; a core at 75 to 100%."""
    r = random.Random(seed)
    dips = [i for i in range(60) if r.random() < 0.03]
    card = observed(series(
        utilization=[r.randint(30, 80) if i in dips else min(100, round(r.gauss(96, 3))) for i in range(60)],
        memory_bytes=[round(r.gauss(5.0e9, 3e7)) for _ in range(60)], clock_mhz=[r.gauss(1500, 60) for _ in range(60)],
        throttle=[r.choice([0, 0x4]) for _ in range(60)], temperature_c=[r.randint(70, 84) for _ in range(60)],
        power_w=[r.gauss(70, 4) for _ in range(60)], non_local_bytes=[round(r.gauss(7e8, 2e6)) for _ in range(60)]),
        kind="cuda", card_bytes=6_442_450_944, clock_max_mhz=1670.0, power_limit_w=80.0)
    core = observed(series(cpu_percent=[r.uniform(75, 101) for _ in range(60)]))
    for o in (card, core):
        assert not ill(o)
        assert not ill(dataclasses.replace(o, page=dataclasses.replace(PAGE, silent_s=r.uniform(0, 10))))


RUN = observed(series(utilization=97.0, memory_bytes=4_040_000_000, throttle=0), kind="cuda", page=PAGE, itself=ME, newer=())


@pytest.mark.parametrize(("what", "words", "page", "other"), [
    ("data bubble", "data 42%", {"data_s": 0.4}, {}),
    ("data bubble", "waits for tokens", {"data_s": 1.4, "step_s": 2.3, "mean_s": 2.3}, {}),
    ("slow log", "logging 31%", {"log_s": 0.3}, {}),
    ("slow log", "logging 64%", {"log_s": 1.5, "step_s": 2.3, "mean_s": 2.3}, {}),
    ("evaluation stall", "evaluation 35%", {"eval_s": 50.0}, {}),
    ("evaluation stall", "30 s where 4.0 s", {"phase": "evaluation", "usual_s": 4.0, "silent_s": 30.0}, {}),
    ("checkpoint stall", "checkpoint 39%", {"save_s": 30.0}, {}),
    ("spill", "no throttle", {"step_s": 2.9, "mean_s": 2.9}, {}),
    ("throttling", "throttles", {"step_s": 2.9, "mean_s": 2.9}, {"throttle": 0x40}),
    ("battery", "plug it in", {"step_s": 2.9, "mean_s": 2.9}, {"on_battery": True}),
    ("battery", "plug it in", {}, {"on_battery": True}),
    ("contended", "pid 77", {"step_s": 2.9, "mean_s": 2.9}, {"other_pid": 77, "other_percent": 40.0}),
    ("late", "step 240 is done", {"kept": 150, "logged": 150}, {}),
    ("missing", "none so far", {"kept": None, "logged": None, "since_save_s": None}, {}),
    ("not written", "is the disk full", {"kept": 150, "logged": 200, "since_save_s": 300.0}, {}),
    ("stuck", "no line in the log for 20.0 min", {"silent_s": 1200.0, "lines": 0}, {}),
])
def test_our_run_is_named_by_its_log_and_the_readings_beside(what, words, page, other):
    """The plan wants 1,500 tok/s at least; well, the run has 2,276 and 2% wait for data."""
    assert not ill(RUN)
    throttle = other.pop("throttle", 0)
    o = dataclasses.replace(RUN, page=dataclasses.replace(PAGE, **page), **other,
                            samples=series(utilization=97.0, memory_bytes=4_040_000_000, throttle=throttle))
    assert ill(o) == {what} and words in line(o, what)


@pytest.mark.parametrize(("phase", "usual_s", "silent_s", "what"), [
    ("evaluation", 90.0, 250.0, None), ("checkpoint", 30.0, 300.0, None), ("step", 30.0, 300.0, None),
    ("step", 0.9, 300.0, "stuck"), ("start-up", None, 300.0, None), ("start-up", None, 900.0, "stuck"),
])
def test_silence_is_measured_by_what_is_being_done(phase, usual_s, silent_s, what):
    page = dataclasses.replace(PAGE, phase=phase, usual_s=usual_s, silent_s=silent_s, lines=0)
    assert ill(dataclasses.replace(RUN, page=page)) == ({what} if what else set())


@pytest.mark.parametrize(("peers", "itself", "what", "level"), [
    ((), ME, "alone", "ok"),
    ((Peer(9, 0.0, 4_000_000, "parent"),), ME, "launcher", "ok"),
    ((Peer(12, 0.0, 4_000_000, "child"),), Peer(10, 0.0, 4_000_000, "itself"), "alone", "ok"),
    ((Peer(12, 0.8, 9e8, "child"),), Peer(10, 0.0, 4_000_000, "itself"), "launcher", "ok"),
    ((Peer(12, 0.0, 4_000_000, "other"), Peer(13, 0.0, 4_000_000, "other")), ME, "stubs", "warn"),
    ((Peer(12, 0.8, 9e8, "other"),), Peer(10, 0.0, 4_000_000, "itself"), "stub", "warn"),
    ((Peer(12, 0.8, 9e8, "other"), Peer(13, 0.0, 4_000_000, "other")), ME, "doubled", "bad"),
    ((Peer(12, 0.0, 9e8, "other"),), ME, "doubled", "bad"),
    ((Peer(12, 0.5, 9e8, "child"), Peer(13, 0.5, 9e8, "child")), ME, "alone", "ok"),
])
def test_the_worker_is_told_from_stubs_and_never_to_be_ended(peers, itself, what, level):
    found = next(f for f in judge(observed(series(), itself=itself, peers=peers)) if f.check == "doubled")
    assert (found.what, found.level) == (what, level)
    for word in ("kill", "taskkill", "terminate", "end it", "close it"):
        assert word not in found.line.lower()


def test_a_table_keeps_to_the_width(capsys):
    findings = judge(sample_of("bubble-27-percent"))
    assert all(len(text) <= 80 for text in lines(findings)) and len(list(lines(findings))) > len(findings)


JOBS = {
    "well": "",
    "bubble": SLEEPS + "slow(tokens.Tokens, 'batch', 0.3)",
    "evaluation": SLEEPS + "slow(step.TrainStep, 'evaluate', 2)",
    "stuck": SLEEPS + "slow(step.TrainStep, '_forward_backward', 0, 44)",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A plan whose run would take hours, in steps of some ten milliseconds."""
    home = make_home(tmp_path_factory.mktemp("health"), shape=StepConfig(8, 32, 2), save=30)
    plan = Plan.load(home / "plan.json")
    dataclasses.replace(plan, steps=10**6, eval=10, checkpoint=60).save(home / "plan.json")
    return home


def stands(home, run, pid, started_at) -> None:
    """A run's folder with a process file and a checkpoint."""
    (home / run / "checkpoints/step-00000030").mkdir(parents=True)
    (home / run / "plan.json").write_text((home / "plan.json").read_text())
    kept = {"pid": pid, "started_at": started_at, "ran_on": "cpu-x"}
    (home / run / "process.json").write_text(json.dumps(kept))


@pytest.fixture(scope="module")
def found(home):
    """What health says of each job, all running side by side; {name: verdicts}. At last all but one are killed, and that
    one while it is watched without being named."""
    runs = home / "results/runs"
    stands(home, "results/runs/older", os.getpid(), time.time() - 10**6)
    jobs = {name: start(home, code, f"results/runs/{name}") for name, code in JOBS.items()}
    try:
        wait_for(lambda: all(log_lines(runs / name) > 21 for name in JOBS))
        looks = {name: health(home, "--run", runs / name, "--json") for name in JOBS}
        looks["foreign"] = health(home, "--pid", jobs["bubble"].pid, "--json")
        told = {name: verdicts(look) for name, look in looks.items()}
        assert all(job.poll() is None for job in jobs.values())  # looking harms nothing
        for name in ("bubble", "evaluation", "stuck"):
            end(jobs[name])
        if sys.platform != "win32":
            jobs["well"].send_signal(signal.SIGSTOP)
            told["paused"] = verdicts(health(home, "--json"))
            jobs["well"].send_signal(signal.SIGCONT)
        watch = health(home, "--watch", "--json")
        assert "run results/runs/well, pid" in watch.stderr.readline()
        end(jobs["well"])
        return told | {"killed": verdicts(watch)}
    finally:
        for job in jobs.values():
            end(job)


@pytest.mark.parametrize(("job", "check", "expected", "words"), [
    ("well", "alive", ("ok", "running"), "log lines"),
    ("well", "speed", ("ok", "steady"), "tok/s"),
    ("well", "checkpoints", ("ok", None), "every 60 steps"),
    ("well", "sources", ("ok", "unchanged"), ""),
    ("bubble", "speed", ("bad", "data bubble"), "data "),
    ("bubble", "alive", ("ok", "running"), ""),
    ("foreign", "speed", ("bad", "data bubble"), "busy"),
    ("evaluation", "speed", ("bad", "evaluation stall"), "evaluation "),
    ("stuck", "alive", ("bad", "stuck"), "no line in the log"),
    ("killed", "alive", ("bad", "gone"), "--run results/runs/well --resume"),
    pytest.param("paused", "alive", ("bad", "stopped"), "SIGCONT", marks=POSIX),
])
def test_a_real_run_is_named(found, job, check, expected, words):
    level, what, told = found[job][check]
    assert level == expected[0] and what == (expected[1] or what) and words in told, found[job]


SCRIPT = """
import os, subprocess, sys, time
if os.environ.get("AS") == "launcher":
    sys.exit(subprocess.call([sys.executable, *sys.argv], env=os.environ | {"AS": "worker"}))
if os.environ.get("AS") == "stub":
    time.sleep(1000)
held = bytearray(80 << 20)
while True:
    begin = time.monotonic()
    while time.monotonic() - begin < 0.02:
        pass
    time.sleep(0.05)
"""


def doubles(home, *roles) -> list[subprocess.Popen]:
    return [subprocess.Popen([sys.executable, "job.py", "--epochs", "3"], cwd=home, env=os.environ | {"AS": role})
            for role in roles]


def ends(processes) -> None:
    for process in processes:
        for child in psutil.Process(process.pid).children():
            child.kill()
        end(process)


def test_doubled_processes_a_stub_and_a_launcher_of_another_program(tmp_path):
    """Beside one worker a stub costs nothing; a second worker is told; a launcher's child is the worker."""
    (tmp_path / "job.py").write_text(SCRIPT)
    running = doubles(tmp_path, "worker", "stub")
    try:
        time.sleep(0.5)
        beside, of_stub = (health(tmp_path, "--pid", p.pid, "--json") for p in running)
        beside, of_stub = verdicts(beside)["doubled"], verdicts(of_stub)["doubled"]
        assert beside[1] == "stubs" and f"the worker is pid {running[0].pid} " in beside[2]
        assert of_stub[1] == "stub" and f"the worker is pid {running[0].pid} " in of_stub[2]
        running += doubles(tmp_path, "worker")
        time.sleep(0.5)
        both = verdicts(health(tmp_path, "--pid", running[0].pid, "--json"))["doubled"]
        assert both[:2] == ("bad", "doubled") and str(running[2].pid) in both[2]
    finally:
        ends(running)
    running = doubles(tmp_path, "launcher")
    try:
        wait_for(lambda: psutil.Process(running[0].pid).children())
        time.sleep(0.5)
        (tmp_path / "job.py").write_text(SCRIPT + "\n")
        os.utime(tmp_path / "job.py", (time.time() + 60,) * 2)
        told = verdicts(health(tmp_path, "--pid", running[0].pid, "--json"))
        assert told["alive"][0] == "ok" and told["sources"][1] == "newer" and "job.py" in told["sources"][2]
        child = psutil.Process(running[0].pid).children()[0].pid
        assert verdicts(health(tmp_path, "--pid", child, "--json"))["doubled"][1] in ("launcher", "alone")
    finally:
        ends(running)


def told_in_one_line(process) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


def test_what_can_not_be_looked_at_is_told_in_one_line(home, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    looks = {"no such process": ("--pid", ended.pid), "no plan.json": ("--run", tmp_path), "give one of them": (
        "--run", "whole", "--pid", "1"), "under empty": ("--results", "empty"), "can be read here": (
        "--pid", os.getpid(), "--device", "cuda:99"), "not in the range": ("--pid", "0"), "such process;": ("--pid", 2**40)}
    started = {words: health(home, *arguments) for words, arguments in looks.items()}
    for words, process in started.items():
        assert words in told_in_one_line(process)


def test_a_process_of_another_user_is_refused_in_one_line(monkeypatch, tmp_path):
    from probe.health.observe import Job
    from spillcliff.errors import UserError

    def denied(*arguments):
        raise psutil.AccessDenied()

    monkeypatch.setattr(psutil.Process, "cpu_times", denied)
    with pytest.raises(UserError, match="another user's"):
        Job(os.getpid(), None, None, tmp_path, 10)


def test_a_process_that_keeps_its_files_to_itself_is_judged_by_the_rest(monkeypatch, tmp_path):
    """Its command line, folder, environment and memory can't be read, as of another user's on some systems."""
    from probe.health.observe import Job

    def denied(*arguments):
        raise psutil.AccessDenied()

    for name in ("cmdline", "cwd", "environ", "memory_info"):
        monkeypatch.setattr(psutil.Process, name, denied)
    job = Job(os.getpid(), None, "cpu", tmp_path, 10)
    job.sample()
    assert judge(job.observed())[0].check == "alive"


def test_ended_runs_are_told_with_how_to_go_on(home):
    """Finished; killed; killed and its pid another program's since; not begun; going on just now."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stands(home, "killed", gone.pid, time.time())
    stands(home, "reused", os.getpid(), time.time() - 10**6)
    (home / "early").mkdir()
    (home / "early/plan.json").write_text((home / "plan.json").read_text())
    stands(home, "resumed", gone.pid, time.time())
    with RunFolder.alone(home / "resumed"):  # by a process that reads its data still
        looks = {name: health(home, "--run", name, "--json") for name in ("whole", "killed", "reused", "early", "resumed")}
        told = {name: verdicts(look)["alive"] for name, look in looks.items()}
    assert told["resumed"][:2] == ("ok", "starting")
    assert told["whole"][:2] == ("ok", "finished")
    for name in ("killed", "reused", "early"):
        assert told[name][:2] == ("bad", "gone") and f"--run {name}" in told[name][2]
    assert "step 30" in told["killed"][2] and "--resume" in told["killed"][2] and "--resume" not in told["early"][2]
    assert "another program" in told["reused"][2]


@POSIX
def test_a_watch_ends_by_ctrl_c_and_by_a_closed_pipe(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    running = doubles(tmp_path, "worker")
    try:
        watch, piped = (health(tmp_path, "--pid", running[0].pid, "--watch", *more) for more in (("--json",), ()))
        piped.stdout.close()
        watch.stderr.readline()
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=30)
        assert watch.returncode == 130 and json.loads(out)["findings"] and "Traceback" not in err
        assert piped.wait(60) == 0 and "Traceback" not in piped.stderr.read()
        piped.stderr.close()
    finally:
        ends(running)


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_log_is_read_as_far_as_it_goes(home, tmp_path, seed):
    """Bytes changed, cut out and doubled, values that are no numbers: verdicts, or one line, but nothing else."""
    r = random.Random(seed)
    text = bytearray((home / "whole/log.jsonl").read_bytes())
    for _ in range(40):
        at = r.randrange(len(text))
        text[at:at + r.choice([0, 1, 40])] = r.choice([b"", b"\n", b"9" * 30, b"NaN", b"-1e999", b"null", b"[" * 5, b"\xff"])
    (tmp_path / "plan.json").write_text((home / "plan.json").read_text())
    (tmp_path / "log.jsonl").write_bytes(text)
    diary = Diary(tmp_path)
    page = diary.page(0, 0.0)
    assert list(lines(judge(observed(series(), page=page))))
