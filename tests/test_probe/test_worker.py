"""A cell's process may end in any way: what it had measured is kept, nothing is left behind, and the next one runs. No
folder of the user's gets in between."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers.made import ROOT

from probe.records import load
from probe.tasks import worker

DYING = '''
import os, signal, time
from dataclasses import dataclass
from probe.tasks.table import Task

@dataclass(frozen=True)
class Die(Task[dict, dict]):
    how: str

    def run(self, send):
        send({"step_s": [1.5], "pid": os.getpid()})
        if self.how == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "aborts": os.abort()
        if self.how == "exits":
            print("last words", flush=True)
            os._exit(7)
        if self.how in ("hangs", "is certain"): time.sleep(600)
        if self.how == "raises": raise ValueError("a b c")
        return {"answer": 42}
'''
PARENT = '''
import dataclasses, json, os, sys
from dying import Die
from probe.tasks import worker

if __name__ == "__main__":
    worker.PRELOADED = "json"  # torch is of no use here
    before = dict(os.environ)
    with worker.Workers() as workers:
        if sys.argv[1] == "spawn":
            workers._fork = None
        for how in sys.argv[2:]:
            seconds = 600 if how == "waits" else 2
            certain = lambda progress, quiet_s: "seen enough" if how == "is certain" and quiet_s > 0.5 else None
            told = []
            task = Die("hangs" if how == "waits" else how)
            outcome = workers.run(task, seconds, certain=certain, tell=lambda p: told.append(p) or (
                how == "waits" and print(json.dumps(p), flush=True)))
            print(json.dumps(dataclasses.asdict(outcome) | {"told": told}), flush=True)
    assert dict(os.environ) == before
'''


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short name: in it lies a socket, whose path may have 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that runs one worker after another, each of which dies as it is told; their temporary files go to
    tmp_path / "temp"."""
    (tmp_path / "dying.py").write_text(DYING)
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "temp").mkdir()
    started: list[subprocess.Popen[str]] = []

    def run(method: str, *hows: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
                                    "TMPDIR": str(tmp_path / "temp")}
        started.append(subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), method, *hows], env=environment,
                                        stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_every_way_to_end_is_told_and_the_next_one_runs(start: Callable[..., subprocess.Popen[str]], tmp_path: Path,
                                                        method: str) -> None:
    """By both ways to start a process; nothing is left in the folder for temporary files."""
    process = start(method, "killed", "aborts", "exits", "raises", "is certain", "hangs", "done")
    lines = process.communicate(timeout=240)[0].splitlines()
    killed, aborts, exits, raises, certain, hangs, done = map(json.loads, lines)
    assert process.returncode == 0
    assert not list((tmp_path / "temp").glob("probe-*"))
    assert certain["killed"] == "spill"
    assert certain["certain"] == "seen enough"
    assert killed["exit_code"] == -signal.SIGKILL
    assert killed["progress"]["step_s"] == [1.5]
    assert killed["told"] == [killed["progress"]]
    assert aborts["exit_code"] == -signal.SIGABRT
    assert exits["exit_code"] == 7
    assert "last words" in exits["printed"]
    assert raises["error"] == ["ValueError", "a b c"]
    assert hangs["killed"] == "timeout"
    assert hangs["progress"]["step_s"] == [1.5]
    assert hangs["seconds"] >= 2
    assert done["answer"] == {"answer": 42}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_ends_with_its_parent_however_that_ends(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("forkserver", "waits")
    assert process.stdout is not None
    worker_pid = json.loads(process.stdout.readline())["pid"]  # by now it runs
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert worker_pid in {p.pid for p in everyone}
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(everyone, timeout=120)
    assert not alive


def test_processes_started_by_two_threads_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second must not take for the user's own what was set for the first."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before, is_inside, seen = dict(os.environ), threading.Event(), []

    def second() -> None:
        is_inside.wait()
        with worker._environment_of_children() as variables:
            seen.append(variables)

    thread = threading.Thread(target=second)
    thread.start()
    with worker._environment_of_children() as variables:
        is_inside.set()
        seen.append(variables)
        thread.join(0.2)  # it would be through by now, were it let in
        assert os.environ["PYTHONSAFEPATH"] == "1"
    thread.join()
    assert seen == [{"PYTHONSAFEPATH": None, "PYTHONPATH": before.get("PYTHONPATH")}] * 2
    assert dict(os.environ) == before


IN_THE_WAY = ("trainer", "probe", "planner", "spillcliff", "tokenize", "random", "torch", "click")
INSTALLED = """
import sys
sys.path[:] = [p for p in sys.path if p]  # the user's folder, which an installed script does not look into
import json
method, commands = sys.argv[1], json.loads(sys.argv[2])
from probe.tasks.worker import Workers
if method == "spawn":
    real = Workers.__init__
    def spawning(workers):
        real(workers)
        workers._fork = None
    Workers.__init__ = spawning
from probe.cli import main
for command in commands:
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as e:
        if e.code:
            raise
"""
CARD = ["card", "--device", "cpu"]
GRID = ["grid", "--device", "cpu", "--model", "1M", "--vocab", "500", "--batch", "1", "--length", "32", "--seconds", "1",
        "--accum", "1"]


@pytest.mark.parametrize(("method", "commands"), [("forkserver", [CARD, GRID]), ("spawn", [CARD])])
def test_no_folder_of_the_user_s_may_break_a_command(tmp_path: Path, method: str, commands: list[list[str]]) -> None:
    """Whatever modules lie there: commands are started as an installed script is, which doesn't look into it, and the
    processes that they start must not do so either. A grid's cells are measured in processes that are started anew."""
    home = tmp_path / "home"
    (home / "torch_data").mkdir(parents=True)
    for path in (*(home / f"{name}.py" for name in IN_THE_WAY), home / "torch_data" / "__init__.py"):
        path.write_text("raise SystemExit('imported')\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", INSTALLED, method, json.dumps(commands)], cwd=home, env=environment,
                          timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = home.glob("results/*")
    assert json.loads((folder / "device.json").read_text())["memory"]["process_bytes"] > 0
    if GRID in commands:
        assert [r.fits for r in load(folder / "records.jsonl")] == [True]
