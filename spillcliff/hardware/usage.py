"""How much of a device this process has taken, and what other programs took of it meanwhile."""

import os
import sys
import time
from dataclasses import asdict, dataclass

from spillcliff.hardware import nvml, windows_counters


def resident_peak_bytes() -> int:
    """This process's peak resident set."""
    if sys.platform == "linux":
        # not getrusage: a process started by a larger one inherits the larger one's peak there
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True)
class Others:
    """Other programs on a card while this process used it; None where the platform cannot tell. `grown_bytes` is what they
    took (or, negative, gave back) since before our context, `largest_bytes` what the largest of them holds now,
    `busy_percent` how busy the busiest kept the card, `pid` that one's or else the largest's."""

    grown_bytes: int | None
    largest_bytes: int | None
    busy_percent: float | None
    pid: int | None


class Claim:
    """A process's share of a card. Make it before the process touches the card; None is given where nothing can be read."""

    def __init__(self) -> None:
        ours = os.getpid()
        self._used_before = {uuid: used and used - (nvml.processes(uuid).get(ours) or 0)
                             for uuid in nvml.uuids() for used in [nvml.used_bytes(uuid)]}
        self._counters = windows_counters.Counters()
        self._begin = time.time()
        self._non_local = None
        self._others_before = None

    def begin(self, device, uuid: str) -> None:
        """Makes the context on a card; what the process and others have from here on is growth."""
        import torch

        if device.type == "cpu":
            return
        torch.zeros(1, device=device)
        torch.accelerator.synchronize(device)
        memory = self._counters.memory()
        self._non_local = windows_counters.non_local_bytes(memory, os.getpid())
        self._others_before = self._others_by_counters(memory, None)[0]
        self.watch()

    def watch(self) -> None:
        """Others' use of the card is counted from now on."""
        self._begin = time.time()
        self._counters.utilization()

    def non_local_growth(self) -> int | None:
        """Bytes of system memory that this process's allocations on the card have moved to since begin(): a spill."""
        now = windows_counters.non_local_bytes(self._counters.memory(), os.getpid())
        return None if None in (now, self._non_local) else now - self._non_local

    def peaks(self, device, uuid: str) -> dict:
        """allocated_peak_bytes, reserved_peak_bytes, device_peak_bytes and alloc_retries; None where unknown.

        The device figure is the allocator's peak and what the driver counts for us beside the allocator: context,
        kernels, graphs. The driver's own figure for the process is taken where it has one, else the growth of the
        card's use since before our context (which another program that starts meanwhile would disturb).
        """
        import torch

        if device.type == "cpu":
            return {"allocated_peak_bytes": None, "reserved_peak_bytes": None,
                    "device_peak_bytes": resident_peak_bytes(), "alloc_retries": 0}
        try:
            allocated = torch.accelerator.max_memory_allocated(device)
            reserved = torch.accelerator.max_memory_reserved(device)
        except (RuntimeError, AttributeError):  # mps has current figures only
            return dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes"), None) | {
                "alloc_retries": 0}
        claim, retries = None, 0
        if device.type == "cuda":
            retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
            used, before = nvml.used_bytes(uuid), self._used_before.get(uuid)
            now = nvml.processes(uuid).get(os.getpid())
            if now is None and None not in (used, before):
                now = used - before
            if now is not None:
                claim = reserved + max(0, now - torch.cuda.memory_reserved(device))
        return {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved, "device_peak_bytes": claim,
                "alloc_retries": retries}

    def others(self, uuid: str) -> dict:
        """What an Others says, as a dict."""
        ours, held = os.getpid(), nvml.processes(uuid)
        if ours not in held:  # Windows, or a container whose pids are not the driver's: ours can't be told from others'
            now, busy = self._others_by_counters(self._counters.memory(), self._counters.utilization())
            grown = None if None in (now, self._others_before) else now - self._others_before
            return asdict(Others(grown, None, busy, None))
        used, before, mine = nvml.used_bytes(uuid), self._used_before.get(uuid), held.pop(ours)
        grown = None if None in (used, before, mine) else used - mine - before
        busy = nvml.utilization_since(uuid, self._begin)
        busy.pop(ours, None)
        largest = max(held, key=lambda p: held[p] or 0, default=None)
        busiest = max(busy, key=busy.get, default=None)
        return asdict(Others(grown, held.get(largest), busy.get(busiest), largest if busiest is None else busiest))

    def sight(self, device, uuid: str) -> dict:
        """The fields of a watch.Sight that a card tells, and counts others' use from now on; {} for a processor."""
        import torch

        if device.type != "cuda":
            return {}
        now, others = nvml.readings(uuid), self.others(uuid)
        self.watch()
        return {"spilled_bytes": self.non_local_growth(), "throttle": now.get("throttle"),
                "temperature_c": now.get("temperature_c"), "other_pid": others["pid"],
                "other_percent": others["busy_percent"], "reserved_bytes": torch.cuda.memory_reserved(device)}

    @staticmethod
    def _others_by_counters(memory, utilization) -> tuple[int | None, float | None]:
        """(bytes of all others on our adapter, percent of the busiest)."""
        adapter = windows_counters.adapter_of(memory, os.getpid())
        return (None, None) if adapter is None else windows_counters.others(memory, utilization, os.getpid(), adapter)
