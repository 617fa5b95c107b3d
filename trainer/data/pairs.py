"""Files of prompts and answers: one contiguous tensor of rows, all of one length, as the step takes them.

int32, rows x (length + 1). An id on which there is no loss (a prompt's, padding's) is kept as ~id, so that the mask needs no
file of its own and a batch is rows of the file, nothing else. Rows are padded at their end, where causal attention lets
nothing see it. All have the plan's length: a shorter batch would be a step that nobody measured, and a graph has one shape.
"""

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import read_json
from spillcliff.schema import Number
from trainer.config import StepConfig
from trainer.data.shards import CHUNK_IDS
from trainer.data.tokens import in_batches, read_sidecar, sidecar
from trainer.plan import RULES, PairCounts, validation_tokens
from trainer.ranks import ALONE, World

KIND = "pairs"


def counts_of(path: Path | str) -> PairCounts | None:
    """What a file of pairs holds, by its sidecar; None for a file without one, or of another kind. UserError if the sidecar
    is damaged."""
    if not sidecar(path).is_file() or (values := read_json(sidecar(path), "token sidecar")).get("kind") != KIND:
        return None
    return read_sidecar(PairCounts, path, values)


@dataclass(frozen=True)
class PairsSidecar:
    """What else a file of pairs says of itself; its counts are PairCounts."""

    vocab: Annotated[int, Number(1)]
    tokenizer: str | None


@dataclass(frozen=True)
class Pairs:
    """Rows of a file of pairs, (count, length + 1) int32; len() is the tokens that an epoch steps over, padding counted.
    `tokenizer` is the path of the tokenizer.json that made them."""

    rows: np.ndarray
    vocab: int
    path: str
    tokenizer: str | None = None

    @classmethod
    def open(cls, path: Path | str) -> "Pairs":
        """Maps a file for which `counts_of` is not None; UserError if it and its sidecar don't agree."""
        path, values = Path(path), read_json(sidecar(path), "token sidecar")
        counts, facts = read_sidecar(PairCounts, path, values), read_sidecar(PairsSidecar, path, values)
        shape = (counts.rows, counts.length + 1)
        size = path.stat().st_size if path.is_file() else 0
        if size != 4 * shape[0] * shape[1]:
            raise UserError(f"file of pairs {path} has {size} bytes where {sidecar(path).name} says {shape[0]} rows of "
                            f"{shape[1]} ids of 4 bytes ({4 * shape[0] * shape[1]}); make it again")
        rows = np.memmap(path, np.dtype("<i4"), "r", shape=shape)
        return cls(rows, facts.vocab, str(path), facts.tokenizer and str(path.parent / facts.tokenizer))

    @property
    def paths(self) -> list[str]:
        return [self.path]

    @property
    def length(self) -> int:
        return self.rows.shape[1] - 1

    def __len__(self) -> int:
        return len(self.rows) * self.length

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) of pieces that fit in memory."""
        each = max(1, CHUNK_IDS // self.rows.shape[1])
        return ((start, self.rows[start:start + each]) for start in range(0, len(self.rows), each))

    def check(self, vocab: int, keep: bool = True) -> None:
        """Checks every id; UserError naming the first row with one that a model of `vocab` can't take. Nothing is kept."""
        for start, part in self._parts():
            past = ((part ^ (part >> 31)) >= vocab).any(1)
            if past.any():
                raise UserError(f"file of pairs {self.path}: row {start + int(past.argmax())} has an id past the model's "
                                f"vocabulary of {vocab}; plan with --vocab {self.vocab} or more, or tokenize again")

    def checksum(self) -> int:
        """CRC-32 of all rows, which hold the mask too."""
        crc = 0
        for _, part in self._parts():
            crc = zlib.crc32(part.tobytes(), crc)
        return crc

    @functools.cached_property
    def answers(self) -> int:
        """Targets with the loss on them."""
        return sum(self.loss_weight(part) for _, part in self._parts())

    @property
    def answer_share(self) -> float:
        """Of the tokens that an epoch steps over, those that the loss is on."""
        return self.answers / len(self)

    @staticmethod
    def loss_weight(rows: Any) -> int:
        """Targets in rows (count, length + 1), of numpy or torch, that have the loss on them."""
        return int((rows[:, 1:] >= 0).sum())

    def windows(self, length: int) -> int:
        """Number of rows; UserError if they are not of `length`."""
        if length != self.length:
            raise UserError(f"file of pairs {self.path} has rows of {self.length} where the plan's length is {length}: plan "
                            f"with --corpus {self.path}, or tokenize again with --length {length}")
        return len(self.rows)

    def split(self, step: StepConfig, rules: int = RULES) -> tuple["Pairs", "Pairs"]:
        """(rows to train on, the last ones, to validate); UserError for a single row."""
        if self.windows(step.length) < 2:
            raise UserError(f"file of pairs {self.path} has one row; give two or more, or --val")
        cut = len(self.rows) - (validation_tokens(len(self), step, rules) - 1) // step.length
        return (Pairs(self.rows[:cut], self.vocab, self.path, self.tokenizer),
                Pairs(self.rows[cut:], self.vocab, self.path, self.tokenizer))

    def where(self, step: int, config: StepConfig) -> str:
        """Which rows optimizer step `step` reads, for a person."""
        rows = config.accum * config.batch
        epoch, position = divmod(step * rows, len(self.rows))
        return f"rows {position} to {position + rows - 1} of the {len(self.rows)} in epoch {epoch}, as they are dealt"

    def batch(self, seed: int, step: int, config: StepConfig, world: World = ALONE) -> np.ndarray:
        """The rows of optimizer step `step`, int32 (accum, batch, length + 1): a pure function of its arguments, and of
        several processes each one's part, as Tokens.batch has it. Every epoch deals out each row once, in an order of its
        own."""
        rows = config.accum * config.batch
        out = np.empty((rows, self.length + 1), np.int32)
        done = 0
        while done < rows:
            epoch, position = divmod((step * world.size + world.rank) * rows + done, len(self.rows))
            order = _order(seed, epoch, len(self.rows))[position:position + rows - done]
            np.take(self.rows, order, 0, out=out[done:done + len(order)])
            done += len(order)
        return out.reshape(config.accum, config.batch, -1)

    def fixed_batches(self, batch: int, length: int, most: int) -> list[np.ndarray]:
        """Up to `most` rows, spread evenly, in batches, int32 (batch, length + 1), the last one filled up: the same ones at
        every evaluation."""
        wanted = min(self.windows(length), most)
        return in_batches(self.rows[np.linspace(0, len(self.rows) - 1, wanted).round().astype(int)], batch)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The rows in the order in which an epoch deals them out."""
    return np.random.default_rng((seed, epoch)).permutation(count)
