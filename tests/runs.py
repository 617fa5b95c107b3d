"""Runs of a model that steps in milliseconds, in processes of their own."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import MODULES, ROOT, tiny

from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig
from trainer.plan import Plan, Predicted, Span
from trainer.tokens import dtype_for, write_sidecar

SPAN = Span(1.0, 2.0, 3.0)
STEPS = 90


def make_home(home: Path, shape=StepConfig(2, 16, 2), whole=True) -> Path:  # noqa: B008
    """A folder with a plan of STEPS steps, its data, other data, and a run "whole" of it that nothing disturbed."""
    r = random.Random(5)
    for name in ("data", "other"):
        ids = [r.randrange(300) for _ in range(3000)]
        np.array(ids, dtype_for(300)).tofile(home / f"{name}.bin")
        write_sidecar(home / f"{name}.bin", len(ids), 300, None)
    Plan(1, "2026-01-01T00:00:00+00:00", "cpu-x", tiny(), shape, 3000, 1, STEPS, OptimizerConfig(1e-2), 10, 3, 10**9,
         Predicted(SPAN, SPAN, SPAN), [], [], [], "", {}).save(home / "plan.json")
    if whole:
        done = train(home, "whole")
        assert done.returncode == 0, done.stderr
    return home


def run_command(home, run, *more) -> list[str]:
    return [sys.executable, "-m", MODULES["train"], "--plan", "plan.json", "--data", "data.bin", "--run", run, "--device",
            "cpu", *more]


def options(home) -> dict:
    return {"cwd": home, "env": os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "text": True,
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def train(home, run, *more, **other):
    return subprocess.run(run_command(home, run, *more), timeout=120, **options(home) | other)


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
