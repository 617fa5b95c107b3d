"""What a run leaves behind and shows: the JSONL log, the live line, the receipt."""

import contextlib
import functools
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from spillcliff import jsonl
from spillcliff.errors import Refused, UserError
from spillcliff.units import format_bytes, format_count, format_duration
from trainer.plan import Plan

if TYPE_CHECKING:  # it brings torch, which who looks at a run's folder needs not
    from trainer.run.timing import StepTimes

LOCK = ".lock"
PATIENCE_S = 0.3
"""How long a start waits for a folder's lock, which an audit that looks at it holds for a moment."""


class RunLog:
    """Appends one JSON object a line to log.jsonl, handed to the system when `write` returns, and gives it to `board`, a
    tensorboard.Board or None. A disk that doesn't take it is told once by `say`, and the run goes on. Not `kept`, nothing
    is written: of a team one process writes."""

    def __init__(self, run: Path, say, kept: bool = True, board=None) -> None:
        self.path, self._say, self._failed = run / "log.jsonl" if kept else Path(os.devnull), say, False
        self._board = board
        try:
            if kept:
                with open(self.path, "ab+") as f:  # a process that was killed may have left half a line
                    jsonl.set_torn_aside(f, self.path)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as e:
            raise UserError(f"can't write {self.path}: {e.strerror or e}") from None

    def write(self, kind: str, step: int, **values) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, "at": round(time.time(), 3), **values}) + "\n")
            self._file.flush()
            if self._board:
                self._board.write(kind, step, values)
        except OSError as e:
            if not self._failed:
                self._say(f"can't write {self.path}: {e.strerror or e}; the run goes on, with lines missing there")
            self._failed = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            if self._board:
                self._board.close()


class Meter:
    """Rates of this process's own steps: what a resumed run did before, and the first steps, are not in them."""

    WARMUP = 5

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._seen = 0
        self.step_s: list[float] = []
        self._recent: deque[StepTimes] = deque(maxlen=20)

    def add(self, times: "StepTimes") -> None:
        self._seen += 1
        self._recent.append(times)
        if self._seen > self.WARMUP:
            self.step_s.append(times.step_s)

    @property
    def recent_s(self) -> float | None:
        """Median seconds of the latest steps."""
        return median(t.step_s for t in self._recent) if self._recent else None

    @property
    def recent_tok_s(self) -> float | None:
        """Tokens per second at the median of the latest steps; None before the warm-up is over."""
        return self._tokens / self.recent_s if self.step_s else None

    @property
    def recent_data_share(self) -> float:
        """Of the latest steps' time, what was spent waiting for tokens."""
        return sum(t.data_s for t in self._recent) / (sum(t.step_s for t in self._recent) or 1)

    @property
    def tok_s(self) -> float | None:
        """Tokens per second at the median step; None before the warm-up is over."""
        return self._tokens / median(self.step_s) if self.step_s else None


def live_line(plan: Plan, step: int, loss: float, meter: Meter, peak_bytes: int | None) -> str:
    """One line for a person: step, loss, tok/s, time left, memory; below 80 columns."""
    recent = meter.recent_s
    rate = f"{plan.step.tokens / recent:,.0f} tok/s" if recent else "-"
    left = format_duration((plan.steps - step) * recent) if recent else "?"
    memory = format_bytes(peak_bytes) if peak_bytes else "-"
    return f"step {step}/{plan.steps}  loss {loss:.3f}  {rate}  {left} left  peak {memory}"


def receipt(plan: Plan, meter: Meter, peaks: dict, seconds: float, extra: dict) -> dict:
    """Planned beside actual: {planned, actual, ratio} for tok_s, peak_bytes and hours, and how the time was spent.

    A figure that can't be had (no steps after the warm-up, no peak on this device) is null, and so is its ratio.
    """
    peak = peaks["device_peak_bytes"] or peaks["reserved_peak_bytes"]
    planned = {name: getattr(plan.predicted, name).mid for name in ("tok_s", "peak_bytes", "hours")}
    actual = {"tok_s": meter.tok_s, "peak_bytes": peak, "hours": seconds / 3600}
    ratio = {k: actual[k] / planned[k] if actual[k] and planned[k] else None for k in planned}
    return {"schema": 1, "planned": planned, "actual": actual, "ratio": ratio, "device": plan.device,
            "model": plan.model.name, "steps": plan.steps, "tokens": plan.steps * plan.step.tokens, **peaks, **extra}


def receipt_rows(receipt: dict) -> list[tuple[str, str, str, str]]:
    """(what, planned, actual, difference) as text, for a table."""
    def show(name, value):
        if value is None:
            return "-"
        return {"tok_s": lambda v: f"{v:,.0f} tok/s", "peak_bytes": format_bytes,
                "hours": lambda v: format_duration(v * 3600)}[name](value)

    return [(label, show(name, receipt["planned"][name]), show(name, receipt["actual"][name]),
             f"{(receipt['ratio'][name] - 1) * 100:+.1f}%" if receipt["ratio"][name] else "-")
            for name, label in (("tok_s", "throughput"), ("peak_bytes", "peak memory"), ("hours", "whole time"))]


class RunFolder:
    """results/runs/<id>/ of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def problem(path: Path) -> str | None:
        """Why no run can be started in this folder; None if one can."""
        if (path / "receipt.json").exists() or any((path / "checkpoints").glob("step-*[0-9]")):  # not .tmp
            return f"{path} holds a run already; go on with it by --resume, or name another --run"
        return None

    @staticmethod
    @contextlib.contextmanager
    def alone(path: Path) -> Iterator[None]:
        """Holds the folder, made if need be, against other runs; Refused if one has it. The system lets go of it however
        a process ends."""
        from filelock import FileLock, Timeout

        try:
            path.mkdir(parents=True, exist_ok=True)
            held = FileLock(path / LOCK).acquire(timeout=PATIENCE_S)
        except Timeout:
            raise Refused(f"another process runs in {path}; wait for it, or name another --run") from None
        except OSError as e:
            raise UserError(f"can't write {path}: {e.strerror or e}") from None
        with held:
            yield

    @staticmethod
    def held(path: Path) -> bool | None:
        """Whether another process runs in this folder; None where that can't be tried. Makes nothing."""
        from filelock import FileLock, Timeout

        if not (path / LOCK).exists():
            return False
        try:
            with FileLock(path / LOCK).acquire(timeout=0):
                return False
        except Timeout:
            return True
        except OSError:
            return None

    @classmethod
    def start(cls, path: Path, plan: Plan) -> "RunFolder":
        """Makes the folder; UserError if a run is in it already: a plan alone, of a start that failed, is none."""
        if problem := cls.problem(path):
            raise UserError(problem)
        plan.save(path / "plan.json")
        (path / "log.jsonl").unlink(missing_ok=True)
        return cls(path)

    @classmethod
    def resume(cls, path: Path, plan: Plan) -> "RunFolder":
        """The folder of a run to go on with; UserError if it holds none or its plan was another one."""
        if not (path / "plan.json").exists():
            raise UserError(f"{path} holds no run to resume; leave --resume out to start one")
        if (path / "receipt.json").exists():
            raise UserError(f"run {path} is finished: its receipt is {path / 'receipt.json'}")
        old, new = Plan.load(path / "plan.json").to_json(), plan.to_json()
        changed = [f"{name} {old[name]!r:.80} -> {new[name]!r:.80}"
                   for name in ("model", "step", "steps", "corpus_tokens", "epochs", "optimizer") if old[name] != new[name]]
        if changed:
            raise UserError(f"run {path} was started from another plan ({'; '.join(changed)}); resume with its own, "
                            f"{path / 'plan.json'}")
        return cls(path)


def default_run(results: Path, plan: Plan) -> Path:
    """A new folder's name under results/runs/, from the model and the local time."""
    base = results / "runs" / f"{plan.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = Path(f"{base}-{n}")
    return path


def describe(plan: Plan) -> str:
    """The plan in one line."""
    s = plan.step
    return (f"{plan.model.name} ({format_count(plan.model.parameters)} parameters), B={s.batch} L={s.length} "
            f"accum={s.accum} {s.engine}/{s.recompute}, {plan.steps} steps of {s.tokens} tokens")


def process_seconds() -> float:
    """Seconds since this process started, the imports included; a clock that is set meanwhile changes nothing."""
    return time.monotonic() - _started()


@functools.cache
def _started() -> float:
    """When this process started, on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process(os.getpid()).create_time())
