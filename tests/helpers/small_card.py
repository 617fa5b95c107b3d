"""A small card imitated on a large one, in the worker's own process. It spills past a cap, as Windows does: torch takes its
memory from a pool whose allocator gives the card's up to the cap and pinned host memory past it. Or it fails past a cap."""

import ctypes
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from probe.outcome import Outcome
from probe.records import Measurement
from probe.tasks.memory_scan import CardMemory, scan_card
from probe.tasks.table import DescribeDevice, ScanMemory, Task
from probe.tasks.worker import Workers

A = TypeVar("A")
P = TypeVar("P")
Kind = Literal["spill", "fail"]
"""What happens to an allocation past the cap."""
_callbacks: list[Any] = []
"""ctypes keeps no reference to a callback, and torch calls it until the process ends."""


def _runtime() -> ctypes.CDLL:
    import torch

    torch.zeros(1, device="cuda")
    with open("/proc/self/maps") as f:
        return ctypes.CDLL(next(line.split()[-1] for line in f if "libcudart.so" in line))


class SpillingPool:
    """The pool, and the bytes of host memory that it has given at most."""

    def __init__(self, cap_bytes: int) -> None:
        import torch

        runtime = _runtime()
        size_t, pointer = ctypes.c_size_t, ctypes.c_void_p
        on_card: dict[int, int] = {}
        on_host: dict[int, int] = {}
        self.spilled_peak_bytes = 0

        @ctypes.CFUNCTYPE(pointer, size_t, ctypes.c_int, pointer)
        def take(size: int, device: int, stream: int | None) -> int | None:
            address = pointer()
            if sum(on_card.values()) + size <= cap_bytes:
                failed, sizes = runtime.cudaMalloc(ctypes.byref(address), size_t(size)), on_card
            else:
                mapped = ctypes.c_uint(2)
                failed, sizes = runtime.cudaHostAlloc(ctypes.byref(address), size_t(size), mapped), on_host
            if failed or address.value is None:
                return None
            sizes[address.value] = size
            self.spilled_peak_bytes = max(self.spilled_peak_bytes, sum(on_host.values()))
            return address.value

        @ctypes.CFUNCTYPE(None, pointer, size_t, ctypes.c_int, pointer)
        def give(address: int, size: int, device: int, stream: int | None) -> None:
            if on_card.pop(address, None):
                runtime.cudaFree(pointer(address))
            elif on_host.pop(address, None):
                runtime.cudaFreeHost(pointer(address))

        _callbacks.extend((take, give))
        addresses = [ctypes.cast(function, pointer).value for function in (take, give)]
        self.allocator = torch._C._cuda_customAllocator(*addresses)
        self.pool = torch.cuda.MemPool(self.allocator)


class SpillingMemory(CardMemory):
    """The memory scan's card with a pool for each block, since torch gives nothing of a live pool back."""

    def __init__(self, device: Any, allocator: Any) -> None:
        super().__init__(device)
        self._allocator = allocator

    def take(self, size: int) -> Any:
        import torch

        pool = torch.cuda.MemPool(self._allocator)
        with torch.cuda.use_mem_pool(pool):
            block = super().take(size)
        if block is not None:
            block.pool = pool
        return block

    def give(self, block: Any) -> None:
        import torch

        block.untyped_storage().resize_(0)
        del block.pool
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class OnSmallCard(Task[A, P]):
    """`task` in a process whose card has `cap_bytes` for allocations and then spills or fails. A measured cell's readings
    say how much has truly spilled."""

    task: Task[A, P]
    kind: Kind
    cap_bytes: int

    def run(self, send: Callable[[P], None]) -> A:
        import torch

        makes_context = not isinstance(self.task, DescribeDevice)
        if makes_context and self.kind == "fail":
            whole_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(self.cap_bytes / whole_bytes)
        if not makes_context or self.kind == "fail":
            return self.task.run(send)
        spilling = SpillingPool(self.cap_bytes)
        if isinstance(self.task, ScanMemory):
            tell = cast(Callable[[int], None], send)
            scan = scan_card(self.task.name, self.task.uuid, tell,
                             memory=lambda device: SpillingMemory(device, spilling.allocator))
            return cast(A, scan)
        with torch.cuda.use_mem_pool(spilling.pool):
            answer = self.task.run(send)
        if isinstance(answer, Measurement):
            readings = answer.readings | {"truly_spilled_bytes": spilling.spilled_peak_bytes}
            return dataclasses.replace(answer, readings=readings)
        return answer


class SmallCard(Workers):
    """Workers on such a card."""

    def __init__(self, kind: Kind, cap_bytes: int) -> None:
        super().__init__()
        self.kind, self.cap_bytes = kind, cap_bytes

    def run(self, task: Task[A, P], seconds: float, on_host: bool = False,
            certain: Callable[[P, float], str | None] = lambda progress, quiet_s: None,
            tell: Callable[[P], None] = lambda progress: None) -> Outcome[A, P]:
        small: OnSmallCard[A, P] = OnSmallCard(task, self.kind, self.cap_bytes)
        return super().run(small, seconds, on_host, certain, tell)
