"""Processes beside a job that look like it: of the same command line, or of the same run folder."""

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import psutil

from probe.health.observation import Peer, Relation
from probe.health.process_tree import cpu_seconds

T = TypeVar("T")
_TRAINER = re.compile(r"trainer[./\\](cli|__main__)|^trainer$|train(\.exe)?$")
"""A part of a command line that makes it our `train`: python -m trainer, its file, or the script that pip installs."""


@dataclass(frozen=True)
class SimilarProcess:
    """A process, and the processor time that it had used `at_s` (monotonic)."""

    process: psutil.Process
    relation: Relation
    cpu_s: float
    at_s: float

    @classmethod
    def of(cls, process: psutil.Process, relation: Relation) -> "SimilarProcess | None":
        """None if it has ended or may not be read."""
        with contextlib.suppress(psutil.Error):
            return cls(process, relation, cpu_seconds(process), time.monotonic())
        return None

    def peer(self) -> Peer | None:
        """What it has used since; None if it has ended or may not be read."""
        with contextlib.suppress(psutil.Error):
            seconds = max(time.monotonic() - self.at_s, 1e-3)
            share = max(0.0, cpu_seconds(self.process) - self.cpu_s) / seconds
            return Peer(self.process.pid, share, self.process.memory_info().rss, self.relation)
        return None


def similar_processes(job: psutil.Process, run: Path | None) -> list[SimilarProcess]:
    """The job itself, first, and the processes with its command line in its folder, or with its run folder. Ranks of one
    distributed job are none of each other."""
    itself = SimilarProcess.of(job, "itself")
    if not itself:
        return []
    similar, line = [itself], command_line(job)
    parents = ask(job, psutil.Process.parents) or []
    children = ask(job, lambda p: p.children(recursive=True)) or []
    for other in psutil.process_iter():
        if other.pid in (job.pid, os.getpid()) or len(line) < 2 or not _is_similar(other, job, line, run):
            continue
        relation: Relation = "parent" if other in parents else "child" if other in children else "other"
        if process := SimilarProcess.of(other, relation):
            similar.append(process)
    return similar


def _is_similar(other: psutil.Process, job: psutil.Process, line: list[str], run: Path | None) -> bool:
    theirs = command_line(other)
    has_same_line = theirs[1:] == line[1:] and ask(other, psutil.Process.cwd) in (ask(job, psutil.Process.cwd), None)
    has_same_run = run is not None and _trains_in(theirs, other, run)
    return (has_same_line or has_same_run) and _rank(other) == _rank(job)


def command_line(process: psutil.Process) -> list[str]:
    """[] if it can't be read."""
    return ask(process, psutil.Process.cmdline) or []


def ask(process: psutil.Process, question: Callable[[psutil.Process], T]) -> T | None:
    """What a process answers; None if it has ended or belongs to somebody else."""
    with contextlib.suppress(psutil.Error, OSError):
        return question(process)
    return None


def _trains_in(line: list[str], process: psutil.Process, run: Path) -> bool:
    """Whether a process is a `train` with this run folder."""
    for name, value in pairwise(line):
        if name == "--run" and any(_TRAINER.search(part) for part in line[:4]):
            return (Path(ask(process, psutil.Process.cwd) or ".") / value).resolve() == run.resolve()
    return False


def _rank(process: psutil.Process) -> str | None:
    return (ask(process, psutil.Process.environ) or {}).get("LOCAL_RANK")
