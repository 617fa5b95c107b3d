"""Windows' counters: read through real structures from a pdh.dll of our own, and what the readings say."""

import ctypes
import json
import struct
import sys
from typing import Any

import pytest
from helpers.made import SAMPLES

from spillcliff.hardware.windows_counters import (
    LOCAL,
    NON_LOCAL,
    UTILIZATION,
    Counters,
    Memory,
    Utilization,
    adapter_of,
    non_local_bytes,
    other_processes,
    parse_memory,
)

CASES = json.loads((SAMPLES / "pdh.json").read_text())["cases"]
CARD = "0x00000000_0x0000c3b5"
NO_OBJECT, NO_COUNTER, NO_DATA, MORE_DATA = 0xC0000BB8, 0xC0000BB9, 0x800007D5, 0x800007D2
INVALID_HANDLE, INVALID_ARGUMENT, INVALID_DATA = 0xC0000BBC, 0xC0000BBD, 0xC0000BC6
Dword, Handle = ctypes.c_uint32, ctypes.c_void_p
DwordPointer, HandlePointer = ctypes.POINTER(Dword), ctypes.POINTER(Handle)
WIDE = {2: "utf-16-le", 4: "utf-32-le"}[ctypes.sizeof(ctypes.c_wchar)]

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
"""What fails inside a call from C is a warning otherwise."""


class Pdh:
    """pdh.dll's five functions, called through C: they check handles, collect, and fill buffers as documented.

    The layout is written out here (name at 0, status at 8, value at 16, 24 bytes each, names behind them), so that it
    is no copy of the reader's structures. `missing` is the status with which counters are refused; `lone` that of a
    utilization after a single collection, where 0 gives numbers that mean nothing.
    """

    PdhCollectQueryData: Any

    def __init__(self, case, missing=0, lone=INVALID_DATA):
        self.rows = {LOCAL: case["local"], NON_LOCAL: case["non_local"], UTILIZATION: case["engines"]}
        self.missing, self.lone, self.collect_status, self.queries = missing, lone, 0, 0
        self.collections, self.counters = {}, {}
        for name, arguments in (("PdhOpenQueryW", (ctypes.c_wchar_p, ctypes.c_size_t, HandlePointer)),
                                ("PdhAddEnglishCounterW", (Handle, ctypes.c_wchar_p, ctypes.c_size_t, HandlePointer)),
                                ("PdhCollectQueryData", (Handle,)),
                                ("PdhGetFormattedCounterArrayW", (Handle, Dword, DwordPointer, DwordPointer, Handle)),
                                ("PdhCloseQuery", (Handle,))):
            setattr(self, name, ctypes.CFUNCTYPE(Dword, *arguments)(getattr(self, "_" + name)))

    def _PdhOpenQueryW(self, source, user, out):
        self.queries += 1
        out[0] = query = 0x7FFE_0000_1000_0000 + self.queries  # no 32 bits hold it
        self.collections[query] = 0
        return 0

    def _PdhAddEnglishCounterW(self, query, path, user, out):
        if query not in self.collections:
            return INVALID_HANDLE
        if self.missing or path not in self.rows:
            return self.missing or NO_COUNTER
        out[0] = counter = 0x7FFE_0000_2000_0000 + len(self.counters)
        self.counters[counter] = query, path
        return 0

    def _PdhCollectQueryData(self, query):
        if query not in self.collections:
            return INVALID_HANDLE
        self.collections[query] += 1
        return self.collect_status

    def _PdhGetFormattedCounterArrayW(self, counter, form, size, count, buffer):
        query, path = self.counters.get(counter, (None, None))
        if query not in self.collections:
            return INVALID_HANDLE
        if self.lone and path == UTILIZATION and self.collections[query] < 2:
            return self.lone
        if form & 0xFFF not in (0x200, 0x400):
            return INVALID_ARGUMENT
        rows = self.rows[path]
        names = [None if name is None else (name + "\0").encode(WIDE) for name, _, _ in rows]
        needed = 24 * len(rows) + sum(len(name or b"") for name in names)
        if not buffer:
            given, size[0], count[0] = size[0], needed, len(rows)
            return INVALID_ARGUMENT if given else MORE_DATA
        if size[0] < needed:
            return INVALID_ARGUMENT
        memory: Any = (ctypes.c_char * needed).from_address(buffer)
        at = 24 * len(rows)
        for i, ((_, status, value), name) in enumerate(zip(rows, names, strict=True)):
            pointer = 0 if name is None else buffer + at
            number = struct.pack("=d", value) if form & 0x200 else struct.pack("=q", int(value))
            struct.pack_into("=QI4x8s", memory, 24 * i, pointer, status, number)
            memory[at:at + len(name or b"")] = name or b""
            at += len(name or b"")
        size[0], count[0] = needed, len(rows)
        return 0

    def _PdhCloseQuery(self, query):
        return INVALID_HANDLE if self.collections.pop(query, None) is None else 0


def memory_of(counters: Counters) -> Memory:
    """A reading that is there."""
    memory = counters.memory()
    assert memory is not None
    return memory


def read(case) -> tuple[Memory, Utilization]:
    """Memory and, of a second collection, utilization."""
    counters = Counters(Pdh(case))
    assert counters.utilization() is None
    memory, utilization = counters.memory(), counters.utilization()
    assert memory is not None
    assert utilization is not None
    return memory, utilization


def non_local_of(case: str, pid: int) -> int:
    size = non_local_bytes(read(CASES[case])[0], pid)
    assert size is not None
    return size


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_the_readings_say_of_a_process_and_its_card(case):
    memory, utilization = read(case)
    expect, pid = case["expect"], case["pid"]
    assert adapter_of(memory, pid) == expect["adapter"] == CARD
    assert memory[pid][CARD].local_bytes == expect["local_bytes"]
    assert non_local_bytes(memory, pid) == expect["non_local_bytes"]
    assert utilization[pid][CARD] == expect["utilization"]
    assert other_processes(memory, utilization, pid, CARD) == tuple(expect["others"])


def test_a_spill_shows_as_growth_over_the_same_process_when_it_fitted():
    healthy, small, large = (non_local_of(name, 9124)
                             for name in ("healthy_laptop", "spilled_0.26_GB", "spilled_3.9_GB"))
    assert small - healthy == 260_000_000
    assert large - healthy == 3_900_000_000


def test_the_integrated_adapter_is_another_one():
    memory, utilization = read(CASES["healthy_laptop"])
    integrated = "0x00000000_0x0000b1f2"
    assert adapter_of(memory, 1388) == adapter_of(memory, 7340) == integrated
    assert other_processes(memory, utilization, 9124, integrated) == (4_194_304 + 318_767_104 + 211_812_352, 9.7)


def test_an_instance_that_could_not_be_read_is_not_taken_for_zero():
    memory, utilization = read(CASES["malformed"])
    assert set(memory) == {9124, 0, 4}
    assert set(utilization) == {9124, 0}


def test_pinned_memory_that_every_adapter_shows_is_counted_once():
    rows = [(f"pid_7_luid_0x0_0x{card}_phys_0", float(local)) for card, local in ((1, 10), (2, 30), (3, 20))]
    memory = parse_memory(rows, [(name, 4694.0) for name, _ in rows])
    assert adapter_of(memory, 7) == "0x0_0x2"
    assert non_local_bytes(memory, 7) == 4694


def test_a_process_without_local_memory_has_no_card():
    memory = parse_memory([("pid_7_luid_0x0_0x1_phys_0", 0.0)], [("pid_7_luid_0x0_0x1_phys_0", 5.0)])
    for seen, pid in ((memory, 7), (memory, 8), ({}, 7), (None, 7)):
        assert adapter_of(seen, pid) is None
        assert non_local_bytes(seen, pid) is None


def test_no_reading_is_no_zero_and_nobody_else_is_one():
    assert other_processes(None, None, 7, CARD) == (None, None)
    assert other_processes({}, {}, 7, CARD) == (0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_values_that_are_no_amount_are_left_out(value):
    row = [("pid_7_luid_0x0_0x1_phys_0", value)]
    assert parse_memory(row, row) == {}


@pytest.mark.parametrize("status", [NO_OBJECT, NO_COUNTER])
def test_a_windows_without_these_counters_gives_none(status):
    pdh = Pdh(CASES["desktop"], missing=status)
    counters = Counters(pdh)
    assert [counters.memory(), counters.memory(), counters.utilization(), counters.utilization()] == [None] * 4
    assert pdh.queries == 2  # asked once each, not at every reading
    counters.close()
    assert not pdh.collections


def test_a_collection_that_fails_or_has_no_readable_instance_gives_none_and_the_next_one_is_read():
    case = CASES["desktop"]
    pdh = Pdh(case)
    counters = Counters(pdh)
    pdh.collect_status = NO_DATA
    assert counters.memory() is None
    pdh.collect_status = 0
    for rows in ([], [[name, INVALID_DATA, value] for name, _, value in case["local"]], [["_Total", 0, 1.0]]):
        pdh.rows[LOCAL] = rows
        assert counters.memory() is None
    pdh.rows[LOCAL] = case["local"]
    assert 9124 in memory_of(counters)


def test_processes_that_start_later_are_in_the_same_query():
    pdh = Pdh(CASES["desktop"])
    counters = Counters(pdh)
    assert 15480 not in memory_of(counters)
    pdh.rows[LOCAL], pdh.rows[NON_LOCAL] = CASES["another_training"]["local"], CASES["another_training"]["non_local"]
    assert 15480 in memory_of(counters)
    assert pdh.queries == 1


def test_reading_memory_collects_no_engines():
    pdh = Pdh(CASES["desktop"])
    counters = Counters(pdh)
    assert pdh.queries == 0
    counters.utilization()
    for _ in range(3):
        counters.memory()
    assert list(pdh.collections.values()) == [1, 3]


def test_a_first_utilization_is_none_whatever_windows_says():
    counters = Counters(Pdh(CASES["desktop"], lone=0))
    assert counters.utilization() is None
    utilization = counters.utilization()
    assert utilization is not None
    assert utilization[9124][CARD] == 91.0


def test_closed_counters_read_nothing_and_hold_nothing():
    pdh = Pdh(CASES["desktop"])
    counters = Counters(pdh)
    assert counters.memory()
    assert counters.utilization() is None
    assert len(pdh.collections) == 2
    counters.close()
    assert not pdh.collections
    assert counters.memory() is None
    assert counters.utilization() is None
    counters.close()


def test_a_library_that_faults_or_lacks_a_function_gives_none():
    class Faults:
        def __call__(self, *_):
            raise OSError("exception: access violation reading 0x0000000000000008")

    pdh = Pdh(CASES["desktop"])
    pdh.PdhCollectQueryData = Faults()
    assert Counters(pdh).memory() is None
    del pdh.PdhCollectQueryData
    assert Counters(pdh).memory() is None


def test_this_machine_is_read_without_an_error():
    counters = Counters()
    first, memory, utilization = counters.utilization(), counters.memory(), counters.utilization()
    counters.close()
    assert first is None
    if sys.platform != "win32":
        assert memory is None
        assert utilization is None
