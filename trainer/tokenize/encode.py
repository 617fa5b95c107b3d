"""Pieces of text to arrays of ids, on all cores, in order."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH = 1 << 20
"""Characters encoded by one call."""
AHEAD = 4
"""Batches that are read before the oldest is written: two at work, and two that wait."""
TRAINING, VALIDATION = SIDES = (0, 1)
"""What a document is for."""


@dataclass(frozen=True)
class Item:
    """A piece to encode, whether it ends a document, what it is for (`side`, one of SIDES), and where it came from: the
    `number`-th piece, from 1, of the `file`-th file, from 0."""

    text: str
    ends: bool
    side: int
    file: int
    number: int


@dataclass(frozen=True)
class Batch:
    """Items that were encoded together, and their ids by side. `first_ids` are those of the first item alone."""

    items: list[Item]
    ids: list[np.ndarray]
    first_ids: list[int]


def encode(tokenizer: "Tokenizer", end: list[int], dtype: np.dtype, items: Iterator[Item]) -> Iterator[Batch]:
    """Encodes the items in batches, in order, with the ids `end` after each document. Two calls are at work at a time, so
    that the cores have something to do while the ids of one become an array; this thread reads meanwhile."""
    def encode_batch(batch: list[Item]) -> Batch:
        sides: tuple[list[int], list[int]] = ([], [])
        encodings = tokenizer.encode_batch_fast([item.text for item in batch], add_special_tokens=False)
        for item, encoding in zip(batch, encodings, strict=True):
            sides[item.side].extend(encoding.ids)
            if item.ends:
                sides[item.side].extend(end)
        return Batch(batch, [np.array(ids, dtype) for ids in sides], encodings[0].ids)

    waiting: deque[Future[Batch]] = deque()
    pool = ThreadPoolExecutor(2)
    try:
        for batch in _batches(items):
            waiting.append(pool.submit(encode_batch, batch))
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
