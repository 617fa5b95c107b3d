"""The folder of a run, results/runs/<id>/: the one place that knows what its files are called, and who may use it."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spillcliff.errors import Refused, UserError
from trainer.plan import Plan

LOCK_PATIENCE_S = 0.3
"""How long a start waits for a folder's lock, which an audit that looks at it holds for a moment."""
_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_UNFINISHED = re.compile(_CHECKPOINT.pattern + r"\.tmp")


def runs_folder(results: Path) -> Path:
    """Where runs lie that are not told to lie elsewhere."""
    return results / "runs"


@dataclass(frozen=True)
class RunFolder:
    """A run's files by name; making one touches nothing."""

    path: Path

    @property
    def plan(self) -> Path:
        """The plan that it runs, a copy."""
        return self.path / "plan.json"

    @property
    def log(self) -> Path:
        """A line of JSON for each step, evaluation and checkpoint."""
        return self.path / "log.jsonl"

    @property
    def receipt(self) -> Path:
        """Planned beside actual, there when the run is through."""
        return self.path / "receipt.json"

    @property
    def process(self) -> Path:
        """Which process runs it, or ran it last."""
        return self.path / "process.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """A copy of the tokenizer that made its token file."""
        return self.path / "tokenizer.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def curve(self) -> Path:
        """The picture that `train curve` draws."""
        return self.path / "curve.png"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step`."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints that are there, lowest first: folders named as `checkpoint` names them. What is still
        being written is none, nor is what somebody put there under another name (step-old, step-12)."""
        return sorted(step for p in self.checkpoints.glob("step-*") if (match := _CHECKPOINT.fullmatch(p.name))
                      and p == self.checkpoint(step := int(match[1])) and p.is_dir())

    def unfinished_checkpoints(self) -> list[Path]:
        """What a process left behind that was killed while it wrote."""
        return [p for p in self.checkpoints.glob("step-*.tmp") if _UNFINISHED.fullmatch(p.name)]

    def has_plan(self) -> bool:
        return self.plan.is_file()

    def load_plan(self) -> Plan:
        """UserError for a folder without a run."""
        if not self.has_plan():
            raise UserError(f"run {self.path} holds no plan.json; name a folder that `train` made, such as results/runs/...")
        return Plan.load(self.plan)

    def why_not_free(self) -> str | None:
        """Why no run can be started in this folder; None if one can: a plan alone, of a start that failed, is none."""
        if self.receipt.exists() or self.checkpoint_steps():
            return f"{self.path} holds a run already; go on with it by --resume, or name another --run"
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder, made if need be, against other runs; Refused if one has it. The system lets go of it however
        a process ends."""
        from filelock import FileLock, Timeout

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.lock).acquire(timeout=LOCK_PATIENCE_S)
        except Timeout:
            raise Refused(f"another process runs in {self.path}; wait for it, or name another --run") from None
        except OSError as e:
            raise UserError(f"can't write {self.path}: {e.strerror or e}") from None
        with lock:
            yield

    def is_locked(self) -> bool | None:
        """Whether another process runs in this folder; None where that can't be tried. Makes nothing."""
        from filelock import FileLock, Timeout

        if not self.lock.exists():
            return False
        try:
            with FileLock(self.lock).acquire(timeout=0):
                return False
        except Timeout:
            return True
        except OSError:
            return None

    def start(self, plan: Plan) -> None:
        """Makes the folder; UserError if a run is in it already."""
        if problem := self.why_not_free():
            raise UserError(problem)
        plan.save(self.plan)
        self.log.unlink(missing_ok=True)

    def check_resume(self, plan: Plan, is_lr_asked: bool = False) -> None:
        """UserError if there is no run to go on with here, or its plan was another one: but for the peak rate, where another
        `is_lr_asked` for."""
        if not self.plan.exists():
            raise UserError(f"{self.path} holds no run to resume; leave --resume out to start one")
        if self.receipt.exists():
            raise UserError(f"run {self.path} is finished: its receipt is {self.receipt}")
        old, new = Plan.load(self.plan).to_json(), plan.to_json()
        if is_lr_asked:
            old["optimizer"]["lr"] = new["optimizer"]["lr"]
        changed = [f"{name} {old[name]!r:.80} -> {new[name]!r:.80}"
                   for name in ("model", "step", "steps", "corpus_tokens", "epochs", "optimizer") if old[name] != new[name]]
        if changed:
            raise UserError(f"run {self.path} was started from another plan ({'; '.join(changed)}); resume with its own, "
                            f"{self.plan}")

    def resume(self, plan: Plan, is_lr_asked: bool = False) -> None:
        """As check_resume; a peak rate that was asked for is the run's from here on."""
        self.check_resume(plan, is_lr_asked)
        if is_lr_asked:
            plan.save(self.plan)


def new_run_folder(results: Path, plan: Plan) -> RunFolder:
    """One under results/runs/ that is not there yet, named by the model and the local time."""
    base = runs_folder(results) / f"{plan.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = Path(f"{base}-{n}")
    return RunFolder(path)
