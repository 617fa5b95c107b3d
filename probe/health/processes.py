"""What lies around a job: processes of the same command line, its source files, the checkpoints of a foreign one."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

import trainer
from probe.health.observation import Peer

FILES = 3000
"""Most files that are looked at: a folder of data sets beside a script holds more than anybody waits for."""
DEPTH = 3
SAVED = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npz")
OTHERS = {"node_modules", "site-packages", "dist-packages", "__pycache__", "venv", "env"}
"""Folders that are not the job's own."""
YOUNGER_S = 2.0
"""A file that is younger than its process by less may have been written just before: start times are rounded."""


@dataclass
class Twin:
    """A process of the same command line, and the processor time that it had used when it was found."""

    process: psutil.Process
    relation: str
    spent_s: float
    at_s: float

    @classmethod
    def of(cls, process: psutil.Process, relation: str) -> "Twin | None":
        with contextlib.suppress(psutil.Error):
            return cls(process, relation, _spent(process), time.monotonic())
        return None

    def peer(self) -> Peer | None:
        """It now; None if it has ended or may not be looked at."""
        with contextlib.suppress(psutil.Error):
            seconds = max(time.monotonic() - self.at_s, 1e-3)
            share = max(0.0, _spent(self.process) - self.spent_s) / seconds
            return Peer(self.process.pid, share, self.process.memory_info().rss, self.relation)
        return None


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def twins(job: psutil.Process, run: Path | None) -> list[Twin]:
    """The job itself, first, and the processes with its command line in its folder, or with its run folder. Ranks of one
    distributed job are none of each other."""
    if not (itself := Twin.of(job, "itself")):
        return []
    found = [itself]
    line, here = _line(job), _asked(job, psutil.Process.cwd)
    parents, children = _asked(job, psutil.Process.parents) or [], _asked(job, lambda p: p.children(recursive=True)) or []
    for other in psutil.process_iter():
        if other.pid in (job.pid, os.getpid()) or len(line) < 2:
            continue
        theirs = _line(other)
        is_same = theirs[1:] == line[1:] and _asked(other, psutil.Process.cwd) in (here, None)
        if not (is_same or (run is not None and _trains_in(theirs, other, run))) or _rank(other) != _rank(job):
            continue
        relation = "parent" if other in parents else "child" if other in children else "other"
        if twin := Twin.of(other, relation):
            found.append(twin)
    return found


def _line(process: psutil.Process) -> list[str]:
    return _asked(process, psutil.Process.cmdline) or []


def _asked(process: psutil.Process, question):
    """What a process answers; None if it has ended or belongs to somebody else."""
    with contextlib.suppress(psutil.Error, OSError):
        return question(process)
    return None


def _trains_in(line: list[str], process: psutil.Process, run: Path) -> bool:
    """Whether a process is a `train` with this run folder."""
    for name, value in zip(line, line[1:], strict=False):
        if name == "--run" and any(re.search(r"trainer[./\\]cli|train(\.exe)?$", part) for part in line[:4]):
            return (Path(_asked(process, psutil.Process.cwd) or ".") / value).resolve() == run.resolve()
    return False


def _rank(process: psutil.Process) -> str | None:
    return (_asked(process, psutil.Process.environ) or {}).get("LOCAL_RANK")


def newer_sources(job: psutil.Process, is_ours: bool) -> tuple[tuple[str, float], ...] | None:
    """(source file, seconds that it is younger than the process) of those that it was started from, its own script first;
    None if none is known."""
    begun, files = job.create_time(), dict.fromkeys(_sources(job, is_ours))
    found = []
    for path in files:
        with contextlib.suppress(OSError):
            found.append((path.name, path.stat().st_mtime - begun))
    return tuple((name, after_s) for name, after_s in found if after_s > YOUNGER_S) if found else None


def _sources(job: psutil.Process, is_ours: bool) -> Iterator[Path]:
    """The script, what lies beside it, the package of a -m; for our runs the trainer."""
    line, here = _line(job), Path(_asked(job, psutil.Process.cwd) or ".")
    if is_ours:
        local = here / "trainer"
        yield from sorted((local if (local / "cli.py").is_file() else Path(trainer.__file__).parent).glob("*.py"))
        return
    for before, part in zip(line, line[1:], strict=False):
        if before == "-m":
            path = here.joinpath(*part.split("."))
            for script in (path.with_suffix(".py"), path / "__main__.py"):
                if script.is_file():
                    yield from (script, *sorted(script.parent.glob("*.py")))
            return
        if part.endswith(".py") and (here / part).is_file():
            yield from (here / part, *sorted((here / part).parent.glob("*.py")))
            return


def saves_of(job: psutil.Process) -> tuple[tuple[str, float], ...]:
    """(name, age in seconds) of files like checkpoints under its folder that are younger than the process, newest first."""
    here, begun, now = _asked(job, psutil.Process.cwd), job.create_time(), time.time()
    if here is None:
        return ()
    found = []
    for path in islice(_files(Path(here), DEPTH), FILES):
        if path.suffix in SAVED:
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.name))
    return tuple((name, now - at) for at, name in sorted(found, reverse=True)[:10] if at > begun)


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Files in a folder and those below it, hidden and foreign folders left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path)
            elif depth and entry.is_dir(follow_symlinks=False) and entry.name not in OTHERS and entry.name[0] != ".":
                yield from _files(Path(entry.path), depth - 1)
