"""Runs steps one behind the device, as training does, and tells what each took. The probe and the trainer both use it,
so that what is measured is what runs: a wait after every step would add the launch time of the next one."""

import time
from dataclasses import dataclass

import torch

from spillcliff.hardware.device import synchronize
from trainer.run.step import TrainStep


@dataclass(frozen=True)
class StepTimes:
    """One finished step: mean loss, gradient norm before the clip (None without one), and seconds. `step_s` runs from the
    end of the step before to the end of this one, and is data_s + log_s + accum x micro_s + optimizer_s: the device's wait
    for this step's tokens and for the log, one forward and backward, clip and update."""

    loss: float
    norm: float | None
    step_s: float
    micro_s: float
    optimizer_s: float
    data_s: float
    log_s: float


class Pace:
    """Keeps one step in flight. `run` starts a step and returns the one before it, if any; `drain` returns the last, and
    `go_on` ends the pause (evaluation, checkpoint) that followed: without it the next step is timed from its own start."""

    def __init__(self, step: TrainStep) -> None:
        self._step, self._device = step, step.device
        self._cuda = step.device.type == "cuda"
        self._host = torch.empty(2, 2, pin_memory=self._cuda)
        self._slot = 0
        self._last = None
        self._flying = None

    def _mark(self):
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        synchronize(self._device)
        return time.perf_counter()

    def _between(self, a, b) -> float:
        return a.elapsed_time(b) / 1000 if self._cuda else b - a

    def go_on(self) -> None:
        self._last = self._mark()

    def run(self, tokens, lr: float, feed_s: float = 1.0, log_s: float = 0.0) -> StepTimes | None:
        """`feed_s` and `log_s` are what the caller took for this step's tokens and its log: what of it the device, which may
        have been busy with the step before, had to wait for is shared out in their ratio."""
        start = self._mark()
        begin = self._last or start
        middle = []
        loss, norm = self._step(tokens, lr, lambda: middle.append(self._mark()))
        host = self._host[self._slot]
        host.copy_(loss if norm is None else torch.stack((loss, norm)), non_blocking=True)
        self._slot = 1 - self._slot
        self._last = self._mark()
        before = self._flying
        share = feed_s / (feed_s + log_s) if feed_s + log_s else 1.0
        self._flying = (begin, start, middle[0], self._last, host, norm is not None, share)
        return before and self._finish(before)

    def drain(self) -> StepTimes | None:
        before, self._flying, self._last = self._flying, None, None
        return before and self._finish(before)

    def _finish(self, flying) -> StepTimes:
        begin, start, middle, end, host, has_norm, share = flying
        if self._cuda:
            end.synchronize()
        wait_s = self._between(begin, start)
        return StepTimes(loss=float(host[0]), norm=float(host[1]) if has_norm else None, step_s=self._between(begin, end),
                         micro_s=self._between(start, middle) / self._step.step.accum,
                         optimizer_s=self._between(middle, end), data_s=wait_s * share, log_s=wait_s * (1 - share))
