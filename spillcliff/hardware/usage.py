"""How much of a device this process has taken, and what other programs took of it meanwhile."""

import functools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spillcliff.hardware import nvml, windows_counters
from spillcliff.hardware.host_memory import host_memory, resident_peak_bytes

if TYPE_CHECKING:
    import torch


def process_seconds() -> float:
    """Seconds since this process started, the imports included; a clock that is set meanwhile changes nothing."""
    return time.monotonic() - _started()


@functools.cache
def _started() -> float:
    """When this process started, on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process(os.getpid()).create_time())


def free_bytes(device: "torch.device", uuid: str) -> int | None:
    """Bytes of the device's memory that nobody uses: a card's own, of a processor the machine's or its container's. None
    where that can't be told without a context on the card."""
    if device.type == "cuda":
        return nvml.free_bytes(uuid)
    if device.type == "xpu":
        import torch

        try:
            return torch.xpu.mem_get_info(device)[0]
        except (RuntimeError, AttributeError, AssertionError):  # a driver that does not tell, a torch that does not ask
            return None
    return host_memory().free_bytes


@dataclass(frozen=True)
class MemoryPeaks:
    """The most that a process has held, in bytes; None where the platform can't tell. `allocated` is what its tensors
    needed, `reserved` what the caching allocator held, `device` its whole claim on the card, context included, or on a
    processor its resident set; `alloc_retries` how often the allocator had to free its cache and ask the driver again."""

    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    alloc_retries: int = 0


@dataclass(frozen=True)
class OtherPrograms:
    """Other programs on a card while this process used it; None where the platform can't tell. `grown_bytes` is what they
    took (or, negative, gave back) since before our context, `largest_bytes` what the largest of them holds now,
    `busy_percent` how busy the busiest kept the card, `pid` that one's or else the largest's."""

    grown_bytes: int | None = None
    largest_bytes: int | None = None
    busy_percent: float | None = None
    pid: int | None = None


class MemoryClaim:
    """A process's share of a card. Make it before the process touches the card; None is given where nothing can be read."""

    def __init__(self) -> None:
        self._used_before = {uuid: used and used - (nvml.processes(uuid).get(os.getpid()) or 0)
                             for uuid in nvml.uuids() for used in [nvml.used_bytes(uuid)]}
        self._counters = windows_counters.Counters()
        self._watched_from = time.time()
        self._non_local_before: int | None = None
        self._others_before: int | None = None

    def begin(self, device: "torch.device", uuid: str) -> None:
        """Makes the context on a card; what the process and others take from here on is growth."""
        import torch

        if device.type == "cpu":
            return
        torch.zeros(1, device=device)
        torch.accelerator.synchronize(device)
        memory = self._counters.memory()
        self._non_local_before = windows_counters.non_local_bytes(memory, os.getpid())
        self._others_before = self._others_by_counters(memory, None)[0]
        self.watch_others()

    def watch_others(self) -> None:
        """Others' use of the card is counted from now on."""
        self._watched_from = time.time()
        self._counters.utilization()

    def non_local_growth_bytes(self) -> int | None:
        """Bytes of system memory that this process's allocations on the card have moved to since begin(): a spill."""
        now = windows_counters.non_local_bytes(self._counters.memory(), os.getpid())
        return None if now is None or self._non_local_before is None else now - self._non_local_before

    def peaks(self, device: "torch.device", uuid: str) -> MemoryPeaks:
        """The peaks so far.

        The device figure is the allocator's peak and what the driver counts for us beside the allocator: context,
        kernels, graphs. The driver's own figure for the process is taken where it has one, else the growth of the
        card's use since before our context (which another program that starts meanwhile would disturb).
        """
        import torch

        if device.type == "cpu":
            return MemoryPeaks(device_peak_bytes=resident_peak_bytes())
        try:
            allocated = torch.accelerator.max_memory_allocated(device)
            reserved = torch.accelerator.max_memory_reserved(device)
        except (RuntimeError, AttributeError):  # mps has current figures only
            return MemoryPeaks()
        if device.type != "cuda":
            return MemoryPeaks(allocated, reserved)
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        used, before = nvml.used_bytes(uuid), self._used_before.get(uuid)
        now = nvml.processes(uuid).get(os.getpid())
        if now is None and used is not None and before is not None:
            now = used - before
        claim = None if now is None else reserved + max(0, now - torch.cuda.memory_reserved(device))
        return MemoryPeaks(allocated, reserved, claim, retries)

    def others(self, uuid: str) -> OtherPrograms:
        """What other programs do on the card, since `begin` and since `watch_others`."""
        ours, by_pid = os.getpid(), nvml.processes(uuid)
        if ours not in by_pid:  # Windows, or a container whose pids are not the driver's: ours can't be told from others'
            now, percent = self._others_by_counters(self._counters.memory(), self._counters.utilization())
            grown = None if now is None or self._others_before is None else now - self._others_before
            return OtherPrograms(grown, None, percent)
        used, before, mine = nvml.used_bytes(uuid), self._used_before.get(uuid), by_pid.pop(ours)
        grown = None if used is None or before is None or mine is None else used - mine - before
        busy = nvml.utilization_since(uuid, self._watched_from)
        busy.pop(ours, None)
        largest = max(by_pid, key=lambda pid: by_pid[pid] or 0, default=None)
        busiest = max(busy, key=busy.__getitem__, default=None)
        return OtherPrograms(grown, None if largest is None else by_pid[largest], None if busiest is None else busy[busiest],
                             largest if busiest is None else busiest)

    @staticmethod
    def _others_by_counters(memory: windows_counters.Memory | None,
                            utilization: windows_counters.Utilization | None) -> tuple[int | None, float | None]:
        """(bytes of all others on our adapter, percent of the busiest)."""
        adapter = windows_counters.adapter_of(memory, os.getpid())
        if adapter is None:
            return None, None
        return windows_counters.other_processes(memory, utilization, os.getpid(), adapter)
