"""A cell's process may end in any way: what it had measured is kept, nothing is left behind, and the next one runs."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT

DYING = '''
import os, signal, time

def look(how, report):
    report({"step_s": [1.5], "pid": os.getpid()})
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if how == "aborts": os.abort()
    if how == "exits":
        print("last words", flush=True)
        os._exit(7)
    if how == "hangs": time.sleep(600)
    if how == "raises": raise ValueError("a b c")
    return {"answer": 42}
'''
PARENT = '''
import dataclasses, json, sys
import probe
probe.__path__.insert(0, sys.argv[1])
from probe.worker import Workers

if __name__ == "__main__":
    workers = Workers()
    for how in sys.argv[2:]:
        print(json.dumps(dataclasses.asdict(workers.run("look", (how,), 4))), flush=True)
'''


@pytest.fixture
def start(tmp_path):
    """Starts a process that runs one worker after another, with a probe.measure that dies as it is told."""
    folder = tmp_path / "dying"
    folder.mkdir()
    (folder / "measure.py").write_text(DYING)
    (tmp_path / "parent.py").write_text(PARENT)
    # children are started anew or forked from a server: both must find the stand-in first
    (tmp_path / "sitecustomize.py").write_text(f"import probe\nprobe.__path__.insert(0, {str(folder)!r})\n")

    def run(*hows):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        return subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(folder), *hows], env=environment,
                                stdout=subprocess.PIPE, text=True)
    return run


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_every_way_to_end_is_told_and_the_next_one_runs(start):
    process = start("killed", "aborts", "exits", "raises", "hangs", "done")
    lines = process.communicate(timeout=120)[0].splitlines()
    killed, aborts, exits, raises, hangs, done = map(json.loads, lines)
    assert killed["exit_code"] == -signal.SIGKILL and killed["progress"]["step_s"] == [1.5]
    assert aborts["exit_code"] == -signal.SIGABRT
    assert exits["exit_code"] == 7 and "last words" in exits["tail"]
    assert raises["error"] == ["ValueError", "a b c"]
    assert hangs["killed"] == "timeout" and hangs["progress"]["step_s"] == [1.5]
    assert done["measured"] == {"answer": 42}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_ends_with_its_parent_however_that_ends(start):
    process = start("hangs")
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
