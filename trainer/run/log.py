"""What a run leaves behind and shows while it goes: the JSONL log, its throughput, the live line."""

import contextlib
import json
import os
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from spillcliff.errors import UserError
from spillcliff.files import Say, set_torn_line_aside
from spillcliff.units import format_bytes, format_duration
from trainer.plan import Plan
from trainer.run_folder import RunFolder

if TYPE_CHECKING:  # it brings torch, which who looks at a run's folder needs not
    from trainer.run.tensorboard import EventFiles
    from trainer.run.timing import StepTimes


class RunLog:
    """Appends one JSON object a line to log.jsonl, handed to the system when `write` returns, and gives it to `events`. A
    disk that doesn't take it is told once by `say`, and the run goes on. Unless it `is_kept`, nothing is written: of several
    processes the main one writes. UserError if it can't be opened."""

    def __init__(self, run: RunFolder, say: Say, is_kept: bool = True, events: "EventFiles | None" = None) -> None:
        self.path, self._say, self._has_failed = run.log if is_kept else Path(os.devnull), say, False
        self._events = events
        try:
            if is_kept:
                with open(self.path, "ab+") as f:  # a process that was killed may have left half a line
                    set_torn_line_aside(f, self.path)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as e:
            raise UserError(f"can't write {self.path}: {e.strerror or e}") from None

    def write(self, kind: str, step: int, **values: Any) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, "at": round(time.time(), 3), **values}) + "\n")
            self._file.flush()
            if self._events:
                self._events.write(kind, step, values)
        except OSError as e:
            if not self._has_failed:
                self._say(f"can't write {self.path}: {e.strerror or e}; the run goes on, with lines missing there")
            self._has_failed = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            if self._events:
                self._events.close()


class Throughput:
    """Rates of this process's own steps: what a resumed run did before, and the first steps, are not in them."""

    WARMUP_STEPS = 5

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._count = 0
        self.step_s: list[float] = []
        self._recent: deque[StepTimes] = deque(maxlen=20)

    def add(self, times: "StepTimes") -> None:
        self._count += 1
        self._recent.append(times)
        if self._count > self.WARMUP_STEPS:
            self.step_s.append(times.step_s)

    @property
    def recent_s(self) -> float | None:
        """Median seconds of the latest steps."""
        return median(t.step_s for t in self._recent) if self._recent else None

    @property
    def recent_tok_s(self) -> float | None:
        """Tokens per second at the median of the latest steps; None before the warm-up is over."""
        return self._tokens_per_step / self.recent_s if self.step_s and self.recent_s else None

    @property
    def recent_data_share(self) -> float:
        """Of the latest steps' time, what was spent waiting for tokens."""
        return sum(t.data_s for t in self._recent) / (sum(t.step_s for t in self._recent) or 1)

    @property
    def tok_s(self) -> float | None:
        """Tokens per second at the median step; None before the warm-up is over."""
        return self._tokens_per_step / median(self.step_s) if self.step_s else None


def live_line(plan: Plan, step: int, loss: float, throughput: Throughput, peak_bytes: int | None,
              pauses_s: float = 0.0) -> str:
    """One line for a person: step, loss, tok/s, time left, memory; below 80 columns. `pauses_s` is what of the time left are
    no steps."""
    recent = throughput.recent_s
    rate = f"{plan.step.tokens / recent:,.0f} tok/s" if recent else "-"
    left = format_duration((plan.steps - step) * recent + pauses_s) if recent else "?"
    memory = format_bytes(peak_bytes) if peak_bytes else "-"
    return f"step {step}/{plan.steps}  loss {loss:.3f}  {rate}  {left} left  peak {memory}"
