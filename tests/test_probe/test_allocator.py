"""The model of torch's caching allocator: rounding, pools, splitting, joining, and what empty_cache gives back."""

import itertools
import random

import pytest

from probe.estimate.allocator import MIN_LARGE, Allocator, Block, driver, rounded, segment_bytes

MIB = 1 << 20


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_to_512(size, block):
    assert rounded(size) == block


@pytest.mark.parametrize(("block", "segment"), [
    (512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (MIN_LARGE - 512, 20 * MIB), (MIN_LARGE, 10 * MIB),
    (MIN_LARGE + 512, 12 * MIB), (33 * MIB, 34 * MIB)])
def test_segments_follow_the_three_classes(block, segment):
    assert segment_bytes(block) == segment


def test_small_requests_share_a_segment_and_large_ones_do_not_use_it():
    a = Allocator()
    first, second = a.allocate(1000), a.allocate(MIB)
    assert a.reserved == 2 * MIB
    assert a.allocated == 1024 + MIB
    assert second.address == first.address + 1024
    a.allocate(MIB + 1)
    assert a.reserved == 22 * MIB


def test_a_small_block_is_split_at_512_left_and_a_large_one_past_1_mib():
    a = Allocator()
    a.allocate(2 * MIB - 512 - MIB), a.allocate(MIB)
    assert a.allocated == 2 * MIB - 512
    assert a.allocate(512).size == 512
    assert a.reserved == 2 * MIB
    a = Allocator()
    assert a.allocate(11 * MIB).size == 12 * MIB, "1 MiB is left, which stays with the block and counts as allocated"
    assert a.allocate(11 * MIB - 512).size == 11 * MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_of_those_the_lowest():
    places = iter([100 * MIB, 0, 200 * MIB])
    a = Allocator(lambda size: next(places))
    high, low, larger = a.allocate(30 * MIB), a.allocate(30 * MIB), a.allocate(40 * MIB)
    for block in (larger, high, low):
        a.free(block)
    assert a.allocate(30 * MIB).address == 0
    assert a.allocate(30 * MIB).address == 100 * MIB
    assert a.allocate(30 * MIB).address == 200 * MIB
    assert a.reserved == 100 * MIB


def test_freed_neighbours_join():
    a = Allocator()
    three = [a.allocate(4 * MIB) for _ in range(3)]
    for block in (three[0], three[2], three[1]):
        a.free(block)
    assert a.allocated == 0
    assert a.allocate(9 * MIB).address == three[0].address
    assert a.reserved == 20 * MIB
    a.free(a.allocate(20 * MIB))
    assert a.reserved == 40 * MIB


def test_streams_and_private_pools_share_nothing():
    a = Allocator()
    a.free(a.allocate(30 * MIB))
    a.free(a.allocate(30 * MIB, stream=1))
    a.free(a.allocate(30 * MIB, stream=1, private=True))
    assert a.reserved == 90 * MIB
    a.empty_cache()
    assert a.reserved == 30 * MIB
    assert a.reserved_peak == 90 * MIB
    a.allocate(30 * MIB, stream=1, private=True)
    assert a.reserved == 30 * MIB
    a.allocate(40 * MIB)
    assert a.reserved == 70 * MIB
    assert a.reserved_peak == 90 * MIB


def test_empty_cache_keeps_segments_in_use():
    a = Allocator()
    kept, gone = a.allocate(2 * MIB), a.allocate(2 * MIB)
    a.free(gone)
    a.empty_cache()
    assert a.reserved == 20 * MIB
    a.free(kept)
    a.empty_cache()
    assert a.reserved == 0


def test_the_driver_never_gives_overlapping_segments():
    place = driver()
    taken = sorted((place(size), size) for size in [2 * MIB, 20 * MIB, 34 * MIB] * 40)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))


def test_a_random_load_leaves_nothing_behind():
    random.seed(0)
    a, alive = Allocator(), list[Block]()
    for _ in range(5000):
        if alive and random.random() < 0.5:
            a.free(alive.pop(random.randrange(len(alive))))
        else:
            alive.append(a.allocate(int(2 ** random.uniform(0, 26))))
        spans = sorted((b.address, b.address + b.size) for b in alive[-50:])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert a.allocated == sum(b.size for b in alive) <= a.reserved
    for block in alive:
        a.free(block)
    a.empty_cache()
    assert a.allocated == a.reserved == 0
