"""Runs a function in a process of its own, which may end in any way without harming this one."""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from probe.verdict import Outcome

GRACE_BYTES = 1 << 29
"""What must stay free on a machine whose own memory is measured; below it the worker is stopped, not the desktop."""


class Workers:
    """Starts processes, on Linux by forking a server that has imported torch and touched no card, elsewhere anew. Torch
    is never imported here: it would take a context from the card that is measured."""

    def __init__(self) -> None:
        self._anew = multiprocessing.get_context("spawn")
        self._quick = self._anew
        if sys.platform == "linux":
            self._quick = multiprocessing.get_context("forkserver")
            self._quick.set_forkserver_preload(["probe.measure"])

    def run(self, function: str, args: tuple, seconds: float, host: bool = False) -> Outcome:
        """Calls probe.measure's `function(*args, report)` elsewhere; `report` takes a dict of progress. Ends it after
        `seconds`. With `host`, where this machine's own memory is what is measured, the process is started anew (a fork
        does not count the library pages that its server read: 55 MB less than a run takes) and ended when the machine
        runs out of memory."""
        context = self._anew if host else self._quick
        ours, theirs = context.Pipe()
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder) / "printed"
            process = context.Process(target=_child, args=(theirs, function, args, str(printed)), daemon=True)
            process.start()
            theirs.close()
            try:
                outcome = self._follow(process, ours, seconds, host)
            finally:
                process.kill()
                process.join()
                ours.close()
            tail = printed.read_text(errors="replace")[-2000:] if printed.exists() else ""
        return Outcome(**outcome, exit_code=process.exitcode, tail=tail)

    def _follow(self, process, ours: Connection, seconds: float, host: bool) -> dict:
        begin, progress = time.monotonic(), {}
        while True:
            ready = wait([ours], timeout=0.25)
            progress["seconds"] = time.monotonic() - begin
            if ready:
                try:
                    kind, value = ours.recv()
                except (EOFError, OSError):
                    process.join()
                    return {"progress": progress}
                if kind == "progress":
                    progress.update(value)
                else:
                    return {"progress": progress, kind: value}
            if progress["seconds"] > seconds:
                return {"progress": progress, "killed": "timeout"}
            if host and not ready:
                import psutil

                if psutil.virtual_memory().available < GRACE_BYTES:
                    progress["resident_bytes"] = _resident(process.pid)
                    return {"progress": progress, "killed": "memory"}


def _resident(pid: int) -> int:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _child(pipe: Connection, function: str, args: tuple, printed: str) -> None:
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    try:
        from probe import measure

        answer = ("measured", getattr(measure, function)(*args, lambda progress: pipe.send(("progress", progress))))
    except BaseException as e:  # whatever it was, the parent must hear of it; this process ends here
        answer = ("error", (type(e).__name__, str(e)))
    with contextlib.suppress(OSError):
        pipe.send(answer)
    os._exit(0)  # tearing torch down takes longer than the system does, and may hang after a card's failure


def _end_with_parent(pipe: Connection) -> None:
    """Nothing is ever sent this way: the read returns when the parent is gone, however it went."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)
