"""Takes a card's memory block by block, times a pass over every block, and sees where that collapses or the allocation
fails. Needs no model. `scan` is pure; `scan_card` runs it on a card, in a fresh process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from probe.tasks.table import ScanAnswer
from spillcliff.failures import failure, is_out_of_memory
from spillcliff.hardware.device import resolve_device
from spillcliff.hardware.usage import MemoryClaim

COLLAPSE = 3.0
"""A pass that takes this many times as long as when the card was empty is no noise: past a cap, host memory was 5 times
slower in a block of 2 MB and 50 in one of 128 on an H200; PCIe 3 is 16 times slower than a GTX 1060's memory."""

BLOCKS = 64
"""A card's memory is taken in so many blocks, so that passes over all of them take 3 s on an H200 and, by its
bandwidth, on a GTX 1060."""

FINEST_BYTES = 16 << 20
"""Blocks are halved down to this: torch's allocator takes whole segments of 20 MB for less than 10."""

RESERVE_SHARE, RESERVE_BYTES = 0.02, 128 << 20
"""What is never taken, the larger of the two, so that a desktop still draws."""

TRIES = 3


class Memory(Protocol):
    """A card's memory as the search sees it."""

    def take(self, size: int) -> Any:
        """A block of `size` bytes, or None when that fails."""

    def give(self, block: Any) -> None:
        """Frees it."""

    def pass_s(self, block: Any) -> float:
        """Seconds of one read and write of the block."""


@dataclass(frozen=True)
class Scan:
    """Bytes up to which all blocks were fast, bytes at which they were not (None for kind "reserve"), and seconds per byte
    of a pass over a fast and over the slow block."""

    kind: str
    fast_bytes: int
    bad_bytes: int | None
    fast_s: float
    slow_s: float | None


def block_size(total_bytes: int) -> int:
    """A power of two times FINEST_BYTES, so that halving ends there."""
    size = FINEST_BYTES
    while size * 2 * BLOCKS <= total_bytes:
        size *= 2
    return size


def reserve(total_bytes: int) -> int:
    return max(int(total_bytes * RESERVE_SHARE), RESERVE_BYTES)


def scan(memory: Memory, total_bytes: int, free_bytes: int, tell: Callable[[int], None] = lambda taken: None) -> Scan:
    """Where `memory` stops being fast, to FINEST_BYTES. Everything taken is given back by the end, however it ends.

    MemoryError if not even the first block can be had.
    """
    size = block_size(total_bytes)
    ceiling = free_bytes - reserve(total_bytes)
    blocks: list[tuple[object, int]] = []
    taken, kind, bad, slow_s = 0, "reserve", None, None
    try:
        normal = _references(memory, min(size, max(FINEST_BYTES, ceiling)))
        while size >= FINEST_BYTES:
            if taken + size > ceiling:
                size //= 2
                continue
            block = memory.take(size)
            if block is None:
                kind, bad, size = "failure", taken + size, size // 2
                continue
            blocks.append((block, size))
            taken += size
            slow = _slow(memory, blocks, normal)
            if slow is None:
                tell(taken)
                continue
            kind, bad, slow_s = "collapse", taken, slow
            while blocks and slow is not None:  # where the driver moved an older block out, it may not come back at once
                block, its_size = blocks.pop()
                taken -= its_size
                memory.give(block)
                slow = _slow(memory, blocks, normal)
            size //= 2
        largest = max(normal)
        return Scan(kind, taken, bad, normal[largest] / largest, slow_s)
    finally:
        for block, _ in blocks:
            memory.give(block)


def _references(memory: Memory, largest: int) -> dict[int, float]:
    """Seconds of a pass over a block of each size while the card is empty."""
    pass_s: dict[int, float] = {}
    size = FINEST_BYTES
    while size <= largest:
        block = memory.take(size)
        if block is None:
            break
        for _ in range(20):  # the clock rises from idle
            memory.pass_s(block)
        pass_s[size] = min(memory.pass_s(block) for _ in range(2 * TRIES))
        memory.give(block)
        size *= 2
    if not pass_s:
        raise MemoryError(f"not even {FINEST_BYTES >> 20} MB could be taken")
    return pass_s


def _slow(memory: Memory, blocks: list[tuple[object, int]], normal: dict[int, float]) -> float | None:
    """Seconds per byte of the first block whose passes have all collapsed, newest first; None if there is none. A pass
    that looks slow is tried again, since a desktop draws now and then."""
    for block, size in reversed(blocks):
        times: list[float] = []
        while len(times) < TRIES:
            times.append(memory.pass_s(block))
            if times[-1] <= COLLAPSE * normal[size]:
                break
        else:
            return min(times) / size
    return None


class CardMemory:
    """A card's memory by torch's own allocator, whose caps and pools apply."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self._device = torch, device
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def take(self, size: int) -> Any:
        try:
            return self._torch.zeros(size // 4, device=self._device)
        except Exception as e:
            if is_out_of_memory(*failure(e)):
                return None
            raise

    def give(self, block: Any) -> None:
        block.untyped_storage().resize_(0)
        self._torch.cuda.empty_cache()

    def pass_s(self, block: Any) -> float:
        self._begin.record()
        block.add_(1)
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000


def scan_card(name: str, uuid: str, send: Callable[[int], None], memory: Callable[..., Memory] = CardMemory) -> ScanAnswer:
    """Scans the CUDA card `name`; `send` is told the bytes that it holds. MemoryError if nothing can be had."""
    import torch

    claim = MemoryClaim()
    device = resolve_device(name)
    torch.cuda.set_device(device)
    began_s = time.perf_counter()
    claim.begin(device, uuid)
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.empty_cache()
    peaks = claim.peaks(device, uuid)
    context = max(0, (peaks.device_peak_bytes or 0) - (peaks.reserved_peak_bytes or 0))
    result = scan(memory(device), total, free, send)
    return ScanAnswer(
        kind=result.kind, fast_bytes=result.fast_bytes, bad_bytes=result.bad_bytes, context_bytes=context,
        free_at_start_bytes=free + context, fast_bytes_s=2 / result.fast_s, slow_bytes_s=result.slow_s and 2 / result.slow_s,
        seconds=time.perf_counter() - began_s)
