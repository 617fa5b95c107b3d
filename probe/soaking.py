"""Runs a plan's step in this process, which must be a fresh one, until its speed has settled."""

import dataclasses
import time
from statistics import median

from probe.cell import Cell
from probe.measure import fed
from probe.soak import Window, settled
from trainer import device, nvml
from trainer.config import ModelConfig, OptimizerConfig, clip_for
from trainer.pace import Pace
from trainer.step import TrainStep

WARMUP_STEPS = 3
WINDOW_S, MOST_WINDOWS = (0.5, 5.0), 200
"""Least length of a window for short and for long soaks: a look at the driver takes a millisecond. 10 minutes have 120."""


def measure(model: ModelConfig, cell: Cell, name: str, uuid: str, seconds: float, report) -> dict:
    """{windows, settled}: the step of `cell` run for `seconds`, or until it has settled; `report` is told of each window."""
    where = device.resolve(name)
    step = TrainStep(model, cell.step, OptimizerConfig(1e-5, clip=clip_for(cell.step)), where)
    window, steps = fed(cell, where)
    pace, windows = Pace(step), []
    step.evaluate(window)
    for _ in range(WARMUP_STEPS):
        pace.run(next(steps), 1e-5)
    pace.drain()
    length_s = max(WINDOW_S[0], min(WINDOW_S[1], seconds / 60), seconds / MOST_WINDOWS)
    begin = since = time.perf_counter()
    times = []
    while time.perf_counter() - begin < seconds and not settled(windows, seconds):
        if finished := pace.run(next(steps), 1e-5):
            times.append(finished.step_s)
        now = time.perf_counter()
        if times and now - since >= length_s:
            readings = {k: v for k, v in nvml.readings(uuid).items() if k in Window.__dataclass_fields__}
            windows.append(Window(now - begin, len(times), median(times), **readings))
            report({"windows": [dataclasses.asdict(w) for w in windows]})
            times, since = [], now
    pace.drain()
    return {"windows": [dataclasses.asdict(w) for w in windows], "settled": settled(windows, seconds)}
