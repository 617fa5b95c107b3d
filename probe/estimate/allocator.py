"""torch's caching allocator for CUDA as a model: which blocks it splits, joins, keeps and asks the driver for.

Follows c10/cuda/CUDACachingAllocator.cpp of torch 2.10 to 2.13 at its default settings. Replayed with the addresses that
a driver gave, it makes the same choices as torch's own (tests/gpu/test_history.py holds the two against each other).
"""

from bisect import bisect_left, insort
from collections.abc import Callable

# all from c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp
MIN_BLOCK = 512
"""Sizes are rounded up to multiples of this (kMinBlockSize)."""
SMALL = 1 << 20
"""The largest request that comes from the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 << 20
"""What the small pool asks the driver for (kSmallBuffer)."""
MIN_LARGE = 10 << 20
"""Requests of this and more get a segment of their own size (kMinLargeAlloc)."""
LARGE_SEGMENT = 20 << 20
"""What smaller requests of the large pool get (kLargeBuffer)."""
ROUND_LARGE = 2 << 20
"""Segments of large requests are multiples of this (kRoundLarge)."""


def rounded(size: int) -> int:
    """Bytes of the block that a request of `size` bytes wants (round_size)."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(size: int) -> int:
    """Bytes asked of the driver for a block of `size` (get_allocation_size)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


class Block:
    """A stretch of one segment; `before` and `after` are its neighbours there. Sizes and addresses in bytes."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: list, before: "Block | None" = None,
                 after: "Block | None" = None) -> None:
        self.address, self.size, self.pool, self.before, self.after = address, size, pool, before, after
        self.free = False


RISING = 400 << 20
"""Bytes of segments that an H200's driver (580) placed upwards, in the hole that its context leaves; later ones fall."""


def driver() -> Callable[[int], int]:
    """Addresses of segments in about the order that a driver gives. Only the choice among free blocks of the same size
    hangs on it: of 38 cells on an H200 reserved bytes came out exact for 33 (rising alone: 26, falling alone: 30) and 2.1%
    off at most (3.2%, 2.1%)."""
    middle = 1 << 47
    up = down = middle

    def place(size: int) -> int:
        nonlocal up, down
        if up + size <= middle + RISING:
            up += size
            return up - size
        down -= size
        return down
    return place


class Allocator:
    """Answers requests as torch does; `place(bytes)` gives the address of a new segment.

    `allocated` and `reserved` are bytes as torch counts them: whole blocks, their unsplit remainders included, and whole
    segments. A `stream` is any number; what was freed on one serves that stream alone, and what was freed in a private pool
    (a graph's, while it is recorded) that pool alone.
    """

    def __init__(self, place: Callable[[int], int] | None = None) -> None:
        self._place = place or driver()
        self._pools: dict[tuple, list] = {}
        self.allocated = 0
        self.reserved = self.reserved_peak = 0

    def allocate(self, size: int, stream: int = 0, private: bool = False) -> Block:
        size = rounded(size)
        is_small = size <= SMALL
        key = (private, stream, is_small)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = []
        at = bisect_left(pool, (size,))
        if at < len(pool):  # the smallest that is large enough, of those the lowest (get_free_block)
            block = pool.pop(at)[2]
            block.free = False
        else:
            segment = segment_bytes(size)
            block = Block(self._place(segment), segment, pool)
            self.reserved += segment
            if self.reserved > self.reserved_peak:
                self.reserved_peak = self.reserved
        left = block.size - size
        if left >= MIN_BLOCK if is_small else left > SMALL:  # should_split
            rest = Block(block.address + size, left, pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            rest.free = True
            insort(pool, (left, rest.address, rest))
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Gives the block back to its pool, joined with free neighbours (free_block, try_merge_blocks)."""
        self.allocated -= block.size
        pool, before, after = block.pool, block.before, block.after
        if before is not None and before.free:
            del pool[bisect_left(pool, (before.size, before.address))]
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            del pool[bisect_left(pool, (after.size, after.address))]
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        block.free = True
        insort(pool, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """Gives segments back that are wholly free, but for those of private pools (release_cached_blocks)."""
        for (private, _, _), pool in self._pools.items():
            if not private:
                whole = [e for e in pool if e[2].before is None and e[2].after is None]
                self.reserved -= sum(e[0] for e in whole)
                pool[:] = [e for e in pool if e[2].before is not None or e[2].after is not None]

    def free_blocks(self) -> tuple:
        """What is free, by pool, size and address: two equal answers around a step mean that the next will be the same."""
        return tuple((key, tuple(e[:2] for e in pool)) for key, pool in self._pools.items())
