"""A run of token ids, memory-mapped from one file or several, batches that are contiguous slices of it, and the sidecar that
says what is in a file of ours. formats.py opens the files of others too."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.schema import Number
from trainer.config import StepConfig
from trainer.data.shards import Joined, Shard
from trainer.plan import RULES, validation_tokens
from trainer.ranks import ALONE, World

T = TypeVar("T")

SCHEMA = 1
LONGEST_NAME = 255
"""Bytes of a file's name that file systems take."""


def dtype_for(vocab: int) -> np.dtype:
    """The smallest type that holds every id below `vocab`: ids above 65,535 would wrap silently in uint16."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def sidecar(path: Path | str) -> Path:
    """Where a token file's type, count, vocabulary and tokenizer are kept."""
    return Path(f"{path}.json")


def write_sidecar(path: Path, count: int, vocab: int, tokenizer: str | None, dtype: np.dtype | None = None,
                  **more: Any) -> None:
    """Writes what the ids in `path` are; `dtype` is dtype_for(vocab) by default, `more` is kept for its writer. UserError if
    it can't be written."""
    write_json(sidecar(path), {"schema": SCHEMA, "dtype": (dtype or dtype_for(vocab)).name, "count": count, "vocab": vocab,
                               "tokenizer": tokenizer, **more})


def read_sidecar(kind: type[T], path: Path | str, values: dict | None = None) -> T:
    """The fields of the dataclass `kind` in a token file's sidecar, which holds `values` if it was read already; UserError
    naming it and what is wrong."""
    values = read_json(sidecar(path), "token sidecar") if values is None else values
    try:
        schema.check_version(values, SCHEMA)
        return schema.read(kind, values)
    except UserError as e:
        raise UserError(f"token sidecar {sidecar(path)}: {e}") from None


@dataclass(frozen=True)
class TokensSidecar:
    """What a file of ids holds; UserError for a tokenizer's name that can't be one."""

    dtype: Literal["uint16", "uint32"]
    count: Annotated[int, Number(0, 2**48)]
    vocab: Annotated[int, Number(1, 2**48)]
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        name = self.tokenizer
        if name is not None and ("\0" in name or max(
                map(len, os.fsencode(name).replace(b"\\", b"/").split(b"/"))) > LONGEST_NAME):
            raise UserError(f"tokenizer is {name!r:.40}; it must be a file's name or null")


@dataclass(frozen=True)
class Tokens:
    """A run of token ids from one file or several, all below `vocab` if that is known; `tokenizer` is the path of the
    tokenizer.json that made them, if known. len() is their number."""

    shards: tuple[Shard, ...]
    vocab: int | None
    tokenizer: str | None = None

    @classmethod
    def of_ids(cls, ids: np.ndarray, vocab: int | None, path: str, tokenizer: str | None = None) -> "Tokens":
        """Ids (count,) that are all of the file `path`."""
        return cls((Shard(ids, path),), vocab, tokenizer)

    @classmethod
    def open(cls, path: Path | str) -> "Tokens":
        """Maps a token file; UserError if the file or its sidecar is missing, damaged, or they don't agree."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"token file {path}: no such file; `train tokenize TEXT --out {path}` makes one")
        if not sidecar(path).is_file():
            raise UserError(f"token file {path} has no {sidecar(path).name} beside it, which says its dtype, count and "
                            f"vocabulary; `train tokenize` writes both")
        facts = read_sidecar(TokensSidecar, path)
        dtype = np.dtype(facts.dtype).newbyteorder("<")
        size = path.stat().st_size
        if size != facts.count * dtype.itemsize:
            raise UserError(f"token file {path} has {size} bytes where {sidecar(path).name} says {facts.count} tokens of "
                            f"{dtype.itemsize} bytes ({facts.count * dtype.itemsize}); make it again")
        ids = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
        return cls.of_ids(ids, facts.vocab, str(path), facts.tokenizer and str(path.parent / facts.tokenizer))

    @classmethod
    def join(cls, several: Sequence["Tokens"]) -> "Tokens":
        """Several runs of one tokenizer, one after another, as one."""
        return cls(tuple(shard for tokens in several for shard in tokens.shards), several[0].vocab, several[0].tokenizer)

    @functools.cached_property
    def ids(self) -> np.ndarray | Joined:
        """All ids, (count,)."""
        parts = [shard.ids for shard in self.shards]
        return parts[0] if len(parts) == 1 else Joined(parts)

    @property
    def path(self) -> str:
        """The files that are read, for a person."""
        first = self.shards[0].path
        return first if len(self.shards) == 1 else f"{first} and {len(self.shards) - 1} more"

    @property
    def paths(self) -> list[str]:
        """The files that are read."""
        return [shard.path for shard in self.shards]

    @property
    def answer_share(self) -> None:
        """The loss is on all of them."""
        return None

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, vocab: int, keep: bool = True) -> None:
        """Checks every id; UserError naming the first that a model of `vocab` has no row for, and where it is.

        On a card such an id would be a device-side assert, which poisons the context. The highest id of a whole file is
        kept beside it if `keep`, and believed as long as the file is the same; it bounds the ids of a piece of the file
        too, but a piece's own is not the file's and is not kept.
        """
        for shard in self.shards:
            shard.check(vocab, self.vocab, keep)

    def checksum(self) -> int:
        """CRC-32 of all ids as they lie in their files."""
        crc = 0
        for shard in self.shards:
            crc = shard.checksum(crc)
        return crc

    def where(self, step: int, config: StepConfig) -> str:
        """Which windows optimizer step `step` reads, for a person."""
        count, rows = self.windows(config.length), config.accum * config.batch
        epoch, position = divmod(step * rows, count)
        return f"windows {position} to {position + rows - 1} of the {count} in epoch {epoch}, as they are dealt"

    def split(self, step: StepConfig, rules: int = RULES) -> tuple["Tokens", "Tokens"]:
        """(tokens to train on, the last ones, to validate); UserError if there are too few for a window of each."""
        least = 2 * (step.length + 1)
        if len(self) < least:
            raise UserError(f"token file {self.path} has {len(self)} tokens; at length {step.length} a window to train "
                            f"on and one to validate on take {least}: give more text, a shorter length, or --val")
        cut = len(self) - validation_tokens(len(self), step, rules)
        return self._slice(0, cut), self._slice(cut, len(self))

    def _slice(self, start: int, stop: int) -> "Tokens":
        shards, begin = [], 0
        for shard in self.shards:
            end = begin + len(shard.ids)
            if max(start, begin) < min(stop, end):
                shards.append(shard.slice(max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        return replace(self, shards=tuple(shards))

    def windows(self, length: int) -> int:
        """Number of windows of `length` inputs and their targets; UserError if there is not even one."""
        count = (len(self) - 1) // length
        if count < 1:
            raise UserError(f"token file {self.path} has {len(self)} tokens here; length {length} needs at least "
                            f"{length + 1}")
        return count

    def batch(self, seed: int, step: int, config: StepConfig, world: World = ALONE) -> np.ndarray:
        """The tokens of optimizer step `step`, int32 (accum, batch, length + 1): a pure function of its arguments. `config`
        is a process's part: several take as many each, one after another, of the same windows in the same order.

        Every epoch deals out each window once, in an order of its own; the windows start at an offset of its own too,
        so that the tail which no whole window covers is reached in other epochs.
        """
        length, rows = config.length, config.accum * config.batch
        count = self.windows(length)
        slack = (len(self) - 1) % length
        out = np.empty((rows, length + 1), np.int32)
        for row in range(rows):
            epoch, position = divmod((step * world.size + world.rank) * rows + row, count)
            offset, order = _order(seed, epoch, count, slack)
            start = offset + int(order[position]) * length
            out[row] = self.ids[start:start + length + 1]
        return out.reshape(config.accum, config.batch, length + 1)

    def fixed_batches(self, batch: int, length: int, most: int) -> list[np.ndarray]:
        """Up to `most` windows, spread evenly, in batches, int32 (batch, length + 1), the last one filled up: the same ones
        at every evaluation. UserError if there is no window."""
        count = self.windows(length)
        starts = np.linspace(0, count - 1, min(count, most)).round().astype(int) * length
        return in_batches(np.stack([np.asarray(self.ids[s:s + length + 1]) for s in starts]).astype(np.int32), batch)

    @staticmethod
    def loss_weight(rows: Any) -> int:
        """The number of rows that are not masked: all have equally many targets."""
        return int((rows[:, -1] >= 0).sum())


def in_batches(rows: np.ndarray, batch: int) -> list[np.ndarray]:
    """Rows (count, length + 1) in batches of `batch`. The last is filled up with its own first row, masked (~id): a smaller
    one leaves the allocator other pieces than were measured: 26 sequences between steps of 32 took 0.7% more of an H200."""
    batches = [rows[i:i + batch] for i in range(0, len(rows), batch)]
    first = batches[-1][:1]
    filler = np.where(first < 0, first, ~first)
    batches[-1] = np.concatenate([batches[-1], *[filler] * (batch - len(batches[-1]))])
    return batches


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int, slack: int) -> tuple[int, np.ndarray]:
    """(offset of the first window, up to `slack`; windows in the order in which they are dealt out) in an epoch."""
    random = np.random.default_rng((seed, epoch))
    return int(random.integers(slack + 1)), random.permutation(count)
