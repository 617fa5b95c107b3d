"""The commands by which a run goes on, as a person can copy them. Pure but for looking at what lies in the run's folder."""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trainer.run_folder import RunFolder


@dataclass(frozen=True)
class RunCommands:
    """Of a run in `folder` that was started with `options` (name, value; value None for a flag), those of its plan, folder,
    rate and source left out; `source` is its --from, `processes` how many it is shared by."""

    folder: RunFolder
    options: tuple[tuple[str, str | None], ...] = ()
    source: Path | None = None
    processes: int = 1

    def resume(self, lr: float | None = None) -> str:
        """Goes on from the newest whole checkpoint, with another peak rate if one is given."""
        return self._line(self.folder.path, lr, [("--resume", None)])

    def start(self, lr: float | None = None) -> str:
        """Starts anew: in the same folder while it is free, else in another one."""
        return self._line(self._free_folder(), lr, [("--from", str(self.source))] if self.source else [])

    def go_on(self, lr: float | None = None) -> str:
        """Resumes, or where there is no checkpoint yet starts anew."""
        return self.resume(lr) if self.folder.checkpoint_steps() else self.start(lr)

    def _free_folder(self) -> Path:
        path, n = self.folder.path, 1
        while RunFolder(path).why_not_free():
            n += 1
            path = self.folder.path.with_name(f"{self.folder.path.name}-{n}")
        return path

    def _line(self, path: Path, lr: float | None, more: list[tuple[str, str | None]]) -> str:
        rate = [("--lr", f"{lr:g}")] if lr is not None else []
        told = [("--plan", str(self.folder.plan)), *self.options, *rate, ("--run", str(path)), *more]
        words = [word for pair in told for word in pair if word is not None]
        begin = "train" if self.processes == 1 else f"torchrun --nproc-per-node {self.processes} -- $(which train)"
        return f"{begin} {subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)}"
