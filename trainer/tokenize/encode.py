"""Pieces of text to arrays of ids, on all cores, in order."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

BATCH = 1 << 20
"""Characters encoded by one call."""
AHEAD = 4
"""Batches that are read before the oldest is written: two at work, and two that wait."""


@dataclass(frozen=True)
class Item:
    """A piece to encode, where it goes (0 training, 1 validation), and where it came from."""

    text: str
    ends: bool
    side: int
    file: int
    number: int


def encoded(coder, end: list[int], dtype: np.dtype, items: Iterator[Item]):
    """(batch, its ids for training and for validation, what its first piece was encoded to), in order. Two calls are at work
    at a time, so that the cores have something to do while the ids of one become an array; this thread reads meanwhile."""
    def encode(batch: list[Item]):
        sides: tuple[list[int], list[int]] = ([], [])
        encoded = coder.encode_batch_fast([item.text for item in batch], add_special_tokens=False)
        for item, one in zip(batch, encoded, strict=True):
            sides[item.side].extend(one.ids)
            if item.ends:
                sides[item.side].extend(end)
        return batch, [np.array(ids, dtype) for ids in sides], encoded[0]

    waiting: deque = deque()
    pool = ThreadPoolExecutor(2)
    try:
        for batch in _batches(items):
            waiting.append(pool.submit(encode, batch))
            if len(waiting) >= AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(items: Iterator[Item]) -> Iterator[list[Item]]:
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += len(item.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
