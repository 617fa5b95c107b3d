"""What is measured: a cell, and a grid of them."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.units import parse_count, parse_ints
from trainer.config import STEP_OPTIONS, VOCAB, ModelConfig, OptimizerConfig, StepConfig, clip_for, update_refusal
from trainer.huggingface.config_json import is_size, models_of

_STEP_FIELDS = tuple(f.name for f in dataclasses.fields(StepConfig))


@dataclass(frozen=True)
class Cell:
    """One point of a grid: a model and the step that it makes. `model` is a size's name, the name of a model whose `shape`
    was read from a config.json, or "package.module:function" of somebody's own step. UserError for values that can't be."""

    model: str
    step: StepConfig
    vocab: int = VOCAB
    shape: ModelConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not schema.is_whole(self.vocab, 1):
            raise UserError(f"cell: model {self.model!r:.40} must be a size's name, and vocab {self.vocab!r:.40} a number")
        if self.shape is not None and (self.shape.name, self.shape.vocab) != (self.model, self.vocab):
            raise UserError(f"cell: shape is that of {self.shape.name} with a vocabulary of {self.shape.vocab}, and not of "
                            f"{self.model} with {self.vocab}")

    @classmethod
    def of(cls, model: str, batch: int, length: int, accum: int = 1, *, vocab: int = VOCAB, shape: ModelConfig | None = None,
           **options: Any) -> "Cell":
        """A cell by its figures; `options` are those of a step, such as its engine."""
        return cls(model, StepConfig(batch, length, accum, **options), vocab, shape)

    @classmethod
    def from_json(cls, values: object) -> "Cell":
        """What `to_json` gave; UserError says what is wrong. Unknown fields are ignored."""
        step, rest = schema.read(StepConfig, values, "cell"), schema.read(_OfModel, values, "cell")
        return cls(rest.model, step, rest.vocab, rest.shape)

    def to_json(self) -> dict[str, Any]:
        """The fields of the model and the step side by side, as records and plans have them."""
        shape = self.shape and dataclasses.asdict(self.shape)
        return {"model": self.model, **dataclasses.asdict(self.step), "vocab": self.vocab, "shape": shape}

    @property
    def batch(self) -> int:
        return self.step.batch

    @property
    def length(self) -> int:
        return self.step.length

    @property
    def accum(self) -> int:
        return self.step.accum

    def with_step(self, **changes: Any) -> "Cell":
        """The same with other figures or options of its step."""
        return dataclasses.replace(self, step=dataclasses.replace(self.step, **changes))

    @property
    def is_custom(self) -> bool:
        """Whether it measures somebody's own step."""
        return ":" in self.model

    @property
    def config(self) -> ModelConfig | None:
        """The model; None for somebody's own step."""
        return None if self.is_custom else self.shape or ModelConfig.named(self.model, self.vocab)

    @cached_property
    def series(self) -> "Cell":
        """What cells that differ in batch and length alone have in common: the one at batch 1 and length 1."""
        return self.with_step(batch=1, length=1)

    @cached_property
    def family(self) -> "Cell":
        """What cells that differ in batch, length and accumulation alone have in common."""
        return self.with_step(batch=1, length=1, accum=1)

    def command_options(self) -> str:
        """What a command line says beside model, batch and length to measure this cell; "" or begins with a blank."""
        told = self.step.unusual() | ({"vocab": self.vocab} if self.vocab != VOCAB else {})
        return "".join(f" --{name} {value}" for name, value in told.items())

    def within(self, other: "Cell") -> bool:
        """Whether `other` needs at least this cell's memory: the same but for a batch, length or accumulation that is
        no smaller (accumulation holds the gradients during the forward pass; above 2 it adds nothing)."""
        return (self.batch <= other.batch and self.length <= other.length
                and min(self.accum, 2) <= min(other.accum, 2) and self.family == other.family)

    def __str__(self) -> str:
        """`"150M B=4 L=512"`, and what is not usual about it."""
        return f"{self.model} {self.step}"


@dataclass(frozen=True)
class _OfModel:
    """A cell's fields in JSON beside those of its step."""

    model: str
    vocab: int = VOCAB
    shape: ModelConfig | None = None


def cell_of(model: ModelConfig, step: StepConfig) -> Cell:
    """The cell that measures a plan's model and step."""
    return Cell(model.name, step, model.vocab, None if is_size(model.name) else model)


def grid(models: Iterable[str | ModelConfig], axes: dict[str, Sequence[Any]], vocab: int = VOCAB) -> list[Cell]:
    """All combinations of the models and of the `axes`, which are fields of a step, smallest first, so that what fits is
    known before what may not is tried. A model is a name, or one with its own shape, and then with its own vocabulary."""
    order: dict[str, int] = {}
    cells = []
    for model in models:
        name, shape, entries = (model, None, vocab) if isinstance(model, str) else (model.name, model, model.vocab)
        order[name] = len(order)
        cells += [Cell(name, StepConfig(**dict(zip(axes, values, strict=True))), entries, shape)
                  for values in itertools.product(*axes.values())]
    options = [f.name for f in STEP_OPTIONS]
    return sorted(cells, key=lambda c: (order[c.model], *(getattr(c.step, name) for name in options), c.accum,
                                        c.step.micro_tokens, c.batch))


def planes(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells in groups that differ in batch and length alone, in order."""
    groups: dict[Cell, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.series, []).append(cell)
    return list(groups.values())


def requested_cells(models: str | None, custom_step: str | None, batches: str, lengths: str, accums: str,
                    options: dict[str, str], vocab: str | None, nproc: int = 1) -> list[Cell]:
    """The grid that a command's options ask for; `batches` are those of each of `nproc` processes, `options` the texts of
    a step's options, each a list. UserError for what can't be, before any device is asked."""
    entries = None if vocab is None else parse_count(vocab, "--vocab")
    axes: dict[str, Sequence[Any]] = {"batch": [b * nproc for b in parse_ints(batches, "--batch")],
                                      "length": parse_ints(lengths, "--length"), "accum": parse_ints(accums, "--accum")}
    axes |= {name: _names(text) for name, text in options.items()}
    cells = grid([custom_step] if custom_step else models_of(_names(models or ""), entries), axes,
                 VOCAB if entries is None else entries)
    if not cells:
        raise UserError(f"--model, {' and '.join(f'--{name}' for name in options)} each need a name")
    if nproc > 1 and (custom_step or any(cell.step.update == "backward" for cell in cells)):
        raise UserError("--nproc shares out a step of ours, which updates after its backward pass: leave --step and "
                        "--update out")
    for cell in cells:
        if custom_step and cell.step.unusual():
            raise UserError("--step has its own engine, recomputation, accumulation and update: leave those options out")
        if refusal := update_refusal(cell.step, OptimizerConfig(1e-5, clip=clip_for(cell.step))):
            raise UserError(f"--update backward: {refusal}")
    return cells


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
