"""The memory scan on imitated memories: finds failure and collapse, believes no single slow pass, gives all back."""

import itertools

import pytest

from probe.tasks.memory_scan import FINEST_BYTES, Scan, block_size, reserve, scan

GB = 10**9
MB = 2**20


class Imitated:
    """A card of `total` bytes that is fast up to `cap` and then fails or spills; `evicts` spills the oldest block, not the
    newest; every `hiccup`th pass is slow whatever happens."""

    def __init__(self, total, cap, how, evicts=False, hiccup=0):
        self.total, self.cap, self.how, self.evicts = total, cap, how, evicts
        self.taken, self.most, self._passes, self._hiccup = {}, 0, itertools.count(1), hiccup
        self._ids = itertools.count()

    def take(self, size):
        if self.how == "fails" and sum(self.taken.values()) + size > self.cap:
            return None
        block = next(self._ids)
        self.taken[block] = size
        self.most = max(self.most, sum(self.taken.values()))
        return block

    def give(self, block):
        self.taken.pop(block, None)

    def pass_s(self, block):
        spilled = sum(self.taken.values()) - self.cap
        order = list(self.taken) if self.evicts else list(self.taken)[::-1]
        slow = False
        for b in order:  # those that lie outside the card
            if spilled <= 0:
                break
            slow |= b == block
            spilled -= self.taken[b]
        slow |= bool(self._hiccup) and next(self._passes) % self._hiccup == 0
        return 5e-6 + 2 * self.taken[block] / (12e9 if slow else 192e9)


@pytest.mark.parametrize("total", [2 * GB, 6 * 2**30, 24 * 2**30, 141 * GB])
@pytest.mark.parametrize("share", [0.3, 0.83, 0.9])
@pytest.mark.parametrize(("how", "kind"), [("fails", "failure"), ("spills", "collapse")])
def test_the_cliff_is_found_to_the_finest_block(total, share, how, kind):
    cap = int(total * share)
    memory = Imitated(total, cap, how)
    result = scan(memory, total, int(total * 0.99), lambda taken: None)
    assert result.kind == kind
    assert result.bad_bytes is not None
    assert cap - FINEST_BYTES <= result.fast_bytes <= cap < result.bad_bytes <= result.fast_bytes + 2 * FINEST_BYTES
    assert not memory.taken


def test_a_driver_that_moves_older_blocks_out_is_seen_too():
    memory = Imitated(6 * GB, 5 * GB, "spills", evicts=True)
    result = scan(memory, 6 * GB, 6 * GB)
    assert result.kind == "collapse"
    assert 5 * GB - 2 * FINEST_BYTES <= result.fast_bytes <= 5 * GB
    assert (result.slow_s or 0) > 10 * result.fast_s


def test_a_reserve_is_never_touched():
    """A desktop must still draw: 2% of the card, and no less than 128 MB, of what was free."""
    memory = Imitated(6 * GB, 7 * GB, "spills")
    result = scan(memory, 6 * GB, 5 * GB)
    assert result.kind == "reserve"
    assert result.bad_bytes is None
    assert result.slow_s is None
    assert memory.most <= 5 * GB - reserve(6 * GB)
    assert result.fast_bytes > 5 * GB - reserve(6 * GB) - FINEST_BYTES
    assert reserve(2 * GB) == 128 * MB
    assert reserve(100 * GB) == 2 * GB


def test_single_slow_passes_are_no_cliff():
    result = scan(Imitated(6 * GB, 5 * GB, "fails", hiccup=7), 6 * GB, 6 * GB)
    assert result.kind == "failure"
    assert result.fast_bytes >= 5 * GB - FINEST_BYTES


def test_everything_is_given_back_when_it_is_cut_short():
    memory = Imitated(6 * GB, 5 * GB, "fails")

    def stop(taken):
        if taken > GB:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        scan(memory, 6 * GB, 6 * GB, stop)
    assert not memory.taken


def test_a_card_without_room_for_one_block_is_an_error_and_a_full_one_has_no_fast_bytes():
    with pytest.raises(MemoryError):
        scan(Imitated(6 * GB, 10 * MB, "fails"), 6 * GB, 6 * GB)
    full = scan(Imitated(6 * GB, 5 * GB, "fails"), 6 * GB, 100 * MB)
    assert full == Scan("reserve", 0, None, full.fast_s, None)
    assert full.fast_s == pytest.approx(1e-11, rel=0.1)


def test_few_passes_are_enough_on_any_card():
    """Passes over everything taken grow with the square of the number of blocks."""
    for total in (2 * GB, 6 * GB, 12 * GB, 141 * GB):
        assert 64 <= total / block_size(total) < 128 or block_size(total) == FINEST_BYTES
