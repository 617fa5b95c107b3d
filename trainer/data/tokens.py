"""Runs of token ids, memory-mapped from one file or several, and batches that are contiguous slices of them.
trainer/data/formats.py says which files hold ids and how."""

import contextlib
import functools
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from trainer.config import StepConfig
from trainer.run.distributed import ALONE, Seat

SCHEMA = 1
LONGEST_NAME = 255
"""Bytes of a file's name that file systems take."""
SCAN = 1 << 24
"""Ids looked at together when a file is checked: 64 MB as uint32."""


def dtype_for(vocab: int) -> np.dtype:
    """The smallest type that holds every id below `vocab`: ids above 65,535 would wrap silently in uint16."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def sidecar(path: Path | str) -> Path:
    return Path(f"{path}.json")


def scan_file(path: Path | str) -> Path:
    """Where the highest id of a token file is kept, so that a start need not read all of it again."""
    return Path(f"{path}.scan.json")


def stamp(path: Path | str) -> dict | None:
    """What tells whether a file is still the one that was scanned; None where there is no file."""
    try:
        now = os.stat(path)
    except OSError:
        return None
    return {"size": now.st_size, "mtime_ns": now.st_mtime_ns}


def _scanned(path: str, now: dict | None) -> int | None:
    """The highest id that an earlier scan of this very file found."""
    try:
        kept = read_json(scan_file(path), "scan")
    except UserError:
        return None
    highest = kept.pop("max_id", None)
    return highest if type(highest) is int and highest >= 0 and kept == now else None


def write_sidecar(path: Path, count: int, vocab: int, tokenizer: str | None, dtype: np.dtype | None = None, **more) -> None:
    """Says what the ids in `path` are; `dtype` is dtype_for(vocab) unless told otherwise, `more` is kept for its writer."""
    write_json(sidecar(path), {"schema": SCHEMA, "dtype": (dtype or dtype_for(vocab)).name, "count": count, "vocab": vocab,
                               "tokenizer": tokenizer, **more})


class Joined:
    """Arrays of ids that are read as one. A slice within one of them is an array without a copy; one that spans several is
    another Joined, which numpy copies together where an array is needed."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.nbytes = sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, which: slice) -> "np.ndarray | Joined":
        start, stop, _ = which.indices(len(self))
        first = int(np.searchsorted(self._ends, start, side="right"))
        found = []
        while start < stop:
            part, begin = self.parts[first], int(self._ends[first]) - len(self.parts[first])
            found.append(part[start - begin:stop - begin])
            start, first = int(self._ends[first]), first + 1
        return Joined(found) if len(found) > 1 else found[0] if found else self.parts[0][:0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(np.concatenate(self.parts), dtype)


@dataclass(frozen=True)
class Tokens:
    """A run of token ids, all below `vocab` if it is known; `tokenizer` is the path of the tokenizer.json that made them, if
    known; `shards` are the files of several that are read as one."""

    ids: np.ndarray | Joined
    vocab: int | None
    path: str
    tokenizer: str | None = None
    shards: tuple["Tokens", ...] = ()

    @classmethod
    def open(cls, path: Path | str) -> "Tokens":
        """Maps a token file; UserError if the file or its sidecar is missing, damaged, or they don't agree."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"token file {path}: no such file; `train tokenize TEXT --out {path}` makes one")
        beside = sidecar(path)
        if not beside.is_file():
            raise UserError(f"token file {path} has no {beside.name} beside it, which says dtype, count and vocabulary; "
                            f"`train tokenize` writes both")
        facts = read_json(beside, "token sidecar")
        if facts.get("schema") != SCHEMA:
            raise UserError(f"token sidecar {beside}: schema is {facts.get('schema')!r:.40}; this version reads {SCHEMA}")
        for name, low in (("count", 0), ("vocab", 1)):
            value = facts.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**48:
                raise UserError(f"token sidecar {beside}: {name} is {value!r:.40}; it must be a whole number")
        if facts.get("dtype") not in ("uint16", "uint32"):
            raise UserError(f"token sidecar {beside}: dtype is {facts.get('dtype')!r:.40}; it must be uint16 or uint32")
        tokenizer = facts.get("tokenizer")
        if tokenizer is not None and (not isinstance(tokenizer, str) or "\0" in tokenizer or max(
                map(len, os.fsencode(tokenizer).replace(b"\\", b"/").split(b"/"))) > LONGEST_NAME):
            raise UserError(f"token sidecar {beside}: tokenizer is {tokenizer!r:.40}; it must be a file's name or null")
        dtype = np.dtype(facts["dtype"]).newbyteorder("<")
        size = path.stat().st_size
        if size != facts["count"] * dtype.itemsize:
            raise UserError(f"token file {path} has {size} bytes where {beside.name} says {facts['count']} tokens of "
                            f"{dtype.itemsize} bytes ({facts['count'] * dtype.itemsize}); make it again")
        ids = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
        return cls(ids, facts["vocab"], str(path), tokenizer and str(path.parent / tokenizer))

    @classmethod
    def join(cls, shards: Sequence["Tokens"]) -> "Tokens":
        """The shards, one after another, as one run of tokens."""
        first = shards[0]
        if len(shards) == 1:
            return first
        return cls(Joined([s.ids for s in shards]), first.vocab, f"{first.path} and {len(shards) - 1} more", first.tokenizer,
                   tuple(shards))

    @property
    def paths(self) -> list[str]:
        """Of the files that are read."""
        return [shard.path for shard in self.shards] or [self.path]

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, vocab: int, keep: bool = True) -> None:
        """Looks at every id; UserError naming the first that a model of `vocab` has no row for, and where it is.

        On a card such an id would be a device-side assert, which poisons the context. The highest id of a whole file is
        kept beside it if `keep`, and believed as long as the file's size and time of change are what they were; it bounds
        the ids of a piece of the file too, but a piece's own is not the file's and is not kept.
        """
        for shard in self.shards:
            shard.check(vocab, keep)
        if self.shards:
            return
        now = stamp(self.path)
        highest = _scanned(self.path, now)
        if highest is not None and highest < vocab:
            return
        highest = 0
        for start in range(0, len(self.ids), SCAN):
            piece = self.ids[start:start + SCAN]
            highest = max(highest, int(piece.max()))
            if piece.dtype.kind == "i" and piece.min() < 0:
                at = int(np.argmax(piece < 0))
                raise UserError(f"token file {self.path}: id {int(piece[at])} at position {start + at} is negative, which "
                                f"no token is; make the file again without padding or masks")
            if highest >= vocab:
                at = int(np.argmax(piece >= vocab))
                raise UserError(f"token file {self.path}: id {int(piece[at])} at position {start + at} is past the model's "
                                f"vocabulary of {vocab}; plan with --vocab {self.vocab or int(piece[at]) + 1} or more, or "
                                f"tokenize again")
        whole = getattr(self.ids, "offset", 0) + self.ids.nbytes
        if keep and now and now == stamp(self.path) and now["size"] == whole > 0:
            with contextlib.suppress(UserError):  # a folder that can't be written to costs another scan, no more
                write_json(scan_file(self.path), {**now, "max_id": highest})

    def checksum(self) -> int:
        """CRC-32 of all ids."""
        found = 0
        for part in self.ids.parts if isinstance(self.ids, Joined) else [self.ids]:
            for start in range(0, len(part), SCAN):
                found = zlib.crc32(part[start:start + SCAN].tobytes(), found)
        return found

    def where(self, step: int, shape: StepConfig) -> str:
        """Which windows optimizer step `step` reads, for a person."""
        count, rows = self.windows(shape.length), shape.accum * shape.batch
        epoch, position = divmod(step * rows, count)
        return f"windows {position} to {position + rows - 1} of the {count} in epoch {epoch}, as they are dealt"

    def split(self, tail: int) -> tuple["Tokens", "Tokens"]:
        """All but the last `tail` ids, and those."""
        cut = len(self.ids) - tail
        return (Tokens(self.ids[:cut], self.vocab, self.path, self.tokenizer),
                Tokens(self.ids[cut:], self.vocab, self.path, self.tokenizer))

    def windows(self, length: int) -> int:
        """Number of windows of `length` inputs and their targets; UserError if there is not even one."""
        count = (len(self.ids) - 1) // length
        if count < 1:
            raise UserError(f"token file {self.path} has {len(self.ids)} tokens here; length {length} needs at least "
                            f"{length + 1}")
        return count

    def batch(self, seed: int, step: int, shape: StepConfig, seat: Seat = ALONE) -> np.ndarray:
        """The tokens of optimizer step `step`, int32 (accum, batch, length + 1): a pure function of its arguments. `shape`
        is a process's share: those of a team take as many each, one after another, of the same windows in the same order.

        Every epoch deals out each window once, in an order of its own; the windows start at an offset of its own too,
        so that the tail which no whole window covers is reached in other epochs.
        """
        length, rows = shape.length, shape.accum * shape.batch
        count = self.windows(length)
        slack = (len(self.ids) - 1) % length
        out = np.empty((rows, length + 1), np.int32)
        for row in range(rows):
            epoch, position = divmod((step * seat.size + seat.rank) * rows + row, count)
            offset, order = _order(seed, epoch, count, slack)
            start = offset + int(order[position]) * length
            out[row] = self.ids[start:start + length + 1]
        return out.reshape(shape.accum, shape.batch, length + 1)

    def fixed(self, batch: int, length: int, most: int) -> list[np.ndarray]:
        """Up to `most` batches (batch, length + 1) of windows spread evenly: the same ones at every evaluation."""
        count = self.windows(length)
        wanted = min(count, most * batch)
        if wanted >= batch:
            wanted -= wanted % batch
        starts = np.linspace(0, count - 1, wanted).round().astype(int) * length
        rows = np.stack([np.asarray(self.ids[s:s + length + 1]) for s in starts]).astype(np.int32)
        return [rows[i:i + batch] for i in range(0, len(rows), batch)]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int, slack: int) -> tuple[int, np.ndarray]:
    random = np.random.default_rng((seed, epoch))
    return int(random.integers(slack + 1)), random.permutation(count)


def feed(tokens: Tokens, shape: StepConfig, seed: int, device, start: int = 0, seat: Seat = ALONE) -> Iterator:
    """Each step's tokens on the device from step `start` on, int32 (accum, batch, length + 1); valid until the next
    but one is asked for. On a card the following step's are copied from pinned memory, on a stream of their own, while
    the current one runs. No worker processes: slices of a mapped file take microseconds, and under Windows one worker
    takes 3 s to start (pytorch #153594)."""
    import torch

    if device.type != "cuda":
        for step in itertools.count(start):
            yield torch.from_numpy(tokens.batch(seed, step, shape, seat)).to(device)
    size = (shape.accum, shape.batch, shape.length + 1)
    copies = torch.cuda.Stream(device)
    host = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.int32, device=device) for _ in range(2)]
    arrived, read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def stage(step: int) -> None:
        slot = step % 2
        arrived[slot].synchronize()  # until its last copy is through, the pinned memory is being read
        host[slot].copy_(torch.from_numpy(tokens.batch(seed, step, shape, seat)))
        copies.wait_event(read[slot])
        with torch.cuda.stream(copies):
            there[slot].copy_(host[slot], non_blocking=True)
            arrived[slot].record()

    stage(start)
    for step in itertools.count(start):
        slot = step % 2
        torch.cuda.current_stream(device).wait_event(arrived[slot])
        yield there[slot]
        read[slot].record(torch.cuda.current_stream(device))  # the step that reads it has been enqueued by now
        stage(step + 1)
