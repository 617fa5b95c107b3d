"""Runs of a model that steps in milliseconds: in processes of their own, or in this one where that shows nothing more."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.made import MODULES, ROOT, SPAN, make_plan, tiny
from helpers.waiting import PATIENCE_S, wait_for
from spillcliff.files import Say, ignore
from spillcliff.hardware.usage import MemoryClaim
from trainer import checkpoint
from trainer.config import ModelConfig, OptimizerConfig, StepConfig
from trainer.data.dataset import open_data
from trainer.data.tokens import dtype_for, write_sidecar
from trainer.plan import Plan, Predicted, Span
from trainer.run import loop
from trainer.run.distributed import ProcessGroup
from trainer.run.setup import RunSetup
from trainer.run_folder import RunFolder

STEPS = 48
"""Of the run that tests share, conftest's `home`."""
SHAPE = StepConfig(2, 16, 2)


def _plan(model: ModelConfig, step: StepConfig, steps: int, tok_s: Span, **cadences: Any) -> Plan:
    return make_plan(model=model, step=step, corpus_tokens=3000, steps=steps, optimizer=OptimizerConfig(1e-2),
                     predicted=Predicted(tok_s=tok_s, peak_bytes=SPAN, hours=SPAN), **cadences)


def _write_tokens(path: Path, ids: Any, vocab: int) -> None:
    np.asarray(ids).astype(dtype_for(vocab)).tofile(path)
    write_sidecar(path, len(ids), vocab, None)


def make_home(home: Path, *more: str, shape: StepConfig = SHAPE, model: ModelConfig = tiny(),  # noqa: B008
              tok_s: Span = SPAN, save: int = 3, steps: int = 90) -> Path:
    """A folder with a plan, its data, other data, and a run "whole" of it that nothing disturbed, for which `more` are
    options."""
    r = random.Random(5)
    for name in ("data", "other"):
        count = max(3000, 30 * shape.micro_tokens)
        _write_tokens(home / f"{name}.bin", [r.randrange(model.vocab) for _ in range(count)], model.vocab)
    _plan(model, shape, steps, tok_s, eval=10, checkpoint=save).save(home / "plan.json")
    done = train(home, "whole", *more)
    assert done.returncode == 0, done.stderr
    return home


class Clock:
    """The system's, put forward at will instead of waiting."""

    def __init__(self, monkeypatch) -> None:
        self._late_s = 0.0
        perf_counter, monotonic = time.perf_counter, time.monotonic
        monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + self._late_s)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + self._late_s)

    def wait(self, seconds: float) -> None:
        self._late_s += seconds

    def slows(self, monkeypatch, owner, name: str, seconds: float,
              when: Callable[[int], bool] = lambda call: True) -> None:
        """Makes a function take so much longer at each call, from 1, of which `when` holds."""
        real, calls = getattr(owner, name), itertools.count(1)

        def slow(*arguments, **options):
            if when(next(calls)):
                self.wait(seconds)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)


def open_run(home: Path, steps: int = 8, every: int = 4, tok_s: Span = SPAN, data: str = "data.bin", val: str | None = None,
             shape: StepConfig = SHAPE, name: str = "first", say: Say = ignore) -> loop.Run:
    """A run of such a plan in this process, which is still to train, in the folder `name` of `home`/runs."""
    for seed, file in enumerate(("data.bin", "held.bin", "other.bin")):
        _write_tokens(home / file, np.random.default_rng(seed).integers(0, 300, 2000), 300)
    plan = _plan(tiny(), shape, steps, tok_s, eval=every, checkpoint=every)
    training, validation = open_data(plan, [home / data], [home / val] if val else ())
    run = loop.Run(RunSetup(plan=plan, data=training, validation=validation, folder=RunFolder(home / "runs" / name),
                                 device=torch.device("cpu"), claim=MemoryClaim(), group=ProcessGroup(), say=say))
    if not run.folder.has_plan():
        run.folder.start(plan)
    return run


def kill_and_go_on(home: Path, wanted: int, longest_s: float, *more: str) -> None:
    """Runs of the plan, killed by SIGKILL at random moments until `wanted` kills have hit: each goes on from where it was
    and ends as "whole" did, and nothing broken is left or taken."""
    r, kills, run = random.Random(2), 0, 0
    while kills < wanted:
        run += 1
        name = f"killed-{run}"
        resume: tuple[str, ...] = ()
        folder = RunFolder(home / name)
        while True:
            process = subprocess.Popen(run_command(name, *resume, *more), **options(home))
            _wait_for_lines(process, folder.log)
            time.sleep(r.uniform(0, longest_s))
            process.send_signal(signal.SIGKILL)
            out, err = process.communicate()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, err
            kills += 1
            if folder.receipt.exists():  # it was through when it was killed
                break
            assert "broken" not in out  # what a kill leaves behind is a folder still being written, which is no checkpoint
            resume = ("--resume",) if folder.checkpoint_steps() else ()
            if kills >= wanted:
                done = train(home, name, *resume, *more)
                assert done.returncode == 0, done.stderr
                break
        assert end_state(folder.path) == end_state(home / "whole")
        assert not folder.unfinished_checkpoints()


def _wait_for_lines(process: subprocess.Popen, log: Path) -> None:
    """Returns when the process has added to its log, or has ended."""
    def count() -> int:
        return log.read_text().count("\n") if log.exists() else 0

    before = count()
    wait_for(lambda: process.poll() is not None or count() > before)


def run_command(run: str, *more: str) -> list[str]:
    return [sys.executable, "-m", MODULES["train"], *run_options(run, *more)]


def run_options(run: str, *more: str) -> list[str]:
    """The options of `train` for a run of the plan in a home."""
    return ["--plan", "plan.json", "--data", "data.bin", "--run", run, "--device", "cpu", *more]


def options(home: Path) -> dict[str, Any]:
    """Of subprocess, for a process in `home`."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {"cwd": home, "env": os.environ | {"PYTHONPATH": path}, "text": True,
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def train(home: Path, run: str, *more: str, **other: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(run_command(run, *more), timeout=PATIENCE_S, **options(home) | other)


def torchrun(home: Path, count: int, run: str, *more: str, code: str = "") -> list[str]:
    """The command that trains by several processes; `code` runs in each of them before."""
    program = ["-m", MODULES["train"]]
    if code:
        (home / f"{run}.py").write_text(_with_code(code))
        program = [f"{run}.py"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--", *program,
            *run_options(run, *more)]


def train_distributed(home: Path, count: int, run: str, *more: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Trains by several processes on the processor."""
    return subprocess.run(torchrun(home, count, run, *more, code=code), timeout=PATIENCE_S, **options(home))


def train_with(home: Path, code: str, run: str, *more: str, **other: Any) -> subprocess.CompletedProcess[str]:
    """As `train` after `code` has run in the process, which may put something of ours out of order."""
    return subprocess.run([sys.executable, "-c", _with_code(code), *run_options(run, *more)], timeout=PATIENCE_S,
                          **options(home) | other)


def _with_code(code: str) -> str:
    return code + "\nimport sys\nfrom trainer import cli\nsys.argv = ['train', *sys.argv[1:]]\ncli.main()\n"


def before_step(number: int, code: str) -> str:
    """Code that makes a run do something before its optimizer step `number`, from 1; `told` is then filled when the run has
    been asked to stop."""
    return f"""
import itertools, os, signal, time
from spillcliff import console
from trainer.run import step
told, calls, real, note = [], itertools.count(1), step.TrainStep.__call__, console.StopRequest._note
def noted(self, *arguments):
    told.append(True)
    note(self, *arguments)
def changed(self, *arguments, **options):
    if next(calls) == {number}:
        {code}
    return real(self, *arguments, **options)
console.StopRequest._note, step.TrainStep.__call__ = noted, changed
"""


def end_state(run: Path) -> bytes:
    """The file of tensors of a run's newest checkpoint."""
    folder = RunFolder(run)
    return (folder.checkpoint(folder.checkpoint_steps()[-1]) / checkpoint.STATE).read_bytes()


def receipt(run: Path) -> dict:
    return json.loads(RunFolder(run).receipt.read_text())


def log(run: Path, kind: str | None = None) -> list[dict]:
    """The lines of a run's log, all or those of a kind."""
    lines = map(json.loads, RunFolder(run).log.read_text().splitlines())
    return [line for line in lines if kind in (None, line["kind"])]
