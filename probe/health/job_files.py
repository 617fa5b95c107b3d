"""Files of a job that runs: the sources that it was started from, the checkpoints of one that isn't ours."""

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import psutil

import trainer
from probe.health.processes import ask, command_line

MOST_FILES = 3000
"""A folder of data sets beside a script holds more than anybody waits for."""
DEPTH = 3
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npz")
FOREIGN_FOLDERS = {"node_modules", "site-packages", "dist-packages", "__pycache__", "venv", "env"}
"""Folders that are not the job's own."""
YOUNGER_S = 2.0
"""A file that is younger than its process by less may have been written just before: start times are rounded."""


def newer_sources(job: psutil.Process, is_ours: bool) -> tuple[tuple[str, float], ...] | None:
    """(source file, seconds that it is younger than the process) of those that it was started from, its own script first;
    None if none is known. psutil.Error if the job has ended."""
    started_s, ages = job.create_time(), []
    for path in dict.fromkeys(_sources(job, is_ours)):
        with contextlib.suppress(OSError):
            ages.append((path.name, path.stat().st_mtime - started_s))
    return tuple((name, younger_s) for name, younger_s in ages if younger_s > YOUNGER_S) if ages else None


def _sources(job: psutil.Process, is_ours: bool) -> Iterator[Path]:
    """The script, what lies beside it, the package of a -m; for our runs the trainer with its sub-folders."""
    line, folder = command_line(job), Path(ask(job, psutil.Process.cwd) or ".")
    if is_ours:
        local = folder / "trainer"
        yield from sorted((local if (local / "cli.py").is_file() else Path(trainer.__file__).parent).rglob("*.py"))
        return
    for before, part in pairwise(line):
        if before == "-m":
            module = folder.joinpath(*part.split("."))
            for script in (module.with_suffix(".py"), module / "__main__.py"):
                if script.is_file():
                    yield from (script, *sorted(script.parent.glob("*.py")))
            return
        if part.endswith(".py") and (folder / part).is_file():
            yield from (folder / part, *sorted((folder / part).parent.glob("*.py")))
            return


def recent_checkpoints(job: psutil.Process) -> tuple[tuple[str, float], ...]:
    """(name, age in seconds) of files like checkpoints under its folder that are younger than the process, newest first.
    psutil.Error if the job has ended."""
    folder, started_s, now_s = ask(job, psutil.Process.cwd), job.create_time(), time.time()
    if folder is None:
        return ()
    saves = []
    for path in islice(_files(Path(folder), DEPTH), MOST_FILES):
        if path.suffix in CHECKPOINT_SUFFIXES:
            with contextlib.suppress(OSError):
                saves.append((path.stat().st_mtime, path.name))
    return tuple((name, now_s - saved_s) for saved_s, name in sorted(saves, reverse=True)[:10] if saved_s > started_s)


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
            elif (depth and entry.is_dir(follow_symlinks=False) and entry.name not in FOREIGN_FOLDERS
                  and entry.name[0] != "."):
                yield from _files(Path(entry.path), depth - 1)
