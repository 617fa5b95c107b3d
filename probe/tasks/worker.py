"""Runs a function in a process of its own, which may end in any way without harming this one."""

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
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from probe.verdict import Outcome

GRACE_BYTES = 1 << 29
"""What must stay free on a machine whose own memory is measured; below it the worker is stopped, not the desktop."""

TICK_S = 0.25

START_S = 120
"""A start of Python and an import of torch that take longer are taken for a hang; 9 s were seen on an H200's host."""


class _Worker:
    """A process that has imported the prober and waits to be told what to call."""

    def __init__(self, context, ready: bool) -> None:
        self.pipe, theirs = context.Pipe()
        # named here and made there, so that whichever of the two outlives the other can remove it
        self._folder = Path(tempfile.gettempdir()) / f"probe-{uuid.uuid4().hex}"
        self.process = context.Process(target=_child, args=(theirs, str(self._folder), ready), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> str:
        """Ends it, and returns the end of what it printed."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        tail = ""
        with contextlib.suppress(OSError):
            tail = (self._folder / "printed").read_text(errors="replace")[-2000:]
        shutil.rmtree(self._folder, ignore_errors=True)
        return tail


class Workers:
    """Starts processes, on Linux by forking a server that has imported torch and touched no card, elsewhere one ahead, so
    that the next has imported torch while this one measures. Torch is never imported here: it would take a context from
    the card that is measured. To be closed, or used in a `with`."""

    def __init__(self) -> None:
        self._anew = multiprocessing.get_context("spawn")
        self._fork, self._spare = None, None
        if sys.platform == "linux":
            self._fork = multiprocessing.get_context("forkserver")
            self._fork.set_forkserver_preload(["probe.tasks.measure_cell"])

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error) -> None:
        if self._spare:
            self._spare.end()
            self._spare = None

    def run(self, function: str, args: tuple, seconds: float, host: bool = False,
            certain: Callable[[dict], str | None] = lambda progress: None) -> Outcome:
        """Calls "module:function"(*args, report) elsewhere; `report` takes a dict of progress. Ends it `seconds` after it
        was called, or when `certain` says why it need not go on, given the progress with its `seconds` and `quiet_s` since
        the last report. With `host`, where this machine's own memory is what is measured, the process is started anew (a
        fork does not count the library pages that its server read: 55 MB less than a run takes) and ended when the machine
        runs out of memory."""
        if host:
            worker = _Worker(self._anew, ready=False)
        elif self._fork:
            worker = _Worker(self._fork, ready=False)
        else:
            worker, self._spare = self._spare or _Worker(self._anew, ready=False), None
        outcome = {}
        try:
            with contextlib.suppress(OSError):  # it died before it was asked, which its exit code tells
                worker.pipe.send((function, args))
            if not host and not self._fork:
                self._spare = _Worker(self._anew, ready=True)
            outcome = _follow(worker, seconds, host, certain)
        finally:
            tail = worker.end()
        return Outcome(**outcome, exit_code=worker.process.exitcode, tail=tail)


def _follow(worker: _Worker, seconds: float, host: bool, certain) -> dict:
    begin = heard = time.monotonic()
    progress = {}
    started = False
    while True:
        ready = wait([worker.pipe], timeout=TICK_S)
        now = time.monotonic()
        progress |= {"seconds": now - begin, "quiet_s": now - heard}
        if ready:
            heard = now
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                return {"progress": progress}
            if kind == "started":
                begin, started, progress["seconds"] = now, True, 0.0
            elif kind == "progress":
                progress |= value
            else:
                return {"progress": progress, kind: value}
        elif why := certain(progress):
            return {"progress": progress | {"certain": why}, "killed": "spill"}
        if progress["seconds"] > (seconds if started else START_S):
            return {"progress": progress, "killed": "timeout"}
        if host and not ready:
            import psutil

            if psutil.virtual_memory().available < GRACE_BYTES:
                progress["resident_bytes"] = _resident(worker.process.pid)
                return {"progress": progress, "killed": "memory"}


def _resident(pid: int) -> int:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _child(pipe: Connection, folder: str, ready: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides what it means
    signal.signal(signal.SIGTERM, lambda *how: _leave(folder))  # sent where the parent was interrupted while it started this
    os.mkdir(folder, 0o700)
    out = os.open(os.path.join(folder, "printed"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if ready:
        _import_quietly()
    try:
        function, args = pipe.recv()
    except (EOFError, OSError):
        _leave(folder)
    threading.Thread(target=_end_with_parent, args=(pipe, folder), daemon=True).start()
    try:
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
        pipe.send(("started", None))
        answer = ("measured", call(*args, lambda progress: pipe.send(("progress", progress))))
    except BaseException as e:  # whatever it was, the parent must hear of it; this process ends here
        answer = ("error", (type(e).__name__, str(e)))
    # what was printed is read only where there is no answer; removed here, it is gone even if the parent is killed next
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        pipe.send(answer)
    os._exit(0)  # tearing torch down takes longer than the system does, and may hang after a card's failure


def _import_quietly() -> None:
    """Imports what will be needed, at a low priority where that can be raised again, since a cell is being timed."""
    import psutil

    me = psutil.Process()
    if sys.platform == "win32":
        me.nice(psutil.IDLE_PRIORITY_CLASS)
    importlib.import_module("probe.tasks.measure_cell")
    if sys.platform == "win32":
        me.nice(psutil.NORMAL_PRIORITY_CLASS)


def _end_with_parent(pipe: Connection, folder: str) -> None:
    """Nothing more is ever sent this way: the read returns when the parent is gone, however it went."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    _leave(folder)


def _leave(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
