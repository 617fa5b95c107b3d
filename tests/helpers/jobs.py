"""Jobs that go on while they are observed: a run that is put out of order and into it again, and processes of one command
line."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from helpers.made import MODULES
from helpers.runs import options, run_options
from helpers.waiting import PATIENCE_S
from probe.health.diagnose import diagnose
from probe.health.observation import Finding
from probe.health.observe import JobObserver

SAMPLE_EVERY_S = 0.1
WINDOW = 20

DISORDERS = """
import threading, time
from pathlib import Path
from trainer.data import tokens
from trainer.run import step

def disturb(disorder, owner, name, interrupt):
    real = getattr(owner, name)
    def disturbed(*arguments, **options):
        if Path("disorder").read_text() == disorder:
            interrupt()
        return real(*arguments, **options)
    setattr(owner, name, disturbed)

disturb("starved", tokens.Tokens, "batch", lambda: time.sleep(0.3))
disturb("evaluating", step.TrainStep, "evaluate", lambda: time.sleep(1))
disturb("stuck", step.TrainStep, "_forward_backward", threading.Event().wait)

from trainer.cli import main
main()
"""
"""`train`, disturbed for as long as the file "disorder" in its folder says so."""

SCRIPT = """
import os, subprocess, sys, time
if os.environ["ROLE"] == "launcher":
    sys.exit(subprocess.call([sys.executable, *sys.argv], env=os.environ | {"ROLE": "worker"}))
ballast = bytearray(80 << 20) if os.environ["ROLE"] == "worker" else b""
print("ready", flush=True)
while True:
    begin = time.monotonic()
    while ballast and time.monotonic() - begin < 0.01:
        pass
    time.sleep(0.1 if ballast else 1000)
"""
"""A job of another program: a worker, a dead stub of it, or a launcher that waits for a worker."""


def disorder(home: Path, name: str) -> None:
    """Puts the runs in `home` out of order in one way, or in order again ("")."""
    (home / "disorder").write_text(name)


def start_run(home: Path, run: str, *more: str) -> subprocess.Popen:
    """A run that goes on meanwhile, in order."""
    disorder(home, "")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", DISORDERS, *run_options(run, *more)], **options(home) | quiet)


@contextlib.contextmanager
def processes(folder: Path, *roles: str) -> Iterator[list[subprocess.Popen]]:
    """Processes of SCRIPT in these roles, all at work; they and their children are ended at the end."""
    (folder / "job.py").write_text(SCRIPT)
    command = [sys.executable, "job.py", "--epochs", "3"]
    started = [subprocess.Popen(command, cwd=folder, env=os.environ | {"ROLE": role}, stdout=subprocess.PIPE)
               for role in roles]
    try:
        for process in started:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
        yield started
    finally:
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    child.kill()
            end(process)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def findings_of(observer: JobObserver) -> dict[str, Finding]:
    """By check."""
    return {finding.check: finding for finding in diagnose(observer.observation())}


def wait_for_findings(observer: JobObserver, *levels: str, **expected: str) -> dict[str, Finding]:
    """Takes samples until what is found is as expected, {check: what}, some of it of each of these levels, and returns all
    that is found then."""
    begin = time.monotonic()
    while True:
        time.sleep(SAMPLE_EVERY_S)
        observer.sample()
        findings = findings_of(observer)
        is_found = expected.items() <= {check: finding.what for check, finding in findings.items()}.items()
        if is_found and set(levels) <= {findings[check].level for check in expected}:
            return findings
        assert time.monotonic() - begin < PATIENCE_S, findings


def start_health(home: Path, *arguments: object) -> subprocess.Popen:
    """`probe health` in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", MODULES["probe"], "health", *map(str, arguments)], **options(home))


def findings_in(output: str) -> dict[str, Finding]:
    """What a command with --json said, by check."""
    return {values["check"]: Finding(**values) for values in json.loads(output)["findings"]}
