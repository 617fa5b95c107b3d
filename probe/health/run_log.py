"""What the folder of a run tells about it from outside: its plan, its log as it grows, its newest checkpoint. No torch."""

import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from spillcliff.errors import UserError
from spillcliff.files import read_json
from trainer.plan import Plan, is_due
from trainer.run.slowdown import AWAY_S, is_away

RECENT = 50
"""Steps, and a tenth as many evaluations and checkpoints, that stand for how it goes now."""
TAIL_BYTES = 1 << 20
"""Of the log that are read at first: some 4,000 lines."""


@dataclass(frozen=True)
class Page:
    """A run as its folder tells it. Seconds; `phase` is what goes on since the last line (start-up, step, evaluation,
    checkpoint), `usual_s` how long that takes as a rule, `silent_s` how long ago the last line was, `lines` how many came
    while it was looked at; `logged` and `kept` the steps of the newest checkpoint by the log and on the disk, `pauses` the
    evaluations and checkpoints as (begin, end)."""

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
    phase: str
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
    pauses: tuple[tuple[float, float], ...] = ()

    @property
    def tok_s(self) -> float | None:
        return self.tokens / self.step_s if self.step_s else None

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the time now, evaluations and checkpoints at their cadence: data, logging, evaluation, checkpoint and
        compute, which is the rest of the step."""
        spent = {"data": self.data_s, "logging": self.log_s, "evaluation": (self.eval_s or 0.0) / self.eval_every,
                 "checkpoint": (self.save_s or 0.0) / self.save_every,
                 "compute": self.mean_s - self.data_s - self.log_s}
        return {name: seconds / sum(spent.values()) for name, seconds in spent.items()}


class Diary:
    """A run's folder, read again and again at little cost. UserError if there is no run in it."""

    def __init__(self, run: Path) -> None:
        if not (run / "plan.json").is_file():
            raise UserError(f"--run {run}: no run there (it has no plan.json); name a folder that `train` made")
        self.run, self.plan = run, Plan.load(run / "plan.json")
        self._path, self._offset, self._rest = run / "log.jsonl", None, b""
        self._steps, self._evals = deque(maxlen=RECENT), deque(maxlen=RECENT // 10)
        self._saves, self._pauses, self._last, self._lines = deque(maxlen=RECENT // 10), deque(maxlen=RECENT), None, 0
        self.read()

    def process(self) -> dict | None:
        """{pid, started_at, ran_on} of the process that runs or ran it last; None before its first step."""
        path = self.run / "process.json"
        if not path.is_file():
            return None
        values = read_json(path, "process file")
        if not (all(_is_amount(values.get(k)) for k in ("pid", "started_at")) and isinstance(values.get("ran_on"), str)):
            raise UserError(f"process file {path} has no pid, started_at and ran_on; it must be what `train` wrote")
        return values

    @property
    def finished(self) -> bool:
        return (self.run / "receipt.json").is_file()

    def newest(self) -> int | None:
        """The step of the newest checkpoint on the disk."""
        names = [p.name for p in (self.run / "checkpoints").glob("step-????????")]
        return max((int(n[5:]) for n in names if n[5:].isdecimal()), default=None)

    def read(self) -> None:
        """Takes in what the log has gained."""
        try:
            with open(self._path, "rb") as f:
                size = f.seek(0, 2)
                if self._offset is None or size < self._offset:
                    self._offset, self._rest = max(0, size - TAIL_BYTES), b""
                f.seek(self._offset)
                added = f.read()
        except OSError:
            return
        self._offset += len(added)
        *whole, self._rest = (self._rest + added).split(b"\n")
        for text in whole:
            self._take(text)

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # the first may begin in the middle
            return
        if not isinstance(line, dict) or not all(_is_amount(line.get(k)) for k in ("at", "step")):
            return
        kind = line.get("kind")
        self._lines += 1
        if kind == "step" and all(_is_amount(line.get(k)) for k in ("step_s", "data_s", "log_s")):
            if not 0 < line["step_s"] >= 0.999 * (line["data_s"] + line["log_s"]):  # which are parts of it
                return
            if not is_away(line["step_s"], [s["step_s"] for s in self._steps]):
                self._steps.append(line)
        elif kind in ("eval", "checkpoint") and _is_amount(line.get("seconds")):
            (self._evals if kind == "eval" else self._saves).append(line)
            self._pauses.append((line["at"] - line["seconds"], line["at"]))
        else:
            return
        self._last = line

    def page(self, lines_before: int, since_s: float, now_s: float | None = None) -> Page:
        """How it stands now: `lines_before` is what `lines` was and `since_s` when (epoch) the look began."""
        now_s = time.time() if now_s is None else now_s
        plan, last, process = self.plan, self._last, self.process()
        usual = {"step": median(s["step_s"] for s in self._steps) if self._steps else None,
                 "evaluation": _mean(self._evals), "checkpoint": _mean(self._saves)}
        phase = self._phase()
        spoke_s = max(last["at"] if last else 0.0, process["started_at"] if process else 0.0)
        saved = self._saves[-1] if self._saves else None
        return Page(
            str(self.run), plan.steps, plan.eval, plan.checkpoint, plan.step.tokens, plan.predicted.tok_s.low,
            plan.limit_bytes, self.finished, last["step"] if last else 0, self._lines - lines_before, phase,
            max(0.0, now_s - spoke_s), usual.get(phase), usual["step"],
            *(mean(s[k] for s in self._steps) if self._steps else d for k, d in
              (("step_s", None), ("data_s", 0.0), ("log_s", 0.0))), usual["evaluation"], usual["checkpoint"],
            saved and saved["step"], self.newest(), saved and max(0.0, now_s - saved["at"]),
            tuple(p for p in self._pauses if p[1] >= since_s))

    @property
    def lines(self) -> int:
        """Lines taken in so far."""
        return self._lines

    def _phase(self) -> str:
        """What the run does since its last line: steps that end in a pause are written first, then the evaluation, then
        the checkpoint."""
        if self._last is None:
            return "start-up"
        kind, step = self._last["kind"], self._last["step"]
        if kind == "step" and is_due(step, self.plan.steps, self.plan.eval):
            return "evaluation"
        if kind in ("step", "eval") and step and is_due(step, self.plan.steps, self.plan.checkpoint):
            return "checkpoint"
        return "step"


def is_silent(page: Page) -> bool:
    """Whether the log has been still for longer than what goes on can take: as for a step that is told as a suspension, and
    ten times that where it isn't known what is usual."""
    if page.usual_s is None:
        return page.silent_s > 10 * AWAY_S
    return is_away(page.silent_s, [page.usual_s])


def _mean(lines) -> float | None:
    return mean(line["seconds"] for line in lines) if lines else None


def _is_amount(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
