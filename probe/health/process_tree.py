"""A job's process with its descendants, as one."""

import contextlib
import time

import psutil

CHILDREN_EVERY_S = 5.0
"""Between two searches for children: of 128 processes one took 2.4 ms of processor time, all of a sample takes 1.3."""


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time that a process has used; psutil.Error if it has ended or may not be read."""
    times = process.cpu_times()
    return times.user + times.system


class ProcessTree:
    """A process and its descendants; `cpu_s` is the processor time that they have used since this was made, as of the last
    `read`."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._members = {root.pid: root}
        self._children_at_s = -CHILDREN_EVERY_S
        self._cpu_s_by_pid: dict[int, float] = {}
        self.cpu_s = 0.0
        self.read()
        self.cpu_s = 0.0

    @property
    def pids(self) -> set[int]:
        return set(self._members)

    def read(self) -> None:
        """Brings `cpu_s` up to date. psutil.NoSuchProcess if the root has ended."""
        if not self._root.is_running() or self._root.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(self._root.pid)
        if time.monotonic() - self._children_at_s > CHILDREN_EVERY_S:
            self._children_at_s = time.monotonic()
            now = [self._root, *self._root.children(recursive=True)]
            self._members = {p.pid: self._members.get(p.pid, p) for p in now}
        for pid, process in self._members.items():
            with contextlib.suppress(psutil.Error):
                cpu_s = cpu_seconds(process)
                self.cpu_s += max(0.0, cpu_s - self._cpu_s_by_pid.get(pid, 0.0))
                self._cpu_s_by_pid[pid] = cpu_s

    def is_waiting(self) -> bool:
        """Whether all main threads sleep; never where the system doesn't tell (Windows)."""
        for process in self._members.values():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_RUNNING:
                    return False
        return True

    def resident_bytes(self) -> int:
        total = 0
        for process in self._members.values():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total
