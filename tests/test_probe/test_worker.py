"""A cell's process may end in any way: what it had measured is kept, nothing is left behind, and the next one runs."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers.made import ROOT

DYING = '''
import os, signal, time

def die(how, report):
    report({"step_s": [1.5], "pid": os.getpid()})
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if how == "aborts": os.abort()
    if how == "exits":
        print("last words", flush=True)
        os._exit(7)
    if how in ("hangs", "is certain"): time.sleep(600)
    if how == "raises": raise ValueError("a b c")
    return {"answer": 42}
'''
PARENT = '''
import dataclasses, json, sys
from probe.worker import Workers

if __name__ == "__main__":
    with Workers() as workers:
        if sys.argv[1] == "spawn":
            workers._fork = None
        for how in sys.argv[2:]:
            certain = lambda progress: "seen enough" if how == "is certain" and progress["quiet_s"] > 0.5 else None
            print(json.dumps(dataclasses.asdict(workers.run("dying:die", (how,), 4, certain=certain))), flush=True)
'''


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Of a short name: in it lies a socket, whose path may have 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def start(tmp_path):
    """Starts a process that runs one worker after another, each of which dies as it is told; their temporary files go to
    tmp_path / "temp"."""
    (tmp_path / "dying.py").write_text(DYING)
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "temp").mkdir()

    def run(method, *hows):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
                                    "TMPDIR": str(tmp_path / "temp")}
        return subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), method, *hows], env=environment,
                                stdout=subprocess.PIPE, text=True)
    return run


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_every_way_to_end_is_told_and_the_next_one_runs(start, tmp_path, method):
    """By both ways to start a process; nothing is left in the folder for temporary files."""
    process = start(method, "killed", "aborts", "exits", "raises", "is certain", "hangs", "done")
    lines = process.communicate(timeout=120)[0].splitlines()
    killed, aborts, exits, raises, certain, hangs, done = map(json.loads, lines)
    assert not list((tmp_path / "temp").glob("probe-*"))
    assert certain["killed"] == "spill" and certain["progress"]["certain"] == "seen enough"
    assert killed["exit_code"] == -signal.SIGKILL and killed["progress"]["step_s"] == [1.5]
    assert aborts["exit_code"] == -signal.SIGABRT
    assert exits["exit_code"] == 7 and "last words" in exits["tail"]
    assert raises["error"] == ["ValueError", "a b c"]
    assert hangs["killed"] == "timeout" and hangs["progress"]["step_s"] == [1.5]
    assert done["measured"] == {"answer": 42}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_ends_with_its_parent_however_that_ends(start):
    process = start("forkserver", "hangs")
    deadline = time.monotonic() + 60
    workers = []
    while not workers and time.monotonic() < deadline:
        time.sleep(0.1)
        workers = [p for p in psutil.Process(process.pid).children(recursive=True) if p.children() == []]
        workers = workers if len(psutil.Process(process.pid).children(recursive=True)) >= 3 else []
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert workers
    time.sleep(0.5)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(everyone, timeout=20)
    assert not alive
