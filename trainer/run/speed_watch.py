"""Looks at the card while a run goes, and tells what costs speed: when it begins, and when it ends."""

import time
from dataclasses import replace
from typing import NamedTuple

import torch

from spillcliff.hardware import nvml
from spillcliff.hardware.device import DeviceFacts, on_battery
from spillcliff.hardware.usage import MemoryClaim
from trainer.plan import Plan
from trainer.run.log import Throughput
from trainer.run.slowdown import Slowdown, SpeedReadings, find_slowdown

LOOK_EVERY_S = 20.0
"""Seconds between two looks at the card: one takes some ms."""


class SpeedChange(NamedTuple):
    """What began to cost speed, or, with `cause` None, what has ended; `line` is for a person."""

    cause: str | None
    line: str


class SpeedWatch:
    """Of a run of `plan` on `device`. `slowdowns` are those that have begun so far, as the receipt names them."""

    def __init__(self, plan: Plan, device: torch.device, facts: DeviceFacts, claim: MemoryClaim) -> None:
        self.slowdowns: list[dict] = []
        self._plan, self._device, self._facts, self._claim = plan, device, facts, claim
        self._now: Slowdown | None = None
        self._looked_s = time.monotonic()

    def change(self, number: int, throughput: Throughput) -> SpeedChange | None:
        """What has changed by step `number`, if it is time for a look; else None."""
        tok_s = throughput.recent_tok_s
        if not tok_s or time.monotonic() - self._looked_s <= LOOK_EVERY_S:
            return None
        self._looked_s = time.monotonic()
        before, self._now = self._now, find_slowdown(self.readings(tok_s, throughput.recent_data_share))
        if self._now and not (before and before.cause == self._now.cause):
            self.slowdowns.append({"step": number, "what": self._now.cause, "line": self._now.line})
            return SpeedChange(self._now.cause, self._now.line)
        if before and not self._now:
            return SpeedChange(None, f"{before.cause} is over: {tok_s:,.0f} tok/s")
        return None

    def readings(self, tok_s: float, data_share: float) -> SpeedReadings:
        """What the run and the card show now."""
        readings = SpeedReadings(kind=self._facts.kind, tok_s=tok_s, planned_tok_s=self._plan.predicted.tok_s.low,
                                 data_share=data_share, on_battery=on_battery())
        if self._device.type != "cuda":
            return readings
        now, others = nvml.readings(self._facts.uuid), self._claim.others(self._facts.uuid)
        self._claim.watch_others()
        clock_mhz, top_mhz = now.get("clock_mhz"), nvml.limits(self._facts.uuid).get("clock_max_mhz")
        clock_share = clock_mhz / top_mhz if clock_mhz and top_mhz else None
        return replace(readings, spilled_bytes=self._claim.non_local_growth_bytes(), throttle=int(now.get("throttle") or 0),
                       clock_share=clock_share, temperature_c=now.get("temperature_c"), other_pid=others.pid,
                       other_percent=others.busy_percent, reserved_bytes=torch.cuda.memory_reserved(self._device))
