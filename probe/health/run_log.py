"""What the folder of a run tells about it from outside: its plan, its log as it grows, its newest checkpoint. No torch."""

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median
from typing import Annotated, Literal, NamedTuple

from probe.health.utilization import Period
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import parse_json, read_json
from spillcliff.schema import Number
from trainer.plan import is_due
from trainer.run.slowdown import AWAY_S, is_away
from trainer.run_folder import RunFolder

RECENT = 50
"""Steps, and a tenth as many evaluations and checkpoints, that stand for how it goes now."""
TAIL_BYTES = 1 << 20
"""Of the log that are read at first: some 4,000 lines."""

Amount = Annotated[float, Number(0, 1e12)]
Phase = Literal["start-up", "step", "evaluation", "checkpoint"]
LineKind = Literal["step", "eval", "checkpoint"]


@dataclass(frozen=True)
class RunProcess:
    """The process that runs a run, or ran it last: its start in seconds since the epoch, the device's name, and its
    card's uuid ("" for none, and where it was not written down)."""

    pid: Annotated[int, Number(0, 1e12)]
    started_at: Amount
    ran_on: str
    uuid: str = ""


@dataclass(frozen=True)
class RunStatus:
    """A run as its folder tells it; the fields are those of --json's `page`. Seconds; `phase` is what goes on since the last
    line, `usual_s` how long that takes as a rule, `silent_s` how long ago the last line was, `lines` how many came while the
    run was observed; `step_s` is the median step, `mean_s` the mean one, of which `data_s` and `log_s` are parts; `logged`
    and `kept` are the steps of the newest checkpoint by the log and on the disk, `pauses` the evaluations and
    checkpoints."""

    run: str
    steps: int
    eval_every: int
    save_every: int
    tokens: int
    planned_tok_s: float
    limit_bytes: int
    finished: bool
    step: int
    lines: int
    phase: Phase
    silent_s: float
    usual_s: float | None = None
    step_s: float | None = None
    mean_s: float | None = None
    data_s: float = 0.0
    log_s: float = 0.0
    eval_s: float | None = None
    save_s: float | None = None
    logged: int | None = None
    kept: int | None = None
    since_save_s: float | None = None
    pauses: tuple[Period, ...] = ()

    @property
    def tok_s(self) -> float | None:
        return self.tokens / self.step_s if self.step_s else None

    @property
    def data_share(self) -> float:
        """The part of the steps that waited for tokens; 0 before the first step."""
        return self.data_s / self.mean_s if self.mean_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the time now, evaluations and checkpoints at their cadence: data, logging, evaluation, checkpoint and
        compute, which is the rest of the step. {} before the first step."""
        if not self.mean_s:
            return {}
        spent = {"data": self.data_s, "logging": self.log_s, "evaluation": (self.eval_s or 0.0) / self.eval_every,
                 "checkpoint": (self.save_s or 0.0) / self.save_every,
                 "compute": self.mean_s - self.data_s - self.log_s}
        return {name: seconds / sum(spent.values()) for name, seconds in spent.items()}


@dataclass(frozen=True)
class _StepLine:
    at: Amount
    step: Annotated[int, Number(0, 1e12)]
    step_s: Amount
    data_s: Amount
    log_s: Amount


@dataclass(frozen=True)
class _PauseLine:
    """An evaluation or a checkpoint, which ended `at`."""

    at: Amount
    step: Annotated[int, Number(0, 1e12)]
    seconds: Amount


class _LastLine(NamedTuple):
    kind: LineKind | None
    at: float
    step: int


def read_process(folder: RunFolder) -> RunProcess | None:
    """None before the run's first step; UserError for a file that `train` didn't write."""
    if not folder.process.is_file():
        return None
    values = read_json(folder.process, "process file")
    try:
        return schema.read(RunProcess, values)
    except UserError as e:
        raise UserError(f"process file {folder.process}: {e}; it must be what `train` wrote") from None


class RunLogReader:
    """A run's folder, read again and again at little cost: of its log only what is new. UserError if there is no run in
    it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.plan = folder, folder.load_plan()
        self.lines = 0
        """Lines of the log that were read so far."""
        self._offset: int | None = None
        self._torn_line = b""
        self._steps: deque[_StepLine] = deque(maxlen=RECENT)
        self._evals: deque[_PauseLine] = deque(maxlen=RECENT // 10)
        self._saves: deque[_PauseLine] = deque(maxlen=RECENT // 10)
        self._pauses: deque[Period] = deque(maxlen=RECENT)
        self._last = _LastLine(None, 0.0, 0)
        self.read()

    def process(self) -> RunProcess | None:
        return read_process(self.folder)

    def newest_checkpoint(self) -> int | None:
        """Its step, by what is on the disk."""
        return max(self.folder.checkpoint_steps(), default=None)

    def read(self) -> None:
        """Takes in what the log has gained."""
        try:
            with open(self.folder.log, "rb") as f:
                size = f.seek(0, 2)
                if self._offset is None or size < self._offset:
                    self._offset, self._torn_line = max(0, size - TAIL_BYTES), b""
                f.seek(self._offset)
                added = f.read()
        except OSError:
            return
        self._offset += len(added)
        *whole, self._torn_line = (self._torn_line + added).split(b"\n")
        for text in whole:
            self._take(text)

    def _take(self, text: bytes) -> None:
        """Takes in a line; a damaged one is left out, as is the first, which may begin in the middle."""
        try:
            line = parse_json(text)
        except ValueError:
            return
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            return
        self.lines += 1
        with contextlib.suppress(UserError):
            if line["kind"] == "step":
                self._take_step(schema.read(_StepLine, line))
            elif line["kind"] == "eval":
                self._take_pause("eval", schema.read(_PauseLine, line), self._evals)
            elif line["kind"] == "checkpoint":
                self._take_pause("checkpoint", schema.read(_PauseLine, line), self._saves)

    def _take_step(self, line: _StepLine) -> None:
        if not 0 < line.step_s >= 0.999 * (line.data_s + line.log_s):  # which are parts of it
            return
        if not is_away(line.step_s, [s.step_s for s in self._steps]):
            self._steps.append(line)
        self._last = _LastLine("step", line.at, line.step)

    def _take_pause(self, kind: LineKind, line: _PauseLine, lines: deque[_PauseLine]) -> None:
        lines.append(line)
        self._pauses.append((line.at - line.seconds, line.at))
        self._last = _LastLine(kind, line.at, line.step)

    def status(self, lines_before: int, since_s: float) -> RunStatus:
        """How it stands now: `lines_before` is what `lines` was when the run began to be observed, at `since_s` (epoch)."""
        now_s, plan, process, phase = time.time(), self.plan, self.process(), self._phase()
        median_step_s = median(s.step_s for s in self._steps) if self._steps else None
        eval_s, save_s = (_mean(line.seconds for line in lines) for lines in (self._evals, self._saves))
        usual_s = {"start-up": None, "step": median_step_s, "evaluation": eval_s, "checkpoint": save_s}[phase]
        last_sign_s = max(self._last.at, process.started_at if process else 0.0)
        saved = self._saves[-1] if self._saves else None
        return RunStatus(
            run=str(self.folder.path), steps=plan.steps, eval_every=plan.eval, save_every=plan.checkpoint,
            tokens=plan.step.tokens, planned_tok_s=plan.predicted.tok_s.low, limit_bytes=plan.limit_bytes,
            finished=self.folder.receipt.is_file(), step=self._last.step, lines=self.lines - lines_before, phase=phase,
            silent_s=max(0.0, now_s - last_sign_s), usual_s=usual_s, step_s=median_step_s,
            mean_s=_mean(s.step_s for s in self._steps), data_s=_mean(s.data_s for s in self._steps) or 0.0,
            log_s=_mean(s.log_s for s in self._steps) or 0.0, eval_s=eval_s, save_s=save_s,
            logged=saved.step if saved else None, kept=self.newest_checkpoint(),
            since_save_s=max(0.0, now_s - saved.at) if saved else None,
            pauses=tuple(period for period in self._pauses if period[1] >= since_s))

    def _phase(self) -> Phase:
        """What the run does since its last line: steps that end in a pause are written first, then the evaluation, then
        the checkpoint."""
        kind, _, step = self._last
        if kind is None:
            return "start-up"
        if kind == "step" and is_due(step, self.plan.steps, self.plan.eval):
            return "evaluation"
        if kind in ("step", "eval") and step and is_due(step, self.plan.steps, self.plan.checkpoint):
            return "checkpoint"
        return "step"


def is_silent(status: RunStatus) -> bool:
    """Whether the log has been still for longer than what goes on can take: as for a step that is told as a suspension, and
    ten times that where it isn't known what is usual."""
    if status.usual_s is None:
        return status.silent_s > 10 * AWAY_S
    return is_away(status.silent_s, [status.usual_s])


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return mean(listed) if listed else None
