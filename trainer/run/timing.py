"""Runs steps one behind the device, as training does, and tells what each took. The probe and the trainer both use it,
so that what is measured is what runs: a wait after every step would add the launch time of the next one."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from spillcliff.hardware.device import synchronize


class Step(Protocol):
    """What can be timed: our own step, or somebody's."""

    @property
    def device(self) -> torch.device: ...

    @property
    def accum(self) -> int:
        """Micro-steps in a call."""

    def __call__(self, tokens: Any, lr: float, mark: Callable[[], None]) -> tuple[Tensor, Tensor | None]:
        """Does one optimizer step; returns loss and gradient norm (None without one), still on the device. `mark` is called
        between the last micro-step and the update."""


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


class _InFlight(NamedTuple):
    """A step that the device may still be busy with. `begin` is the end of the step before, `start` when this one was
    launched, `middle` between its last micro-step and the update, `end` after it: CUDA events, or seconds."""

    begin: Any
    start: Any
    middle: Any
    end: Any
    host: Tensor
    has_norm: bool
    data_share: float
    accum: int


class StepTimer:
    """Keeps one step in flight. `run` starts a step and returns the one before it, if any; `drain` returns the last, and
    `restart` ends the pause (evaluation, checkpoint) that followed: without it the next step is timed from its own start."""

    def __init__(self, step: Step) -> None:
        self._step, self._device = step, step.device
        self._cuda = step.device.type == "cuda"
        self._host = torch.empty(2, 2, pin_memory=self._cuda)
        self._slot = 0
        self._last: Any = None
        self._in_flight: _InFlight | None = None

    def _now(self) -> Any:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        synchronize(self._device)
        return time.perf_counter()

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1000 if self._cuda else b - a

    def restart(self) -> None:
        self._last = self._now()

    def run(self, tokens: Any, lr: float, feed_s: float = 1.0, log_s: float = 0.0) -> StepTimes | None:
        """`feed_s` and `log_s` are what the caller took for this step's tokens and its log: what of it the device, which may
        have been busy with the step before, had to wait for is shared out in their ratio."""
        start = self._now()
        begin = self._last or start
        middle: list[Any] = []
        loss, norm = self._step(tokens, lr, lambda: middle.append(self._now()))
        host = self._host[self._slot]
        host.copy_(loss if norm is None else torch.stack((loss, norm)), non_blocking=True)
        self._slot = 1 - self._slot
        self._last = self._now()
        before = self._in_flight
        data_share = feed_s / (feed_s + log_s) if feed_s + log_s else 1.0
        self._in_flight = _InFlight(begin=begin, start=start, middle=middle[0], end=self._last, host=host,
                                    has_norm=norm is not None, data_share=data_share, accum=self._step.accum)
        return before and self._finish(before)

    def drain(self) -> StepTimes | None:
        before, self._in_flight, self._last = self._in_flight, None, None
        return before and self._finish(before)

    def _finish(self, step: _InFlight) -> StepTimes:
        if self._cuda:
            step.end.synchronize()
        wait_s = self._between(step.begin, step.start)
        return StepTimes(
            loss=float(step.host[0]), norm=float(step.host[1]) if step.has_norm else None,
            step_s=self._between(step.begin, step.end), micro_s=self._between(step.start, step.middle) / step.accum,
            optimizer_s=self._between(step.middle, step.end), data_s=wait_s * step.data_share,
            log_s=wait_s * (1 - step.data_share))
