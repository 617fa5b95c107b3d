"""Observes a job from outside: its processes, its card, its run folder. Takes samples, and hooks into nothing."""

import contextlib
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from probe.health.cards import card_called, card_names, card_of
from probe.health.job_files import newer_sources, recent_checkpoints
from probe.health.observation import Observation
from probe.health.process_tree import ProcessTree
from probe.health.processes import ask, similar_processes
from probe.health.run_log import RunLogReader, RunProcess, read_process
from probe.health.utilization import Sample
from probe.store import DeviceFolder
from spillcliff.errors import UserError
from spillcliff.hardware import nvml, windows_counters
from spillcliff.hardware.device import on_battery
from spillcliff.hardware.fingerprints import single_device_name
from trainer.run.slowdown import AWAY_S
from trainer.run_folder import RunFolder, runs_folder

SAME_S = 2.0
"""Start times of a process that differ by less are one process's: they are rounded, and clocks are set."""
SURROUNDINGS_EVERY_S = 30.0
"""Between two searches for other processes and for files: with 128 processes they took 7.9 ms of processor time and more, a
sample takes 1.3."""


class _Mark(NamedTuple):
    """A moment between two samples: both clocks, the processor time used and the lines logged until then."""

    monotonic_s: float
    epoch_s: float
    cpu_s: float
    log_lines: int


class JobObserver:
    """Observes a job: `sample` again and again, `observation` when a verdict is wanted, which the last `window` samples
    count for. UserError if there is no such process, or it may not be observed."""

    def __init__(self, pid: int | None, log: RunLogReader | None, device: str | None, results: Path, window: int) -> None:
        """`log` is of a run of ours, whose process `pid` is; `device` says what it computes on where that is not to be
        found out."""
        self.pid, self._log = pid, log
        self._reused_by: str | None = None
        self._job: _RunningJob | None = None
        recorded = log.process() if log else None
        process = None if pid is None else self._find(pid, recorded)
        if process:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._job = _RunningJob(process, log, device, recorded, results, window)
        self._device = self._job.device if self._job else "the processor"
        self._kind: Literal["cuda", "cpu"] = self._job.kind if self._job else "cpu"

    @classmethod
    def of_run(cls, run: Path, device: str | None, results: Path, window: int) -> "JobObserver":
        """Of the process of a run of ours, which may have ended."""
        log = RunLogReader(RunFolder(run))
        process = log.process()
        return cls(process.pid if process else None, log, device, results, window)

    def _find(self, pid: int, recorded: RunProcess | None) -> psutil.Process | None:
        """The process; None if the run's has ended."""
        try:
            process = psutil.Process(pid)
            process.cpu_times()
            if recorded and not _is_the_same(process, recorded):
                self._reused_by = process.name()
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except (psutil.NoSuchProcess, OverflowError, ValueError):
            if recorded:
                return None
            raise UserError(f"--pid {pid}: no such process; give the id of a training process that runs, or "
                            f"--run DIR") from None
        except psutil.AccessDenied:
            raise UserError(f"--pid {pid} is another user's process and may not be looked at; run this as that user or as "
                            f"an administrator") from None

    @property
    def title(self) -> str:
        """What is observed, in words."""
        run = [f"run {self._log.folder.path}"] if self._log else []
        process = [] if self.ended else [f"pid {self.pid} on {self._device}"]
        return ", ".join(run + process)

    @property
    def ended(self) -> bool:
        return self._job is None

    def sample(self) -> None:
        """Takes a reading; notices if the job has ended."""
        if self._job:
            try:
                self._job.sample()
            except psutil.NoSuchProcess:
                self._job = None

    def observation(self) -> Observation:
        """All that was observed in the last samples."""
        if self._job:
            try:
                return self._job.observation()
            except psutil.NoSuchProcess:
                self._job = None
        gone = Observation(pid=self.pid, kind=self._kind, seconds=0.0, state="gone", reused=self._reused_by)
        if not self._log:
            return gone
        self._log.read()
        return replace(gone, page=self._log.status(0, 0.0), resume=_resume_advice(self._log),
                       held=bool(self._log.folder.is_locked()))


class _RunningJob:
    """A job's process while it runs. Its methods raise psutil.NoSuchProcess when it has ended."""

    def __init__(self, process: psutil.Process, log: RunLogReader | None, device: str | None, recorded: RunProcess | None,
                 results: Path, window: int) -> None:
        self._process, self._log = process, log
        self._samples: deque[Sample] = deque(maxlen=window)
        self._marks: deque[_Mark] = deque(maxlen=window + 1)
        self._tree, self._counters = ProcessTree(process), windows_counters.Counters()
        ran_on = recorded.ran_on if recorded else None
        self.uuid = card_called(device) if device is not None else card_of(
            self._tree.pids, ran_on, recorded.uuid if recorded else "", self._counters.memory(),
            ask(process, psutil.Process.environ) or {})
        self.kind: Literal["cuda", "cpu"] = "cpu" if self.uuid is None else "cuda"
        name = None
        if self.uuid is not None:
            name = card_names().get(self.uuid) or (single_device_name(ran_on) if ran_on else None)
        self.device = name or ("the processor" if self.uuid is None else "a card that can't be told: name it by --device")
        self._limits = nvml.limits(self.uuid) if self.uuid else {}
        self._cliff = DeviceFolder(results / name).load_cliff() if name else None
        psutil.cpu_percent()  # whose first answer means nothing
        self._mark()
        self._read_surroundings()

    def _mark(self) -> None:
        if self._log:
            self._log.read()
        self._marks.append(_Mark(monotonic_s=time.monotonic(), epoch_s=time.time(), cpu_s=self._tree.cpu_s,
                                 log_lines=self._log.lines if self._log else 0))

    def _read_surroundings(self) -> None:
        """Reads what takes longer: other processes and files."""
        self._surroundings_at_s = time.monotonic()
        self._similar = similar_processes(self._process, self._log.folder.path if self._log else None)
        self._newer_sources = newer_sources(self._process, is_ours=self._log is not None)
        self._checkpoints = () if self._log else recent_checkpoints(self._process)

    def sample(self) -> None:
        self._tree.read()
        now_s, last = time.monotonic(), self._marks[-1]
        if now_s - last.monotonic_s > AWAY_S:  # the machine slept
            self._samples.clear()
            self._marks.clear()
            self._mark()
            return
        card = nvml.readings(self.uuid) if self.uuid else {}
        throttle = card.get("throttle")
        self._samples.append(Sample(
            at_s=time.time(), cpu_percent=100 * (self._tree.cpu_s - last.cpu_s) / max(now_s - last.monotonic_s, 1e-3),
            machine_percent=psutil.cpu_percent(), is_waiting=self._tree.is_waiting(), memory_bytes=self._memory_bytes(),
            utilization=card.get("utilization"), power_w=card.get("power_w"), clock_mhz=card.get("clock_mhz"),
            temperature_c=card.get("temperature_c"), throttle=None if throttle is None else int(throttle),
            non_local_bytes=self._non_local_bytes()))
        self._mark()
        if now_s - self._surroundings_at_s > SURROUNDINGS_EVERY_S:
            self._read_surroundings()

    def _memory_bytes(self) -> int | None:
        """Bytes on the card, its own or, where the driver doesn't tell, everybody's; or its resident set."""
        if self.uuid is None:
            return self._tree.resident_bytes()
        by_pid = nvml.processes(self.uuid)
        return sum(by_pid.get(pid) or 0 for pid in self._tree.pids) or nvml.used_bytes(self.uuid)

    def _non_local_bytes(self) -> int | None:
        """Bytes of system memory that it uses for the card; None where the system doesn't tell."""
        memory = self._counters.memory() if self.kind == "cuda" else None
        sizes = [size for pid in self._tree.pids if (size := windows_counters.non_local_bytes(memory, pid)) is not None]
        return sum(sizes) if sizes else None

    def observation(self) -> Observation:
        first, last = self._marks[0], self._marks[-1]
        is_stopped = self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        peers = [peer for process in self._similar if (peer := process.peer())]
        if self._log:
            self._log.read()
        observation = Observation(
            pid=self._process.pid, kind=self.kind, seconds=last.monotonic_s - first.monotonic_s,
            state="stopped" if is_stopped else "running", cpu_s=last.cpu_s - first.cpu_s, samples=tuple(self._samples),
            page=self._log.status(first.log_lines, first.epoch_s) if self._log else None,
            itself=next((p for p in peers if p.relation == "itself"), None),
            peers=tuple(p for p in peers if p.relation != "itself"), newer=self._newer_sources, saves=self._checkpoints,
            on_battery=on_battery())
        return self._with_card(observation, self.uuid, first.epoch_s) if self.uuid else observation

    def _with_card(self, observation: Observation, uuid: str, since_s: float) -> Observation:
        """With how large the card is, and the busiest of others on it, where the driver knows whose they are."""
        used_bytes, free_bytes = nvml.used_bytes(uuid), nvml.free_bytes(uuid)
        other_pid, by_pid = None, {}
        if set(nvml.processes(uuid)) & self._tree.pids:
            by_pid = nvml.utilization_since(uuid, since_s)
            other_pid = max(by_pid.keys() - self._tree.pids, key=by_pid.__getitem__, default=None)
        return replace(
            observation, on_battery=observation.on_battery or nvml.power_source(uuid) == 1,
            card_bytes=None if used_bytes is None or free_bytes is None else used_bytes + free_bytes,
            fast_bytes=self._cliff.device_bytes if self._cliff else None, clock_max_mhz=self._limits.get("clock_max_mhz"),
            power_limit_w=self._limits.get("power_limit_w"), other_pid=other_pid,
            other_percent=None if other_pid is None else by_pid[other_pid])


def _is_the_same(process: psutil.Process, recorded: RunProcess) -> bool:
    """Whether it is the recorded process, and not one that has its pid since."""
    return abs(process.create_time() - recorded.started_at) <= SAME_S


def _resume_advice(log: RunLogReader) -> str:
    """How to go on with a run that has ended."""
    folder, step = log.folder, log.newest_checkpoint()
    command = f"train --plan {folder.plan} --data FILE --run {folder.path}"
    if step is None:
        return f"it has no checkpoint: start it again with: {command}"
    return f"go on from its checkpoint of step {step} with: {command} --resume"


def newest_running(results: Path) -> Path:
    """The newest run under results/runs whose process is alive; UserError if there is none."""
    running = []
    for path in runs_folder(results).glob("*"):
        with contextlib.suppress(UserError, OSError, OverflowError, psutil.Error):
            recorded = read_process(RunFolder(path))
            if recorded is None:
                continue
            process = psutil.Process(recorded.pid)
            if _is_the_same(process, recorded) and process.status() != psutil.STATUS_ZOMBIE:
                RunFolder(path).load_plan()
                running.append((recorded.started_at, path))
    if not running:
        raise UserError(f"no run is running under {runs_folder(results)}; give --run DIR of one that is elsewhere or has "
                        f"ended, or --pid N of any training process")
    return max(running)[1]
