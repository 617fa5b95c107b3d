"""A small card imitated on a large one, in the worker's own process. It spills past a cap, as Windows does: torch takes its
memory from a pool whose allocator gives the card's up to the cap and pinned host memory past it. Or it fails past a cap."""

import ctypes
import importlib

from probe.tasks.worker import Workers

GIVES_BACK = []  # ctypes keeps no reference to a callback, and torch calls it until the process ends


def _runtime():
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
        here: dict[int, int] = {}
        there: dict[int, int] = {}
        self.spilled_peak_bytes = 0

        @ctypes.CFUNCTYPE(pointer, size_t, ctypes.c_int, pointer)
        def take(size, device, stream):
            found = pointer()
            if sum(here.values()) + size <= cap_bytes:
                failed, kept = runtime.cudaMalloc(ctypes.byref(found), size_t(size)), here
            else:
                failed, kept = runtime.cudaHostAlloc(ctypes.byref(found), size_t(size), ctypes.c_uint(2)), there  # 2: mapped
            if failed:
                return None
            kept[found.value] = size
            self.spilled_peak_bytes = max(self.spilled_peak_bytes, sum(there.values()))
            return found.value

        @ctypes.CFUNCTYPE(None, pointer, size_t, ctypes.c_int, pointer)
        def give(address, size, device, stream):
            if here.pop(address, None):
                runtime.cudaFree(pointer(address))
            elif there.pop(address, None):
                runtime.cudaFreeHost(pointer(address))

        GIVES_BACK.extend((take, give))
        address = [ctypes.cast(f, pointer).value for f in (take, give)]
        self.allocator = torch._C._cuda_customAllocator(*address)
        self.pool = torch.cuda.MemPool(self.allocator)


def _memory(device, allocator):
    """The ballast's memory with a pool for each block, since torch gives nothing of a live pool back."""
    import torch

    from probe.tasks.memory_scan import CardMemory

    class Spilling(CardMemory):
        def take(self, size):
            pool = torch.cuda.MemPool(allocator)
            with torch.cuda.use_mem_pool(pool):
                block = super().take(size)
            if block is not None:
                block.pool = pool
            return block

        def give(self, block):
            block.untyped_storage().resize_(0)
            del block.pool
            torch.cuda.empty_cache()

    return Spilling(device)


def call(function: str, kind: str, cap_bytes: int, *arguments):
    """Calls "module:function" in a process whose card has `cap_bytes` for allocations and then spills or fails."""
    import torch

    module, _, name = function.partition(":")
    real = getattr(importlib.import_module(module), name)
    if name == "look" or not cap_bytes:
        return real(*arguments)
    if kind == "fail":
        torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.get_device_properties(0).total_memory)
        return real(*arguments)
    spilling = SpillingPool(cap_bytes)
    if module == "probe.tasks.memory_scan":
        return real(*arguments, memory=lambda device: _memory(device, spilling.allocator))
    with torch.cuda.use_mem_pool(spilling.pool):
        values = real(*arguments)
    if "readings" in values:
        values["readings"]["truly_spilled_bytes"] = spilling.spilled_peak_bytes
    return values


class SmallCard(Workers):
    """Workers on such a card."""

    def __init__(self, kind: str, cap_bytes: int) -> None:
        super().__init__()
        self._how = kind, cap_bytes

    def run(self, function, args, *more, **others):
        return super().run("small_card:call", (function, *self._how, *args), *more, **others)
