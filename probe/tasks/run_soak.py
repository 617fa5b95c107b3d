"""Runs a plan's step in this process, which must be a fresh one, until its speed has settled."""

import dataclasses
import time
from statistics import median

from probe.cell import Cell
from probe.soak import Window, readings_of, settled
from probe.tasks.measure_cell import fed
from spillcliff.hardware import device, nvml
from trainer.config import ModelConfig, OptimizerConfig, clip_for
from trainer.run.step import TrainStep
from trainer.run.timing import Pace

WARMUP_STEPS = 3
WINDOW_S = 0.5, 5.0
"""Least length of a window in short soaks, whose 60th part it is between the two, and in those of 5 minutes and more. The
parent looks at what it is told only in a pause of a quarter of a second."""
GROWTH = 0.01
"""A window is this part of the time so far at least: a day has some 600."""
LOOK_S = 1.0
"""Time between looks at the driver."""


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
    least_s = min(max(WINDOW_S[0], seconds / 60), WINDOW_S[1])
    is_settled, times, looks = False, [], [nvml.readings(uuid)]
    begin = since = looked = now = time.perf_counter()
    while now - begin < seconds and not is_settled:
        if finished := pace.run(next(steps), 1e-5):
            times.append(finished.step_s)
        now = time.perf_counter()
        if now - looked >= LOOK_S:
            looks.append(nvml.readings(uuid))
            looked = now
        if times and now - since >= max(least_s, (now - begin) * GROWTH):
            windows.append(Window(now - begin, len(times), median(times), **readings_of(looks)))
            is_settled = settled(windows, seconds)
            report({"windows": [dataclasses.asdict(w) for w in windows]})
            times, looks, since = [], looks[-1:], now
    pace.drain()
    return {"windows": [dataclasses.asdict(w) for w in windows], "settled": is_settled}
