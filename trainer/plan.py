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

RULES = 2
"""What a plan leaves to be worked out by the trainer. 1: plans of 0.1.0, which hold back by the batch and repeat the peak
rate; a run that was started so goes on so. 2: since."""
EVAL_TOKENS = 32_768
"""Most tokens of an evaluation: 64 windows of 512, some 5 s of every quarter of an hour on a GTX 1060."""
EVAL_WINDOWS = 16
"""Windows of an evaluation that a hundredth of the data may not have, but a tenth has."""
BATCHES_BEFORE = 16
"""Most batches of an evaluation under rules 1."""


def validation_tokens(tokens: int, step: StepConfig, rules: int = RULES) -> int:
    """Tokens at the end of a file of `tokens` that are kept for validation where no other file is given: a hundredth, no
    more than an evaluation reads, and EVAL_WINDOWS windows at least unless they are over a tenth; one window at the very
    least. The same whatever the batch."""
    if rules == 1:
        return _validation_tokens_before(tokens, step)
    least = min(EVAL_WINDOWS * step.length + 1, tokens // 10)
    return max(step.length + 1, min(tokens // 100, EVAL_TOKENS + 1), least)


def _validation_tokens_before(tokens: int, step: StepConfig) -> int:
    """A hundredth, at least one window, and no more than BATCHES_BEFORE; at least a whole batch too, unless that is over a
    tenth."""
    batch = step.micro_tokens
    return max(step.length + 1, min(tokens // 100, BATCHES_BEFORE * batch + 1), min(batch + 1, tokens // 10))


def eval_windows(corpus_tokens: int, step: StepConfig, rules: int = RULES) -> int:
    """Windows of an evaluation: what would be held back of a file of `corpus_tokens`, so that evaluations take a few
    hundredths of the run's time however large the data is. Under rules 1 whole batches of them, or less than one."""
    count = (validation_tokens(corpus_tokens, step, rules) - 1) // step.length
    return count if rules > 1 or count < step.batch else count - count % step.batch


def eval_batches(corpus_tokens: int, step: StepConfig) -> int:
    """Batches of an evaluation, the last one filled up."""
    return -(-eval_windows(corpus_tokens, step) // step.batch)


def training_windows(tokens: int, step: StepConfig, are_pairs: bool = False) -> int:
    """Sequences of a step's length that a file of `tokens` has to train on, its last ones held back; 0 if there is none.
    Pairs are whole rows, where of other tokens a window's last target is one more."""
    held = validation_tokens(tokens, step)
    if are_pairs:
        return tokens // step.length - (held - 1) // step.length
    return max(0, (tokens - held - 1) // step.length)


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
class SmallerStep:
    """The same step in smaller micro-steps, which needs less memory than the planned one by measurement or estimate."""

    batch: Amount
    accum: Amount
    peak_bytes: Forecast


@dataclass(frozen=True)
class Plan:
    """Written by `plan`, run by `train`; the fields are those of the plan's JSON. `eval` and `checkpoint` are cadences in
    steps, `software` what the pick was measured with, `pairs` the counts of a file of pairs, whose
    `corpus_tokens` are all that an epoch steps over; `rules` is RULES when it was made; `smaller_steps` are those that a
    run may go on with where memory spills. UserError for values that can't be."""

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
    rules: Annotated[int, Number(1, RULES + 1)] = RULES
    smaller_steps: list[SmallerStep] = field(default_factory=list)

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
        return schema.read(cls, {"rules": 1} | values)

    def to_json(self) -> dict:
        values = dataclasses.asdict(self)
        values["model"]["parameters"] = self.model.parameters
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def save(self, path: Path | str) -> None:
        write_json(path, self.to_json())

    def needs_less(self, batch: int) -> bool:
        """Whether micro-steps of a smaller `batch` need less memory than the planned ones. Where the plan doesn't say (it is
        an older one) they do if it accumulates already, and so holds the gradients during the forward pass as they would."""
        if self.smaller_steps:
            return any(s.batch == batch for s in self.smaller_steps)
        return self.step.accum > 1

    def lr_at(self, step: int) -> float:
        """Learning rate of step `step`, from 0."""
        return self.optimizer.lr_at(step, self.steps, repeats_peak=self.rules == 1)

    def describe(self) -> str:
        """The plan in one line."""
        s = self.step
        return (f"{self.model.name} ({format_count(self.model.parameters)} parameters), B={s.batch} L={s.length} "
                f"accum={s.accum} {s.engine}/{s.recompute}, {self.steps} steps of {s.tokens} tokens")

    def other_software(self, now: dict[str, str | None]) -> list[str]:
        """What the pick was measured with and `now` has another of, each as "torch 2.10.0 (now 2.11.0)"."""
        return [f"{name} {self.software[name]} (now {now[name]})" for name in ("torch", "cuda", "driver")
                if self.software.get(name) and now.get(name) and not same_version(self.software[name], now[name])]
