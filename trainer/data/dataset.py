"""What a run trains and validates on: the two kinds of data by one protocol, the part held back to validate, and whether
they are still the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore
from trainer.config import StepConfig
from trainer.data.formats import open_tokens
from trainer.data.pairs import Pairs, counts_of
from trainer.plan import RULES, Plan
from trainer.ranks import World


class Dataset(Protocol):
    """Token ids as the step takes them: Tokens, or Pairs of prompts and answers. len() is the number of tokens that an epoch
    steps over."""

    @property
    def vocab(self) -> int | None: ...

    @property
    def path(self) -> str: ...

    @property
    def tokenizer(self) -> str | None:
        """The path of the tokenizer.json that made them, if known."""

    @property
    def paths(self) -> list[str]:
        """The files that are read."""

    @property
    def answer_share(self) -> float | None:
        """Of the tokens that an epoch steps over, those that the loss is on; None where it is on all."""

    def __len__(self) -> int: ...

    def check(self, vocab: int, keep: bool = True) -> None:
        """Checks every id; UserError naming the first that a model of `vocab` has no row for. `keep` lets it write down the
        result beside the file."""

    def checksum(self) -> int:
        """CRC-32 of all ids."""

    def windows(self, length: int) -> int:
        """How many sequences of `length` there are; UserError if there is none."""

    def split(self, step: StepConfig, rules: int = RULES) -> tuple[Self, Self]:
        """(what to train on, what is held back to validate, by a plan's `rules`); UserError if there is too little for
        both."""

    def where(self, step: int, config: StepConfig) -> str:
        """Which sequences optimizer step `step` reads, for a person."""

    def batch(self, seed: int, step: int, config: StepConfig, world: World) -> np.ndarray:
        """The ids of optimizer step `step`, int32 (accum, batch, length + 1): a pure function of its arguments."""

    def fixed_batches(self, batch: int, length: int, most: int) -> list[np.ndarray]:
        """Up to `most` windows in batches, int32 (batch, length + 1), the same ones at every evaluation. The last batch is
        filled up with copies that are masked as a whole, so that all are of one shape."""

    def loss_weight(self, rows: object) -> int:
        """What the mean loss of some rows, (count, length + 1) of numpy or torch, weighs in the mean over all."""


def open_data(plan: Plan, data: Sequence[Path], val: Sequence[Path] = (), keep: bool = True, dtype: str | None = None,
              column: str | None = None, say: Say = ignore) -> tuple[Dataset, Dataset]:
    """Training and validation data, every id checked against the plan's vocabulary. Without `val`, the last hundredth of the
    data (at least one window, at most what an evaluation reads) is held back for it. UserError if they don't suit the plan
    or each other. `keep` is Dataset.check's; `dtype`, `column` and `say` are open_tokens'."""
    length = plan.step.length
    training = _open(data, plan.model.vocab, keep, dtype, column, say)
    if val:
        validation = _open(val, plan.model.vocab, keep, dtype, column, say)
        if type(validation) is not type(training):
            raise UserError(f"{training.path} and {validation.path}: one is of pairs and the other is not; make both with "
                            f"`train tokenize --pairs`, or neither")
        train_files, val_files = ({str(Path(path).resolve()) for path in d.paths} for d in (training, validation))
        if both := sorted(train_files & val_files):
            raise UserError(f"token file {both[0]} is in both --data and --val; what is validated on must not be trained on")
    else:
        training, validation = training.split(plan.step, plan.rules)
    training.windows(length)
    validation.windows(length)
    return training, validation


def _open(paths: Sequence[Path], vocab: int, keep: bool, dtype: str | None, column: str | None, say: Say) -> Dataset:
    pairs_path = next((path for path in paths if counts_of(path)), None)
    if pairs_path and len(paths) > 1:
        raise UserError(f"file of pairs {pairs_path} must be the only file; `train tokenize --pairs` makes one of several "
                        f"JSONL files")
    data: Dataset = Pairs.open(pairs_path) if pairs_path else open_tokens(paths, vocab, dtype, column, say)
    data.check(vocab, keep)
    return data


def identity(data: Dataset) -> dict:
    """What tells one run of tokens from another: how many, of which vocabulary, and a checksum over all of them, the mask
    included."""
    answers = {"answers": data.answers} if isinstance(data, Pairs) else {}
    return {"tokens": len(data), "vocab": data.vocab, "crc32": data.checksum(), **answers}


def changes(before: dict | None, now: dict) -> str:
    """In which data two objects of `identity` values by part ("training", "validation") differ, in words; "" if in none."""
    lines = []
    for part, values in (before or {}).items():
        differ = [f"{name} {value!r:.40} -> {now[part].get(name)}" for name, value in values.items()
                  if now[part].get(name) != value]
        if differ:
            lines.append(f"{part} {', '.join(differ)}")
    return "; ".join(lines)
