"""Jobs that go on while they are looked at, and the looks."""

import json
import subprocess
import sys
import time

from helpers.made import MODULES
from helpers.runs import options, run_command

SLEEPS = """
import threading, time
from trainer import step, tokens
def slow(owner, name, seconds, forever_after=None):
    real, calls = getattr(owner, name), []
    def slower(*a, **k):
        calls.append(1)
        if forever_after and len(calls) > forever_after:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        time.sleep(seconds)
        return real(*a, **k)
    setattr(owner, name, slower)
"""


def start(home, code: str, run: str, *more) -> subprocess.Popen:
    """A run in which `code` has put something out of order, as train_with does, and that goes on meanwhile."""
    code += "\nimport sys\nfrom trainer import cli\nsys.argv = ['train', *sys.argv[1:]]\ncli.main()\n"
    command = run_command(run, *more)[3:]
    return subprocess.Popen([sys.executable, "-c", code, *command], **options(home) | {"stdout": subprocess.DEVNULL,
                                                                                       "stderr": subprocess.DEVNULL})


def health(home, *arguments, **other) -> subprocess.Popen:
    command = [sys.executable, "-m", MODULES["probe"], "health", "--seconds", "2", *map(str, arguments)]
    return subprocess.Popen(command, **options(home) | other)


def verdicts(process) -> dict:
    """What of each check, level and all, from a command with --json."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return {f["check"]: (f["level"], f["what"], f["line"]) for f in json.loads(out)["findings"]}


def end(process) -> None:
    process.kill()
    process.wait()


def wait_for(condition) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 90
        time.sleep(0.02)


def log_lines(run) -> int:
    return (run / "log.jsonl").read_text().count("\n") if (run / "log.jsonl").exists() else 0
