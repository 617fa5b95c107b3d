"""The plan: what to train, how, and what it is expected to take."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.units import is_figure
from trainer.config import ModelConfig, OptimizerConfig, StepConfig, from_fields, refuse_software, refuse_update

SCHEMA = 1
"""1: first version."""

EVAL_BATCHES = 16
"""Most batches of an evaluation, always the same windows."""


def held_back(tokens: int, step: StepConfig) -> int:
    """Tokens at the end of a file of `tokens` that are kept for validation where no other file is given: a hundredth,
    at least one window, and no more than an evaluation reads. At least a whole batch too, unless that is over a tenth: an
    evaluation of 26 sequences between steps of 32 left the allocator 0.7% more memory than was measured."""
    batch = step.batch * step.length
    return max(step.length + 1, min(tokens // 100, EVAL_BATCHES * batch + 1), min(batch + 1, tokens // 10))


def eval_batches(corpus_tokens: int, step: StepConfig) -> int:
    """Batches of an evaluation: what would be held back of a file of `corpus_tokens`, so that evaluations take a few
    hundredths of the run's time however large the data is."""
    return max(1, (held_back(corpus_tokens, step) - 1) // step.length // step.batch)


def is_due(step: int, steps: int, every: int) -> bool:
    """Whether the trainer evaluates (or saves) after `step` finished steps: at every multiple of `every`, 0 among them, and
    at the end."""
    return step % every == 0 or step == steps


def times_due(steps: int, every: int) -> int:
    """How often that is in a run of `steps`, the start counted."""
    return 1 + math.ceil(steps / every)


def _is_forecast(value: object) -> bool:
    """Whether it is a number of 0 or more; a bound that no device comes near leaves room for what is computed from it."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e40


@dataclass(frozen=True)
class Span:
    """A forecast: the middle and the ends of its band."""

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "mid", "high"):
            value = getattr(self, name)
            if not _is_forecast(value):
                raise UserError(f"{name} is {value!r:.40}; it must be a number of 0 or more")
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

    length: int
    rows: int
    pairs: int
    tokens_real: int
    tokens_answer: int
    tokens_padded: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value + (name == "tokens_padded") < 2**48:
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        if self.tokens_real + self.tokens_padded != self.rows * self.length:
            raise UserError(f"{self.tokens_real} real and {self.tokens_padded} padded tokens are not {self.rows} rows of "
                            f"{self.length}")

    def words(self) -> str:
        """In one line for a person."""
        share = self.tokens_padded / (self.rows * self.length)
        return (f"{self.pairs:,} pairs in {self.rows:,} rows of {self.length}: {self.tokens_real:,} real tokens, "
                f"{self.tokens_answer:,} of them answers, and {self.tokens_padded:,} of padding ({share:.0%})")


@dataclass(frozen=True)
class Plan:
    """Written by `plan`, run by `train`; the fields are those of the plan's JSON. `eval` and `checkpoint` are cadences in
    steps, `software` what the pick was measured with, `pairs` the counts of a file of pairs, whose
    `corpus_tokens` are all that an epoch steps over."""

    schema: int
    at: str
    device: str
    model: ModelConfig
    step: StepConfig
    corpus_tokens: int
    epochs: float
    steps: int
    optimizer: OptimizerConfig
    eval: int
    checkpoint: int
    limit_bytes: int
    predicted: Predicted
    why: list
    runners_up: list
    rejected: list
    records_sha256: str
    calibration: dict
    software: dict = dataclasses.field(default_factory=dict)
    pairs: PairCounts | None = None

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
        schema = values.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise UserError(f"schema {schema!r:.40} is newer than this version reads ({SCHEMA}); update spillcliff")
        if schema != SCHEMA:
            raise UserError(f"schema is {schema!r:.40}; this version reads {SCHEMA}. Make the plan again with `plan`")
        values = dict(values)
        for name, kind in (("model", ModelConfig), ("step", StepConfig), ("optimizer", OptimizerConfig)):
            if name in values:
                values[name] = from_fields(kind, values[name], name)
        if "predicted" in values:
            predicted = values["predicted"]
            if not isinstance(predicted, dict):
                raise UserError("predicted must be an object of tok_s, peak_bytes and hours")
            values["predicted"] = from_fields(
                Predicted, {k: from_fields(Span, v, f"predicted {k}") for k, v in predicted.items()
                            if k in ("tok_s", "peak_bytes", "hours")}, "predicted")
        if values.get("pairs") is not None:
            values["pairs"] = from_fields(PairCounts, values["pairs"], "pairs")
        plan = from_fields(cls, values, "it")
        for name in ("corpus_tokens", "steps", "eval", "checkpoint", "limit_bytes"):
            value = getattr(plan, name)
            if not isinstance(value, int) or not is_figure(value, 1):
                raise UserError(f"{name} is {value!r:.40}; it must be a whole number of 1 or more")
        if not is_figure(plan.epochs, 1e-9) or plan.epochs > 1e6:
            raise UserError(f"epochs is {plan.epochs!r:.40}; it must be a number above 0")
        for name, kind, what in (("at", str, "text"), ("device", str, "text"), ("records_sha256", str, "text"),
                                 ("why", list, "a list"), ("runners_up", list, "a list"),
                                 ("rejected", list, "a list"), ("calibration", dict, "an object"),
                                 ("software", dict, "an object")):
            if not isinstance(getattr(plan, name), kind):
                raise UserError(f"{name} is {getattr(plan, name)!r:.60}; it must be {what}")
        if not all(isinstance(line, str) for line in plan.why):
            raise UserError("why must be a list of lines")
        refuse_software(plan.software)
        for name in ("runners_up", "rejected"):
            for item in getattr(plan, name):
                if not isinstance(item, dict):
                    raise UserError(f"{name} must be a list of objects")
                from_fields(StepConfig, item.get("cell"), f"the cell of one of {name}")
        figures = [r.get(name) for r in plan.runners_up for name in ("tok_s", "peak_bytes", "hours_ratio")]
        if not all(value is None or _is_forecast(value) for value in figures):
            raise UserError("runners_up must have numbers of 0 or more for tok_s, peak_bytes and hours_ratio")
        whys = [r.get("why") for r in plan.rejected]
        if not all(isinstance(why, list) and all(isinstance(line, str) for line in why) for why in whys):
            raise UserError("rejected must have a list of lines for each why")
        if not plan.predicted.tok_s.low > 1e-9:
            raise UserError(f"predicted tok_s: low is {plan.predicted.tok_s.low!r}; it must be above 0")
        if refusal := refuse_update(plan.step, plan.optimizer):
            raise UserError(refusal)
        return plan

    def to_json(self) -> dict:
        values = dataclasses.asdict(self)
        values["model"]["parameters"] = self.model.parameters
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def save(self, path: Path | str) -> None:
        write_json(path, self.to_json())

    def other_software(self, now: dict) -> list[str]:
        """What the pick was measured with and `now` has another of, each as "torch 2.10.0 (now 2.11.0)"."""
        return [f"{name} {self.software[name]} (now {now[name]})" for name in ("torch", "cuda", "driver")
                if self.software.get(name) and now.get(name) and self.software[name] != now[name]]
