"""Runs a task in a process of its own, which may end in any way without harming this one."""

import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from probe.outcome import Outcome
from probe.tasks.table import Task
from spillcliff.failures import failure
from spillcliff.hardware.host_memory import host_memory

A = TypeVar("A")
P = TypeVar("P")

GRACE_BYTES = 1 << 29
"""What must stay free on a machine whose own memory is measured; below it the worker is stopped, not the desktop."""
SMALLEST_GRACE = 16
"""In a small container a part of what there is will do, a sixteenth: there is no desktop in it."""
TICK_S = 0.25
START_S = 120
"""A start of Python and an import of torch that take longer are taken for a hang; 9 s were seen on an H200's host."""
PRELOADED = "probe.tasks.measure_cell"
"""What a process that stands ready has imported."""

_environment_lock = threading.Lock()
"""The environment is the whole process's, and two processes may be started at once by two threads."""
PACKAGES = Path(__file__).parents[2]
"""The folder that our packages lie in."""


def child_environment() -> dict[str, str]:
    """Variables for a Python that is started with -c or -m: it must find our packages, and not look into the folder that the
    user is in, whose trainer.py or random.py would be taken for ours or for Python's own."""
    path = [str(PACKAGES)] if PACKAGES.name not in ("site-packages", "dist-packages") else []
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextlib.contextmanager
def _environment_of_children() -> Iterator[dict[str, str | None]]:
    """Sets them while a process is started; gives what was there before, for the child to put back."""
    with _environment_lock:
        new = child_environment()
        before = {name: os.environ.get(name) for name in new}
        os.environ.update(new)
        try:
            yield before
        finally:
            _set_variables(before)


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _Worker:
    """A process that waits to be told what to do; `ready` has it import what is needed meanwhile."""

    def __init__(self, context: Any, ready: bool) -> None:
        self.pipe, theirs = context.Pipe()
        # named here and made there, so that whichever of the two outlives the other can remove it
        self._folder = Path(tempfile.gettempdir()) / f"probe-{uuid.uuid4().hex}"
        with _environment_of_children() as variables:
            self.process = context.Process(target=_child, args=(theirs, str(self._folder), ready, variables), daemon=True)
            self.process.start()
        theirs.close()

    def end(self) -> str:
        """Ends it, and returns the end of what it printed."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        printed = ""
        with contextlib.suppress(OSError):
            printed = (self._folder / "printed").read_text(errors="replace")[-2000:]
        shutil.rmtree(self._folder, ignore_errors=True)
        return printed


class Workers:
    """Starts processes, on Linux by forking a server that has imported torch and touched no card, elsewhere one ahead, so
    that the next has imported torch while this one measures. Torch is never imported here: it would take a context from
    the card that is measured. To be closed, or used in a `with`."""

    def __init__(self) -> None:
        self._anew = multiprocessing.get_context("spawn")
        self._fork: Any = None
        self._spare: _Worker | None = None
        if sys.platform == "linux":
            self._fork = multiprocessing.get_context("forkserver")
            self._fork.set_forkserver_preload([PRELOADED])

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        if self._spare:
            self._spare.end()
            self._spare = None

    def run(self, task: Task[A, P], seconds: float, on_host: bool = False,
            certain: Callable[[P, float], str | None] = lambda progress, quiet_s: None,
            tell: Callable[[P], None] = lambda progress: None) -> Outcome[A, P]:
        """Does `task` elsewhere. Ends it `seconds` after it was begun, or when `certain` says why it need not go on, given
        its last progress and the seconds since; `tell` is given each progress. With `on_host`, where this machine's own
        memory is what is measured, the process is started anew (a fork does not count the library pages that its server
        read: 55 MB less than a run takes) and ended when the machine runs out of memory."""
        if on_host:
            worker = _Worker(self._anew, ready=False)
        elif self._fork:
            worker = _Worker(self._fork, ready=False)
        else:
            worker, self._spare = self._spare or _Worker(self._anew, ready=False), None
        followed: dict[str, Any] = {}
        try:
            with contextlib.suppress(OSError):  # it died before it was asked, which its exit code tells
                worker.pipe.send(task)
            if not on_host and not self._fork:
                self._spare = _Worker(self._anew, ready=True)
            followed = _follow(worker, seconds, on_host, certain, tell)
        finally:
            printed = worker.end()
        return Outcome(**followed, exit_code=worker.process.exitcode, printed=printed)


def _follow(worker: _Worker, seconds: float, on_host: bool, certain: Callable[[Any, float], str | None],
            tell: Callable[[Any], None]) -> dict[str, Any]:
    """The fields of an Outcome that are seen while the process runs."""
    begin = heard = time.monotonic()
    progress: Any = None
    has_begun = False
    while True:
        is_heard = wait([worker.pipe], timeout=TICK_S)
        now = time.monotonic()
        if is_heard:
            heard = now
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                return {"progress": progress, "seconds": now - begin}
            if kind == "begun":
                begin, has_begun = now, True
            elif kind == "progress":
                progress = value
                tell(value)
            else:
                return {"progress": progress, "seconds": now - begin, kind: value}
        elif progress is not None and (why := certain(progress, now - heard)):
            return {"progress": progress, "seconds": now - begin, "killed": "spill", "certain": why}
        if now - begin > (seconds if has_begun else START_S):
            return {"progress": progress, "seconds": now - begin, "killed": "timeout"}
        if on_host and not is_heard and _is_memory_short():
            return {"progress": progress, "seconds": now - begin, "killed": "memory",
                    "resident_bytes": _resident_bytes(worker.process.pid)}


def _is_memory_short() -> bool:
    memory = host_memory()
    return memory.free_bytes < min(GRACE_BYTES, memory.total_bytes // SMALLEST_GRACE)


def _resident_bytes(pid: int | None) -> int:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _child(pipe: Connection, folder: str, ready: bool, variables: dict[str, str | None]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides what it means
    signal.signal(signal.SIGTERM, lambda *how: _leave(folder))  # sent where the parent was interrupted while it started this
    os.mkdir(folder, 0o700)
    out = os.open(os.path.join(folder, "printed"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    _set_variables(variables)
    if ready:
        _import_quietly()
    try:
        task = pipe.recv()
    except (EOFError, OSError):
        _leave(folder)
    threading.Thread(target=_end_with_parent, args=(pipe, folder), daemon=True).start()
    message: tuple[str, Any]
    try:
        pipe.send(("begun", None))
        message = ("answer", task.run(lambda progress: pipe.send(("progress", progress))))
    except BaseException as e:  # whatever it was, the parent must hear of it; this process ends here
        message = ("error", failure(e))
    # what was printed is read only where there is no answer; removed here, it is gone even if the parent is killed next
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        pipe.send(message)
    os._exit(0)  # tearing torch down takes longer than the system does, and may hang after a card's failure


def _import_quietly() -> None:
    """Imports what will be needed, at a low priority where that can be raised again, since a cell is being timed."""
    import psutil

    me = psutil.Process()
    if sys.platform == "win32":
        me.nice(psutil.IDLE_PRIORITY_CLASS)
    importlib.import_module(PRELOADED)
    if sys.platform == "win32":
        me.nice(psutil.NORMAL_PRIORITY_CLASS)


def _end_with_parent(pipe: Connection, folder: str) -> None:
    """Nothing more is ever sent this way: the read returns when the parent is gone, however it went."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    _leave(folder)


def _leave(folder: str) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
