"""The ids of one file, checked and summed up, and several files' ids read as one array."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spillcliff.errors import UserError
from trainer.data.scan import Scan, run_key

CHUNK_IDS = 1 << 24
"""Ids checked together: 64 MB as uint32."""


class Joined:
    """Arrays of ids that are read as one. A slice within one of them is an array without a copy; one that spans several is
    another Joined, which numpy copies into one where an array is needed."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, which: slice) -> "np.ndarray | Joined":
        start, stop, _ = which.indices(len(self))
        i = int(np.searchsorted(self._ends, start, side="right"))
        slices = []
        while start < stop:
            part, begin = self.parts[i], int(self._ends[i]) - len(self.parts[i])
            slices.append(part[start - begin:stop - begin])
            start, i = int(self._ends[i]), i + 1
        return Joined(slices) if len(slices) > 1 else slices[0] if slices else self.parts[0][:0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.concatenate(self.parts), dtype)


@dataclass(frozen=True)
class Shard:
    """Ids of one file, from its id `first` on; `is_whole` says that they are all of it."""

    ids: np.ndarray
    path: str
    first: int = 0
    is_whole: bool = True

    def slice(self, start: int, stop: int) -> "Shard":
        """Those from `start` to `stop`, as Python counts."""
        is_all = (start, stop) == (0, len(self.ids))
        return self if is_all else replace(self, ids=self.ids[start:stop], first=self.first + start, is_whole=False)

    def _chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(position of the first, ids) of pieces that fit in memory."""
        return ((start, self.ids[start:start + CHUNK_IDS]) for start in range(0, len(self.ids), CHUNK_IDS))

    def check(self, model_vocab: int, file_vocab: int | None, keep: bool) -> None:
        """Checks that every id is at least 0 and below `model_vocab`; UserError naming the first that is not, and where it
        is. `file_vocab`, the file's own if known, is for the advice. `keep` keeps a whole file's highest id beside it."""
        scan = Scan.of(self.path, self.ids.dtype.str)
        if scan and scan.max_id is not None and scan.max_id < model_vocab:
            return
        highest = 0
        for start, chunk in self._chunks():
            highest = max(highest, int(chunk.max()))
            if chunk.dtype.kind == "i" and chunk.min() < 0:
                at = int(np.argmax(chunk < 0))
                raise UserError(f"token file {self.path}: id {int(chunk[at])} at position {start + at} is negative, which "
                                f"no token is; make the file again without padding or masks")
            if highest >= model_vocab:
                at = int(np.argmax(chunk >= model_vocab))
                raise UserError(f"token file {self.path}: id {int(chunk[at])} at position {start + at} is past the model's "
                                f"vocabulary of {model_vocab}; plan with --vocab {file_vocab or int(chunk[at]) + 1} or "
                                f"more, or tokenize again")
        if keep and scan and self.is_whole and len(self.ids):
            scan.keep(self.path, max_id=highest)

    def checksum(self, before: int = 0) -> int:
        """CRC-32 of the ids as they lie in the file, continued from `before`, the shard's before; kept beside the file."""
        scan = Scan.of(self.path, self.ids.dtype.str)
        key = run_key(before, self.first, self.first + len(self.ids))
        if scan and key in scan.crc32:
            return scan.crc32[key]
        crc = before
        for _, chunk in self._chunks():
            crc = zlib.crc32(chunk.tobytes(), crc)
        if scan:
            scan.keep(self.path, crc32=scan.crc32 | {key: crc})
        return crc
