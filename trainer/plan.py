"""The plan: what to train, how, and what it is expected to take."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.hardware.software import same_version
from spillcliff.schema import Number
from spillcliff.units import format_count
from trainer.config import ModelConfig, OptimizerConfig, StepConfig, update_refusal

SCHEMA = 1
"""1: first version."""

EVAL_BATCHES = 16
"""Most batches of an evaluation, always the same windows."""


def validation_tokens(tokens: int, step: StepConfig) -> int:
    """Tokens at the end of a file of `tokens` that are kept for validation where no other file is given: a hundredth,
    at least one window, and no more than an evaluation reads. At least a whole batch too, unless that is over a tenth: an
    evaluation of 26 sequences between steps of 32 left the allocator 0.7% more memory than was measured."""
    batch = step.micro_tokens
    return max(step.length + 1, min(tokens // 100, EVAL_BATCHES * batch + 1), min(batch + 1, tokens // 10))


def eval_batches(corpus_tokens: int, step: StepConfig) -> int:
    """Batches of an evaluation: what would be held back of a file of `corpus_tokens`, so that evaluations take a few
    hundredths of the run's time however large the data is."""
    return max(1, (validation_tokens(corpus_tokens, step) - 1) // step.length // step.batch)


def is_due(step: int, steps: int, every: int) -> bool:
    """Whether the trainer evaluates (or saves) after `step` finished steps: at every multiple of `every`, 0 among them, and
    at the end."""
    return step % every == 0 or step == steps


def times_due(steps: int, every: int) -> int:
    """How often that is in a run of `steps`, the start counted."""
    return 1 + math.ceil(steps / every)


Amount = Annotated[int, Number(1)]
"""A whole number of 1 or more."""
Forecast = Annotated[float, Number(0, 1e40)]
"""A number of 0 or more; no device comes near its bound, which leaves room for what is computed from it."""


@dataclass(frozen=True)
class Span:
    """A forecast: the middle and the ends of its band. UserError if they are not in order."""

    low: Forecast
    mid: Forecast
    high: Forecast

    def __post_init__(self) -> None:
        schema.check(self, "span")
        if not self.low <= self.mid <= self.high:
            raise UserError(f"low, mid and high are {self.low:g}, {self.mid:g} and {self.high:g}; they must be in order")


@dataclass(frozen=True)
class Predicted:
    """Forecasts of throughput, of the process's claim on the device, and of the whole wall-clock."""

    tok_s: Span
    peak_bytes: Span
    hours: Span


@dataclass(frozen=True)
class PairCounts:
    """What a file of prompts and answers holds. Of the rows x length tokens that an epoch steps over, `tokens_padded` are
    padding and `tokens_real` are not, among them `tokens_answer`, which the loss is on; `pairs` were made into rows."""

    length: Amount
    rows: Amount
    pairs: Amount
    tokens_real: Amount
    tokens_answer: Amount
    tokens_padded: Annotated[int, Number()]

    def __post_init__(self) -> None:
        if self.tokens_real + self.tokens_padded != self.rows * self.length:
            raise UserError(f"{self.tokens_real} real and {self.tokens_padded} padded tokens are not {self.rows} rows of "
                            f"{self.length}")

    def words(self) -> str:
        """In one line for a person."""
        share = self.tokens_padded / (self.rows * self.length)
        return (f"{self.pairs:,} pairs in {self.rows:,} rows of {self.length}: {self.tokens_real:,} real tokens, "
                f"{self.tokens_answer:,} of them answers, and {self.tokens_padded:,} of padding ({share:.0%})")


class _OfCell:
    """Something that is said of a cell, which is its record's, with the accumulation that a plan would take."""

    cell: dict

    @cached_property
    def step(self) -> StepConfig:
        return schema.read(StepConfig, self.cell, "cell")


@dataclass(frozen=True)
class RunnerUp(_OfCell):
    """A step that a plan might have taken: its hours are `hours_ratio` times the pick's, and it would save `saves_bytes`
    (cost, below 0)."""

    cell: dict
    tok_s: Forecast | None = None
    peak_bytes: Forecast | None = None
    hours_ratio: Forecast | None = None
    saves_bytes: float | None = None
    hours: Forecast | None = None

    def __post_init__(self) -> None:
        _ = self.step  # whose check is ours


@dataclass(frozen=True)
class Rejected(_OfCell):
    """A measured cell that a plan could not take, and every reason against it."""

    cell: dict
    why: list[str]

    def __post_init__(self) -> None:
        _ = self.step


@dataclass(frozen=True)
class Plan:
    """Written by `plan`, run by `train`; the fields are those of the plan's JSON. `eval` and `checkpoint` are cadences in
    steps, `software` what the pick was measured with, `pairs` the counts of a file of pairs, whose
    `corpus_tokens` are all that an epoch steps over. UserError for values that can't be."""

    schema: int
    at: str
    device: str
    model: ModelConfig
    step: StepConfig
    corpus_tokens: Amount
    epochs: Annotated[float, Number(1e-9, 1e6)]
    steps: Amount
    optimizer: OptimizerConfig
    eval: Amount
    checkpoint: Amount
    limit_bytes: Amount
    predicted: Predicted
    why: list[str]
    runners_up: list[RunnerUp]
    rejected: list[Rejected]
    records_sha256: str
    calibration: dict
    software: dict[str, str | None] = field(default_factory=dict)
    pairs: PairCounts | None = None

    def __post_init__(self) -> None:
        if not self.predicted.tok_s.low > 1e-9:
            raise UserError(f"predicted tok_s: low is {self.predicted.tok_s.low!r}; it must be above 0")
        if refusal := update_refusal(self.step, self.optimizer):
            raise UserError(refusal)

    @classmethod
    def load(cls, path: Path | str) -> "Plan":
        """Reads and checks a plan; UserError with the file, the field and what would be right."""
        values = read_json(path, "plan")
        try:
            return cls.from_json(values)
        except UserError as e:
            raise UserError(f"plan {path}: {e}") from None

    @classmethod
    def from_json(cls, values: dict) -> "Plan":
        """Checks a plan; UserError says what is wrong. Unknown fields are ignored."""
        schema.check_version(values, SCHEMA, ". Make the plan again with `plan`")
        return schema.read(cls, values)

    def to_json(self) -> dict:
        values = dataclasses.asdict(self)
        values["model"]["parameters"] = self.model.parameters
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def save(self, path: Path | str) -> None:
        write_json(path, self.to_json())

    def describe(self) -> str:
        """The plan in one line."""
        s = self.step
        return (f"{self.model.name} ({format_count(self.model.parameters)} parameters), B={s.batch} L={s.length} "
                f"accum={s.accum} {s.engine}/{s.recompute}, {self.steps} steps of {s.tokens} tokens")

    def other_software(self, now: dict[str, str | None]) -> list[str]:
        """What the pick was measured with and `now` has another of, each as "torch 2.10.0 (now 2.11.0)"."""
        return [f"{name} {self.software[name]} (now {now[name]})" for name in ("torch", "cuda", "driver")
                if self.software.get(name) and now.get(name) and not same_version(self.software[name], now[name])]
