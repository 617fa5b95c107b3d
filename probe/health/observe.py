"""Observes a job from outside: its processes, its card, its run folder. Takes samples, and hooks into nothing."""

import contextlib
import os
import re
import time
from collections import deque
from pathlib import Path

import psutil

from probe.cliff import Cliff
from probe.health.observation import Observed
from probe.health.processes import newer_sources, saves_of, twins
from probe.health.run_log import Diary
from probe.health.utilization import Sample
from spillcliff.errors import UserError
from spillcliff.hardware import nvml, windows_counters
from spillcliff.hardware.device import on_battery
from spillcliff.hardware.fingerprints import device_count, multi_device_name, slug
from trainer.run.slowdown import AWAY_S
from trainer.run_folder import RunFolder

SAME_S = 2.0
"""Start times of a process that differ by less are one process's: they are rounded, and clocks are set."""
FAMILY_S, ROUND_S = 5.0, 30.0
"""Between two looks for children, and for other processes and files: of 128 processes the first took 2.4 ms of processor
time, the second 7.9 and more for the files; a sample takes 1.3."""


class Tree:
    """A process and its descendants, and the processor time that they have used since it was made."""

    def __init__(self, root: psutil.Process) -> None:
        self._root, self._looked_s, self._spent = root, 0.0, {}
        self.members, self.spent_s = {root.pid: root}, 0.0
        self.read()
        self.spent_s = 0.0

    def read(self) -> float:
        """`spent_s` now. psutil.NoSuchProcess if the root has ended."""
        if not self._root.is_running() or self._root.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(self._root.pid)
        if time.monotonic() - self._looked_s > FAMILY_S:
            self._looked_s = time.monotonic()
            found = [self._root, *self._root.children(recursive=True)]
            self.members = {p.pid: self.members.get(p.pid, p) for p in found}
        for pid, process in self.members.items():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                spent = times.user + times.system
                self.spent_s += max(0.0, spent - self._spent.get(pid, 0.0))
                self._spent[pid] = spent
        return self.spent_s

    def is_waiting(self) -> bool:
        """Whether all main threads sleep; never where the system doesn't tell (Windows)."""
        for process in self.members.values():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_RUNNING:
                    return False
        return True

    def resident_bytes(self) -> int:
        total = 0
        for process in self.members.values():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total


class Job:
    """A job that is looked at: `sample` again and again, `observed` when a verdict is wanted. The last `window` samples
    count. UserError if there is no such process, or it may not be looked at."""

    def __init__(self, pid: int | None, diary: Diary | None, device: str | None, results: Path, window: int) -> None:
        self.pid, self._diary, self._name = pid, diary, None
        kept = diary and diary.process()
        self._process = self._find(pid, kept)
        self._samples, self._marks = deque(maxlen=window), deque(maxlen=window + 1)
        self._uuid = None
        if self._process:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._begin(device, kept, results)
                return
            self._process = None

    @classmethod
    def of_run(cls, run: Path, device: str | None, results: Path, window: int) -> "Job":
        """The process of a run of ours, which may have ended."""
        diary = Diary(run)
        kept = diary.process()
        return cls(kept and int(kept["pid"]), diary, device, results, window)

    def _begin(self, device: str | None, kept: dict | None, results: Path) -> None:
        self._tree, self._counters = Tree(self._process), windows_counters.Counters()
        self._uuid = self._card(device, kept and kept["ran_on"])
        self._limits = nvml.limits(self._uuid) if self._uuid else {}
        name = _cards().get(self._uuid)
        self._cliff = Cliff.load(results / name / "cliff.json") if name else None
        psutil.cpu_percent()
        self._mark(0.0)
        self._go_round()

    def _find(self, pid: int | None, kept: dict | None) -> psutil.Process | None:
        """The process; None if the run's has ended."""
        if pid is None:
            return None
        try:
            process = psutil.Process(pid)
            begun = process.create_time()
            process.cpu_times()
            is_it = kept is None or abs(begun - kept["started_at"]) <= SAME_S
            self._name = None if is_it else process.name()
            return process if is_it and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.NoSuchProcess, OverflowError, ValueError):
            if kept:
                return None
            raise UserError(f"--pid {pid}: no such process; give the id of a training process that runs, or "
                            f"--run DIR") from None
        except psutil.AccessDenied:
            raise UserError(f"--pid {pid} is another user's process and may not be looked at; run this as that user or as "
                            f"an administrator") from None

    def _card(self, device: str | None, ran_on: str | None) -> str | None:
        """The uuid of the card that it computes on; None for a processor, or a card that can't be read."""
        cards = _cards()
        if device is not None:
            return _named(device, cards)
        if ran_on is not None:
            cards = {uuid: name for uuid, name in cards.items() if ran_on in (name, multi_device_name(name, device_count(ran_on)))}
        pids, memory = set(self._tree.members), self._counters.memory()
        holding = [uuid for uuid in cards if pids & set(nvml.processes(uuid))]
        if not holding and ran_on is None and not any(_has_card_open(pid, memory) for pid in pids):
            return None
        return max(holding or cards, key=lambda uuid: nvml.used_bytes(uuid) or 0, default=None)

    @property
    def title(self) -> str:
        """What is looked at, in words."""
        run = [f"run {self._diary.run}"] if self._diary else []
        pid = [] if self.ended else [f"pid {self.pid} on {_cards().get(self._uuid, 'the processor')}"]
        return ", ".join(run + pid)

    @property
    def ended(self) -> bool:
        return self._process is None

    def sample(self) -> None:
        """Takes a reading; notices if it has ended."""
        try:
            spent_s, at_s = self._tree.read(), time.monotonic()
            if at_s - self._marks[-1][0] > AWAY_S:  # the machine slept
                self._samples.clear()
                self._marks.clear()
                self._mark(spent_s)
                return
            since_s, before_s = self._marks[-1][:2]
            read = nvml.readings(self._uuid) if self._uuid else {}
            percent = 100 * (spent_s - before_s) / max(at_s - since_s, 1e-3)
            self._samples.append(Sample(
                time.time(), percent, psutil.cpu_percent(), self._tree.is_waiting(), self._held(),
                *(read.get(name) for name in ("utilization", "power_w", "clock_mhz", "temperature_c", "throttle")),
                self._non_local()))
            self._mark(spent_s)
            if at_s - self._round_s > ROUND_S:
                self._go_round()
        except psutil.NoSuchProcess:
            self._process = None

    def _mark(self, spent_s: float) -> None:
        if self._diary:
            self._diary.read()
        self._marks.append((time.monotonic(), spent_s, time.time(), self._diary.lines if self._diary else 0))

    def _held(self) -> int | None:
        """Bytes on the card, its own or, where the driver doesn't tell, everybody's; or its resident set."""
        if not self._uuid:
            return self._tree.resident_bytes()
        held = nvml.processes(self._uuid)
        return sum(held.get(pid) or 0 for pid in self._tree.members) or nvml.used_bytes(self._uuid)

    def _non_local(self) -> int | None:
        memory = self._counters.memory() if self._uuid else None
        held = [size for pid in self._tree.members if (size := windows_counters.non_local_bytes(memory, pid)) is not None]
        return sum(held) if held else None

    def _go_round(self) -> None:
        """Looks at what takes longer: other processes and files."""
        self._round_s = time.monotonic()
        self._twins = twins(self._process, self._diary and self._diary.run)
        self._newer = newer_sources(self._process, self._diary is not None)
        self._saves = () if self._diary else saves_of(self._process)

    def observed(self) -> Observed:
        """All that was seen in the last samples."""
        if self._process is None:
            page = self._diary and self._page(0, 0.0)
            return Observed(self.pid, "cuda" if self._uuid else "cpu", 0.0, "gone", page=page, reused=self._name,
                            resume=self._how_to_go_on() if self._diary else "",
                            held=bool(self._diary and RunFolder.held(self._diary.run)))
        (since_s, before_s, began_s, lines), (until_s, spent_s, _, _) = self._marks[0], self._marks[-1]
        try:
            is_stopped = self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            self._process = None
            return self.observed()
        itself, *peers = [twin.peer() for twin in self._twins] or [None]
        return Observed(
            self.pid, "cuda" if self._uuid else "cpu", until_s - since_s, "stopped" if is_stopped else "running",
            cpu_s=spent_s - before_s, samples=tuple(self._samples), page=self._diary and self._page(lines, began_s),
            itself=itself, peers=tuple(filter(None, peers)), newer=self._newer, saves=self._saves,
            on_battery=on_battery() or nvml.power_source(self._uuid or "") == 1,
            fast_bytes=self._cliff and self._cliff.device_bytes, **self._of_card(began_s), **self._limits)

    def _page(self, lines: int, since_s: float):
        self._diary.read()
        return self._diary.page(lines, since_s)

    def _of_card(self, since_s: float) -> dict:
        """How large the card is, and the busiest of others on it, where the driver knows whose they are."""
        if not self._uuid:
            return {}
        used, free = nvml.used_bytes(self._uuid), nvml.free_bytes(self._uuid)
        found = {"card_bytes": None if None in (used, free) else used + free}
        if set(nvml.processes(self._uuid)) & set(self._tree.members):
            busy = nvml.utilization_since(self._uuid, since_s)
            others = {pid: percent for pid, percent in busy.items() if pid not in self._tree.members}
            found["other_pid"] = max(others, key=others.get, default=None)
            found["other_percent"] = others.get(found["other_pid"])
        return found

    def _how_to_go_on(self) -> str:
        run = self._diary.run
        line = f"train --plan {run / 'plan.json'} --data FILE --run {run}"
        newest = self._diary.newest()
        if newest is None:
            return f"it has no checkpoint: start it again with: {line}"
        return f"go on from its checkpoint of step {newest} with: {line} --resume"


def running(results: Path) -> Path:
    """The newest run under results/runs whose process is alive; UserError if there is none."""
    found = []
    for path in (results / "runs").glob("*/process.json"):
        with contextlib.suppress(UserError, OSError, psutil.Error):
            kept = Diary(path.parent).process()
            process = psutil.Process(int(kept["pid"]))
            if abs(process.create_time() - kept["started_at"]) <= SAME_S and process.status() != psutil.STATUS_ZOMBIE:
                found.append((kept["started_at"], path.parent))
    if not found:
        raise UserError(f"no run is running under {results / 'runs'}; give --run DIR of one that is elsewhere or has ended, "
                        f"or --pid N of any training process")
    return max(found)[1]


def _cards() -> dict[str, str]:
    """Names of the cards here, as of their folders, by uuid."""
    return dict(zip(nvml.uuids(), map(slug, nvml.names()), strict=False))


def _named(device: str, cards: dict[str, str]) -> str | None:
    """The uuid of the card called `device`; None for the processor."""
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match and int(match[1] or 0) < len(cards):
        return list(cards)[int(match[1] or 0)]
    for uuid, name in cards.items():
        if name == device:
            return uuid
    known = ", ".join(["cpu", *(f"cuda:{i}" for i in range(len(cards))), *dict.fromkeys(cards.values())])
    raise UserError(f"--device {device}: nothing of that name can be read here; it is one of {known}")


def _has_card_open(pid: int, memory) -> bool:
    """Whether a process has an NVIDIA card open, as one in a container, whose driver knows it by another pid, shows."""
    if windows_counters.adapter_of(memory, pid):
        return True
    with contextlib.suppress(OSError):
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if re.match(r"/dev/nvidia\d", os.readlink(f"/proc/{pid}/fd/{handle}")):
                    return True
    return False
