"""Runs of a model that steps in milliseconds, in processes of their own."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from helpers.made import MODULES, ROOT, tiny
from spillcliff.hardware.usage import Claim
from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig
from trainer.data.dataset import open_data
from trainer.data.tokens import dtype_for, write_sidecar
from trainer.plan import Plan, Predicted, Span
from trainer.run import loop
from trainer.run.distributed import Team
from trainer.run_folder import RunFolder

SPAN = Span(1.0, 2.0, 3.0)
STEPS = 90


def make_home(home: Path, *more, shape=StepConfig(2, 16, 2), model=tiny(), tok_s=SPAN, save=3) -> Path:  # noqa: B008
    """A folder with a plan of STEPS steps, its data, other data, and a run "whole" of it that nothing disturbed, for which
    `more` are options."""
    r = random.Random(5)
    for name in ("data", "other"):
        ids = [r.randrange(model.vocab) for _ in range(max(3000, 30 * shape.batch * shape.length))]
        np.array(ids, dtype_for(model.vocab)).tofile(home / f"{name}.bin")
        write_sidecar(home / f"{name}.bin", len(ids), model.vocab, None)
    Plan(1, "2026-01-01T00:00:00+00:00", "cpu-x", model, shape, 3000, 1, STEPS, OptimizerConfig(1e-2), 10, save, 10**9,
         Predicted(tok_s, SPAN, SPAN), [], [], [], "", {}).save(home / "plan.json")
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

    def slows(self, monkeypatch, owner, name: str, seconds: float, when=lambda call: True) -> None:
        """Makes a function take so much longer at each call, from 1, of which `when` holds."""
        real, calls = getattr(owner, name), itertools.count(1)

        def slow(*arguments, **options):
            if when(next(calls)):
                self.wait(seconds)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)


def open_run(home: Path, steps: int = 8, every: int = 4, tok_s=SPAN, data="data.bin", val=None) -> loop.Run:
    """A run of such a plan in this process, which is still to go; `said` has what it says."""
    for seed, name in enumerate(("data.bin", "held.bin", "other.bin")):
        ids = np.random.default_rng(seed).integers(0, 300, 2000)
        ids.astype(dtype_for(300)).tofile(home / name)
        write_sidecar(home / name, len(ids), 300, None)
    plan = Plan(1, "2026-01-01T00:00:00+00:00", "cpu-x", tiny(), StepConfig(2, 16, 2), 2000, 1, steps, OptimizerConfig(1e-2),
                every, every, 10**9, Predicted(tok_s, SPAN, SPAN), [], [], [], "", {})
    tokens, held = open_data(plan, [home / data], [home / val] if val else ())
    said = []
    run = loop.Run(plan, tokens, held, RunFolder(home / "runs/first"), torch.device("cpu"), Claim(), Team(), said.append,
                   lambda line: None, loop.Extras())
    if not (run.folder.path / "plan.json").exists():
        RunFolder.start(run.folder.path, plan)
    run.said = said
    return run


def kill_and_go_on(home, wanted: int, longest_s: float, *more) -> None:
    """Runs of the plan, killed by SIGKILL at random moments until `wanted` kills have hit: each goes on from where it was
    and ends as "whole" did, and nothing broken is left or taken."""
    r, kills, run = random.Random(2), 0, 0
    while kills < wanted:
        run += 1
        name, resume = f"killed-{run}", ()
        while True:
            process = subprocess.Popen(run_command(home, name, *resume, *more), **options(home))
            path, begin = home / name / "log.jsonl", time.monotonic()
            lines = path.read_text().count("\n") if path.exists() else 0
            while process.poll() is None and not (path.exists() and path.read_text().count("\n") > lines):
                assert time.monotonic() - begin < 60
                time.sleep(0.005)
            time.sleep(r.uniform(0, longest_s))
            process.send_signal(signal.SIGKILL)
            out, err = process.communicate()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, err
            kills += 1
            if (home / name / "receipt.json").exists():  # it was through when it was killed
                break
            assert "broken" not in out  # what a kill leaves behind is a folder still being written, which is no checkpoint
            resume = ("--resume",) if any((home / name / "checkpoints").glob("step-*[0-9]")) else ()
            if kills >= wanted:
                done = train(home, name, *resume, *more)
                assert done.returncode == 0, done.stderr
                break
        assert end_state(home / name) == end_state(home / "whole")
        assert not list((home / name / "checkpoints").glob("*.tmp"))


def run_command(home, run, *more) -> list[str]:
    return [sys.executable, "-m", MODULES["train"], "--plan", "plan.json", "--data", "data.bin", "--run", run, "--device",
            "cpu", *more]


def options(home) -> dict:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/gpu")))
    return {"cwd": home, "env": os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, "text": True,
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def train(home, run, *more, **other):
    return subprocess.run(run_command(home, run, *more), timeout=120, **options(home) | other)


def torchrun(home, count: int, run: str, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--", "-m"]
    return [*command, *run_command(home, run, *more)[2:]]


def together(home, count: int, run: str, *more):
    return subprocess.run(torchrun(home, count, run, *more), timeout=120, **options(home))


def train_with(home, code: str, run, *more):
    """The same after `code` has run in the process, which may put something of ours out of order."""
    code += "\nimport sys\nfrom trainer import cli\nsys.argv = ['train', *sys.argv[1:]]\ncli.main()\n"
    return subprocess.run([sys.executable, "-c", code, *run_command(home, run, *more)[3:]], timeout=120, **options(home))


def end_state(run) -> bytes:
    return (sorted((run / "checkpoints").iterdir())[-1] / checkpoint.STATE).read_bytes()


def receipt(run) -> dict:
    return json.loads((run / "receipt.json").read_text())


def log(run) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
