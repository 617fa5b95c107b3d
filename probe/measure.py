"""Measures one cell in this process, which must be a fresh one."""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from probe.cell import Cell, shape
from probe.stats import is_settled, is_steady
from probe.verdict import MIN_STEPS
from trainer import device, nvml
from trainer.config import OptimizerConfig, clip_for
from trainer.pace import Pace
from trainer.step import TrainStep

WARM_S = 0.5
"""Least warm-up: an H200 needs about as long to raise its clock from idle."""
MAX_STEPS = 200


def look(name: str | None, folder: str, report) -> dict:
    """What the device is, and how fast `folder`'s disk takes a checkpoint; makes no context on a card."""
    import dataclasses

    where = device.resolve(name)
    return dataclasses.asdict(device.facts(where)) | {"disk_write_bytes_s": disk_rate(Path(folder))}


def disk_rate(folder: Path, size: int = 1 << 26) -> float | None:
    """Bytes per second of writing and flushing 64 MB in `folder`; None where it can't be written."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            begin = time.perf_counter()
            for _ in range(size >> 20):
                f.write(data)
            f.flush()
            os.fsync(f.fileno())
            return size / (time.perf_counter() - begin)
    except OSError:
        return None


def measure(cell: Cell, name: str, uuid: str, seconds: float, slow_step_s: float | None, report) -> dict:
    """Runs the step that trains until its time is known, for about `seconds`; returns the measured fields of a record.

    `report` is told of each step, so that a process which dies leaves what it had measured. Past `slow_step_s` seconds a
    step the cell has spilled: three such steps are enough. Exceptions of torch pass through.
    """
    claim = device.Claim()
    where = device.resolve(name)
    free = nvml.free_bytes(uuid) if where.type == "cuda" else _available_bytes()
    began = time.perf_counter()
    # the update's cost doesn't depend on the rate, and a tiny one keeps the loss finite on random tokens
    step = TrainStep(shape(cell), cell.step, OptimizerConfig(1e-5, clip=clip_for(cell.step)), where)
    generator = torch.Generator(where).manual_seed(0)
    tokens = torch.randint(cell.vocab, (cell.accum, cell.batch, cell.length + 1), device=where, dtype=torch.int32,
                           generator=generator)
    pace = Pace(step)
    warmup, timed = [], []

    def run_until(times: list, enough) -> None:
        begin = time.perf_counter()
        while not enough(time.perf_counter() - begin):
            finished = pace.run(tokens, 1e-5)
            if finished:
                times.append(finished)
                report({"warmup_s": [t.step_s for t in warmup], "step_s": [t.step_s for t in timed]})
        times.append(pace.drain())

    def is_slow(times) -> bool:
        return slow_step_s is not None and len(times) >= 3 and min(t.step_s for t in times[-3:]) > slow_step_s

    run_until(warmup, lambda s: is_slow(warmup) or len(warmup) >= 2 and (
        s >= seconds / 3 or s >= WARM_S and is_steady([t.step_s for t in warmup], 0.02)))
    setup = time.perf_counter() - began - sum(t.step_s for t in warmup[1:])
    step.evaluate(tokens[0])
    device.synchronize(where)
    begin = time.perf_counter()
    step.evaluate(tokens[0])
    device.synchronize(where)
    eval_s = time.perf_counter() - begin

    retries = claim.peaks(where, uuid)["alloc_retries"]
    run_until(timed, lambda s: is_slow(timed) or len(timed) >= MIN_STEPS and (
        s >= seconds * 2 / 3 or len(timed) >= MAX_STEPS or is_settled([t.step_s for t in timed], 0.01)))
    readings = nvml.readings(uuid) if where.type == "cuda" else {}
    peaks = claim.peaks(where, uuid)
    return {"warmup_s": [t.step_s for t in warmup], "step_s": [t.step_s for t in timed],
            "micro_s": median(t.micro_s for t in timed), "optimizer_s": median(t.optimizer_s for t in timed),
            "eval_s": eval_s, "setup_s": setup, "free_at_start_bytes": free, "readings": readings,
            "timed_retries": peaks["alloc_retries"] - retries, **peaks}


def _available_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available
