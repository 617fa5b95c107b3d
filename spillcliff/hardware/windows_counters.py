"""What Windows counts of each process on each graphics adapter, without touching a card: a reading is a dict or None.

Under WDDM NVML knows no process's memory, and a card that is full makes the driver move pages to system memory without
an error. The graphics kernel counts both, in the performance counters that Task Manager shows. Prototypes, structures and
codes are those of pdh.h and pdhmsg.h (learn.microsoft.com/windows/win32/api/pdh). This has not been run on a real Windows
machine: it follows the vendor's documents and what others print of these counters.
"""

import contextlib
import ctypes
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Resident bytes; the neighbours "Dedicated Usage" and "Shared Usage" are committed ones (System Informer, pull 2971).
LOCAL = r"\GPU Process Memory(*)\Local Usage"
NON_LOCAL = r"\GPU Process Memory(*)\Non Local Usage"
UTILIZATION = r"\GPU Engine(*)\Utilization Percentage"

_MORE_DATA = 0x800007D2
_READABLE = (0, 1)  # PDH_CSTATUS_VALID_DATA, PDH_CSTATUS_NEW_DATA
_FORMAT = 0x200 | 0x1000  # PDH_FMT_DOUBLE, exact for bytes up to 2**53, and PDH_FMT_NOSCALE: no default scaling factor
# pid_1234_luid_0x00000000_0x0000C3B5_phys_0, for an engine ..._phys_0_eng_3_engtype_3D, and #1 behind a repeated name
_INSTANCE = re.compile(r"pid_(\d{1,10})_luid_(0x[\da-fA-F]+_0x[\da-fA-F]+)_(phys_\d+(?:\w*?_eng_\d+)?)", re.ASCII)


@dataclass(frozen=True)
class GpuMemory:
    """Resident bytes of one process on one adapter: in the card's own memory, and in system memory that the card uses."""

    local_bytes: int
    non_local_bytes: int


# Both by process id, then by the adapter's LUID as "0x00000000_0x0000c3b5", which Windows gives anew at every start.
Memory = dict[int, dict[str, GpuMemory]]
Utilization = dict[int, dict[str, float]]
Readings = Iterable[tuple[str, float]]


def _by_process(readings: Readings) -> dict[tuple[int, str], dict[str, float]]:
    """Sums by (pid, LUID) and then by engine. Names without a process and values that are no amount are left out."""
    sums: dict[tuple[int, str], dict[str, float]] = {}
    for name, value in readings:
        instance = _INSTANCE.match(name)
        if instance and 0 <= value < math.inf:
            pid, luid, engine = instance.groups()
            engines = sums.setdefault((int(pid), luid.lower()), {})
            engines[engine] = engines.get(engine, 0.0) + value
    return sums


def parse_memory(local: Readings, non_local: Readings) -> Memory:
    """Both counters' readings in bytes, joined. Where one could not be read both are left out: no reading is no zero."""
    on_card, in_system = _by_process(local), _by_process(non_local)
    memory: Memory = {}
    for (pid, luid), local_parts in on_card.items():
        if (pid, luid) in in_system:
            both = GpuMemory(int(sum(local_parts.values())), int(sum(in_system[pid, luid].values())))
            memory.setdefault(pid, {})[luid] = both
    return memory


def parse_utilization(readings: Readings) -> Utilization:
    """Percentages of a process's engines to that of its busiest one, as in Task Manager's list of processes."""
    used: Utilization = {}
    for (pid, luid), engines in _by_process(readings).items():
        used.setdefault(pid, {})[luid] = max(engines.values())
    return used


def adapter_of(memory: Memory | None, pid: int) -> str | None:
    """The LUID on which `pid` holds the most local bytes: a training process's card. None if it holds none anywhere."""
    by_luid = (memory or {}).get(pid, {})
    luid = max(by_luid, key=lambda luid: by_luid[luid].local_bytes, default=None)
    return luid if luid and by_luid[luid].local_bytes else None


def non_local_bytes(memory: Memory | None, pid: int) -> int | None:
    """Bytes of `pid` in system memory that its card uses, staging buffers included: only growth says that it spills.

    Of that one adapter, not summed: a public report has the same 4694 MiB for each of the three cards of one process.
    """
    luid = adapter_of(memory, pid)
    return memory[pid][luid].non_local_bytes if memory and luid else None


def other_processes(memory: Memory | None, utilization: Utilization | None, pid: int,
                    luid: str) -> tuple[int | None, float | None]:
    """All other processes on adapter `luid`: their local bytes, and the highest utilization of one of them in percent.

    None for what was not read. A surface that two processes share may be counted for both.
    """
    def of_others(reading: dict) -> list:
        return [by_luid[luid] for other, by_luid in reading.items() if other != pid and luid in by_luid]

    return (None if memory is None else sum(gpu.local_bytes for gpu in of_others(memory)),
            None if utilization is None else max(of_others(utilization), default=0.0))


class _Value(ctypes.Structure):  # PDH_FMT_COUNTERVALUE, with that member of its union which PDH_FMT_DOUBLE fills
    _fields_ = [("status", ctypes.c_uint32), ("double", ctypes.c_double)]


class _Item(ctypes.Structure):  # PDH_FMT_COUNTERVALUE_ITEM_W; the names lie behind the array, in the same buffer
    _fields_ = [("name", ctypes.c_wchar_p), ("value", _Value)]


# uint32 is DWORD and PDH_STATUS, size_t DWORD_PTR; PDH_HQUERY and PDH_HCOUNTER are pointers
_HANDLE, _HANDLE_OUT, _DWORD_OUT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint32)
_PROTOTYPES = {
    "PdhOpenQueryW": (ctypes.c_wchar_p, ctypes.c_size_t, _HANDLE_OUT),
    "PdhAddEnglishCounterW": (_HANDLE, ctypes.c_wchar_p, ctypes.c_size_t, _HANDLE_OUT),
    "PdhCollectQueryData": (_HANDLE,),
    "PdhGetFormattedCounterArrayW": (_HANDLE, ctypes.c_uint32, _DWORD_OUT, _DWORD_OUT, ctypes.POINTER(_Item)),
    "PdhCloseQuery": (_HANDLE,),
}


class Counters:
    """This machine's counters, for one thread, opened at the first reading. On other systems, and where Windows has no
    such counters (before version 1709), every reading is None, as it is after close()."""

    def __init__(self, pdh: Any = None) -> None:
        """`pdh` has pdh.dll's functions; left out, it is that library."""
        self._pdh: Any = None
        self._queries: dict[tuple[str, ...], tuple[Any, list[Any]]] = {}
        with contextlib.suppress(AttributeError, OSError):  # no ctypes.WinDLL, no such library
            pdh = pdh or ctypes.WinDLL("pdh")  # type: ignore[attr-defined]
            for name, arguments in _PROTOTYPES.items():
                function = getattr(pdh, name)
                function.argtypes, function.restype = arguments, ctypes.c_uint32
            self._pdh = pdh

    def close(self) -> None:
        for query, _ in self._queries.values():
            if query:
                self._pdh.PdhCloseQuery(query)
        self._pdh, self._queries = None, {}

    def memory(self) -> Memory | None:
        """Resident bytes of every process on every adapter, now."""
        read = self._read(LOCAL, NON_LOCAL)
        return (parse_memory(*read) or None) if read else None

    def utilization(self) -> Utilization | None:
        """Percentages since the previous call, so None at the first one."""
        first = (UTILIZATION,) not in self._queries
        read = self._read(UTILIZATION)
        return (parse_utilization(*read) or None) if read and not first else None

    def _read(self, *paths: str) -> list[list[tuple[str, float]]] | None:
        """For each of `paths` its (instance, value) pairs, of one collection.

        Memory and engines have a query each, so that reading the one does not collect the other in between.
        """
        if self._pdh is None:
            return None
        with contextlib.suppress(OSError):  # ctypes tells an access violation as one
            query, counters = self._queries.get(paths) or self._open(paths)
            if counters and not self._pdh.PdhCollectQueryData(query):
                return [self._values(counter) for counter in counters]
        return None

    def _open(self, paths: tuple[str, ...]) -> tuple[ctypes.c_void_p, list[ctypes.c_void_p]]:
        query, counters = _HANDLE(), [_HANDLE() for _ in paths]
        if self._pdh.PdhOpenQueryW(None, 0, ctypes.byref(query)) or any(
                self._pdh.PdhAddEnglishCounterW(query, path, 0, ctypes.byref(counter))
                for path, counter in zip(paths, counters, strict=True)):
            counters = []
        self._queries[paths] = query, counters
        return query, counters

    def _values(self, counter: ctypes.c_void_p) -> list[tuple[str, float]]:
        """Asked twice, as documented: without a buffer for the size that is needed, then with one."""
        size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)
        ask = self._pdh.PdhGetFormattedCounterArrayW
        if ask(counter, _FORMAT, ctypes.byref(size), ctypes.byref(count), None) != _MORE_DATA:
            return []
        items = (_Item * (size.value // ctypes.sizeof(_Item) + 1))()
        if ask(counter, _FORMAT, ctypes.byref(size), ctypes.byref(count), items):
            return []
        return [(item.name or "", item.value.double) for item in items[:count.value] if item.value.status in _READABLE]
