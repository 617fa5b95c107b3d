"""Runs a plan's step in this process, which must be a fresh one, until its speed has settled."""

import time
from collections.abc import Callable
from statistics import median

from probe.soak import Window, readings_of, settled
from probe.tasks.measure_cell import LR, random_feed
from probe.tasks.table import RunSoak, SoakProgress
from spillcliff.hardware import nvml
from spillcliff.hardware.device import resolve_device
from trainer.config import OptimizerConfig, clip_for
from trainer.run.step import TrainStep
from trainer.run.timing import StepTimer

WARMUP_STEPS = 3
WINDOW_S = 0.5, 5.0
"""Least length of a window in short soaks, whose 60th part it is between the two, and in those of 5 minutes and more."""
GROWTH = 0.01
"""A window is this part of the time so far at least: a day has some 600."""
LOOK_EVERY_S = 1.0
"""Time between looks at the driver."""


def run_soak(task: RunSoak, send: Callable[[SoakProgress], None]) -> SoakProgress:
    """The step of the task's cell run for its seconds, or until it has settled; `send` is told of each window."""
    device = resolve_device(task.device)
    step = TrainStep(task.model, task.cell.step, OptimizerConfig(LR, clip=clip_for(task.cell.step)), device)
    evaluated, batches = random_feed(task.cell, device)
    timer, windows = StepTimer(step), []
    step.evaluate(evaluated)
    for _ in range(WARMUP_STEPS):
        timer.run(next(batches), LR)
    timer.drain()
    least_s = min(max(WINDOW_S[0], task.seconds / 60), WINDOW_S[1])
    is_settled, times, looks = False, [], [nvml.readings(task.uuid)]
    begin = since = looked = now = time.perf_counter()
    while now - begin < task.seconds and not is_settled:
        if finished := timer.run(next(batches), LR):
            times.append(finished.step_s)
        now = time.perf_counter()
        if now - looked >= LOOK_EVERY_S:
            looks.append(nvml.readings(task.uuid))
            looked = now
        if times and now - since >= max(least_s, (now - begin) * GROWTH):
            windows.append(Window(now - begin, len(times), median(times), **readings_of(looks)))
            is_settled = settled(windows, task.seconds)
            send(SoakProgress(tuple(windows)))
            times, looks, since = [], looks[-1:], now
    timer.drain()
    return SoakProgress(tuple(windows), is_settled)
