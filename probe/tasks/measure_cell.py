"""Measures one cell in this process, which must be a fresh one."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which the first optimizer step would import, 4 s on an H200's host: what stands ready has it

from probe.cell import Cell
from probe.outcome import CellProgress
from probe.records import Measurement
from probe.stats import is_settled, is_steady
from probe.tasks.custom_step import CustomStep
from probe.tasks.table import MeasureCell
from probe.verdict import MIN_STEPS, spill_reason
from spillcliff.failures import failure, is_out_of_memory
from spillcliff.hardware import nvml
from spillcliff.hardware.device import resolve_device, synchronize
from spillcliff.hardware.energy import EnergyMeter
from spillcliff.hardware.usage import MemoryClaim, free_bytes, process_seconds
from trainer.config import OptimizerConfig, StepConfig, clip_for
from trainer.data.feed import feed
from trainer.data.tokens import Tokens
from trainer.run.distributed import ProcessGroup
from trainer.run.slowdown import HEAT_BITS, HEAT_FALL
from trainer.run.step import SINGLE, TrainStep
from trainer.run.timing import StepTimer, StepTimes

LR = 1e-5
"""The update's cost doesn't depend on the rate, and a tiny one keeps the loss finite on random tokens."""
WARM_S = 0.5
"""Least warm-up: an H200 needs about as long to raise its clock from idle."""
STEADY = 0.02
"""Most drift of the step time, in shares, at which the warm-up is over."""
PRECISE = 0.01
"""Half the width of the median's 95% interval, in shares, at which a cell has been timed."""
MAX_STEPS = 200
SLOW_STEPS = 3
"""Steps that show a spill by their time alone."""
LOOK_EVERY_S = 1.0
"""Time between looks at the counters while steps are timed: the driver is asked as seldom as a spill still shows in time."""


def random_feed(cell: Cell, device: torch.device,
                part: StepConfig | None = None) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """(a batch to evaluate, each step's tokens) of random ids, for a process's `part` of the cell's step if it is not all,
    the way a run feeds its own: on an H200 the stream that copies them takes 73 MB of the card, which tokens made there
    would not show."""
    step = part or cell.step
    ids = np.random.default_rng(0).integers(cell.vocab, size=2 * step.micro_tokens + 1, dtype=np.uint32)
    tokens = Tokens.of_ids(ids, cell.vocab, "random")
    return torch.from_numpy(tokens.fixed_batches(step.batch, step.length, step.batch)[0]), feed(tokens, step, 0, device)


class _Spilled(Exception):
    """The cell has certainly spilled: no more of it need be run."""


def measure_cell(task: MeasureCell, send: Callable[[CellProgress], None], group: ProcessGroup = SINGLE) -> Measurement:
    """What was measured of the task's cell; `send` is told of each step, so that a process which dies leaves what it had
    measured.

    A cell that has certainly spilled is left at once: by its memory, or by three steps past `slow_s`. Exceptions of torch
    pass through. In a `group` that was joined, this process does its part of each step, and what it tells is its own.
    """
    return _CellMeasurement(task, send, group).measure()


class _CellMeasurement:
    """One measurement, phase by phase."""

    def __init__(self, task: MeasureCell, send: Callable[[CellProgress], None], group: ProcessGroup) -> None:
        self.start_up_s = process_seconds()
        self.task, self.cell, self.send, self.group = task, task.cell, send, group
        self.claim = MemoryClaim()
        self.device = group.own_device(resolve_device(task.device))
        self.part = group.world.part_of_batch(task.cell.step)
        self.free_bytes = free_bytes(self.device, task.uuid)
        self.warmup: list[StepTimes] = []
        self.timed: list[StepTimes] = []
        self.setup_s: float | None = None
        self.eval_s: float | None = None
        self.energy_j: float | None = None
        self.meter: EnergyMeter | None = None
        self.retries_before = 0
        self.is_setting_up = True

    def measure(self) -> Measurement:
        self.tell()
        self.claim.begin(self.device, self.task.uuid)
        self.began_s = self.looked_s = time.perf_counter()
        try:
            self.build_step()
            self.warm_up()
            self.time_evaluation()
            self.time_steps()
        except _Spilled:  # the step that is still running is not waited for: it may take minutes
            if not self.timed:  # the first step loads kernels, but it has to do where it is the only one
                keep = 1 if len(self.warmup) > 1 else 0
                self.warmup, self.timed = self.warmup[:keep], self.warmup[keep:]
        except Exception as e:
            if is_out_of_memory(*failure(e)):  # how much it had taken by then tells a spill from a failure
                self.tell(readings=self.others())
            raise
        return self.measured(readings=self.readings())

    def build_step(self) -> None:
        self.step: TrainStep | CustomStep
        self.window: torch.Tensor | None = None
        self.batches: Iterator[Any] = itertools.repeat(None)
        model = self.cell.config
        if model is None:
            self.step = CustomStep(self.cell, self.device)
        else:
            self.step = TrainStep(model, self.part, OptimizerConfig(LR, clip=clip_for(self.part)), self.device,
                                  group=self.group)
            self.window, self.batches = random_feed(self.cell, self.device, self.part)
        self.timer = StepTimer(self.step)
        synchronize(self.device)
        self.is_setting_up = False
        self.tell()

    def warm_up(self) -> None:
        """Until the step time is steady, for a third of the cell's time at most."""
        if isinstance(self.step, TrainStep) and self.window is not None:
            self.step.evaluate(self.window)  # as a run does before its first step: what it leaves in the allocator stays
        self.run_until(self.warmup, lambda s: len(self.warmup) >= 2 and (
            s >= self.task.seconds / 3 or (s >= WARM_S and is_steady([t.step_s for t in self.warmup], STEADY))))
        self.setup_s = time.perf_counter() - self.began_s - sum(t.step_s for t in self.warmup[1:])

    def time_evaluation(self) -> None:
        if isinstance(self.step, TrainStep) and self.window is not None:
            synchronize(self.device)
            begin = time.perf_counter()
            self.step.evaluate(self.window)
            synchronize(self.device)
            self.eval_s = time.perf_counter() - begin

    def time_steps(self) -> None:
        """Until their median is certain, for two thirds of the cell's time at most."""
        self.claim.watch_others()
        self.retries_before = self.claim.peaks(self.device, self.task.uuid).alloc_retries
        self.meter = EnergyMeter(self.task.uuid) if self.device.type == "cuda" else None
        self.run_until(self.timed, lambda s: len(self.timed) >= MIN_STEPS and (
            s >= self.task.seconds * 2 / 3 or len(self.timed) >= MAX_STEPS
            or is_settled([t.step_s for t in self.timed], PRECISE)))
        self.energy_j = self.meter.joules() if self.meter else None

    def run_until(self, times: list[StepTimes], is_enough: Callable[[float], bool]) -> None:
        begin = time.perf_counter()
        self.group.any_asked(False)  # the group's answer is that of the last question, which was another loop's
        while not self.group.any_asked(is_enough(time.perf_counter() - begin)):
            finished = self.timer.run(next(self.batches), LR)
            if finished:
                times.append(finished)
                self.tell()
                if len(self.warmup) < 3 or time.perf_counter() - self.looked_s > LOOK_EVERY_S:
                    if spill_reason(self.measured(with_memory=True, with_times=False), self.cell, self.task.card):
                        raise _Spilled
                    if self.meter:
                        self.meter.look()
                    self.looked_s = time.perf_counter()
            if self.is_slow(times):
                raise _Spilled
        if finished := self.timer.drain():
            times.append(finished)

    def is_slow(self, times: list[StepTimes]) -> bool:
        """Whether the last steps all took longer than smaller cells ask for, and for no other reason."""
        if self.task.slow_s is None or len(times) < SLOW_STEPS:
            return False
        beyond = min(t.step_s for t in times[-SLOW_STEPS:]) / self.task.slow_s
        return beyond > 1 and not self.is_excused(beyond)

    def is_excused(self, beyond: float) -> bool:
        """Whether steps that take `beyond` times what a spill is told by may have another cause: heat, or memory that was
        seen to be fast. Which it is the verdict says, by the clock too."""
        if beyond <= HEAT_FALL and int(nvml.readings(self.task.uuid).get("throttle", 0)) & HEAT_BITS:
            return True
        cliff = self.task.card.cliff
        return cliff is not None and cliff.shows_fast(self.measured(with_times=False))

    def others(self) -> dict[str, Any]:
        """What other programs did on the card."""
        return {"others": asdict(self.claim.others(self.task.uuid))} if self.device.type == "cuda" else {}

    def readings(self) -> dict[str, Any]:
        """The card's own, and what other programs did."""
        return nvml.readings(self.task.uuid) | self.others() if self.device.type == "cuda" else {}

    def tell(self, readings: dict[str, Any] | None = None) -> None:
        """Sends what is known: times at each step, memory where it matters, since the driver takes time to tell."""
        self.send(CellProgress(self.is_setting_up, self.measured(readings or {}, with_memory=readings is not None)))

    def measured(self, readings: dict[str, Any] | None = None, with_memory: bool = True,
                 with_times: bool = True) -> Measurement:
        peaks = asdict(self.claim.peaks(self.device, self.task.uuid)) if with_memory else {}
        if with_memory:
            peaks["non_local_growth_bytes"] = self.claim.non_local_growth_bytes()
            peaks["timed_retries"] = peaks["alloc_retries"] - self.retries_before if self.timed else 0
        times: dict[str, Any] = {}
        if with_times:
            times = {"warmup_s": tuple(t.step_s for t in self.warmup), "step_s": tuple(t.step_s for t in self.timed),
                     "eval_s": self.eval_s, "setup_s": self.setup_s, "energy_j": self.energy_j}
            if self.timed and not self.cell.is_custom:
                times |= {"micro_s": median(t.micro_s for t in self.timed),
                          "optimizer_s": median(t.optimizer_s for t in self.timed)}
        return Measurement(start_up_s=self.start_up_s, free_at_start_bytes=self.free_bytes, readings=readings or {}, **peaks,
                           **times)
