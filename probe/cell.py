"""What is measured: a cell, and a grid of them."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from spillcliff.errors import UserError
from spillcliff.units import parse_count, parse_ints
from trainer.config import VOCAB, ModelConfig, OptimizerConfig, StepConfig, clip_for, from_fields, refuse_update
from trainer.huggingface.config_json import is_size, of_texts


@dataclass(frozen=True)
class Cell:
    """One point of a grid; `model` is a size's name, the name of a model whose `shape` was read from a config.json, or
    "package.module:function" of somebody's own step. UserError for values that can't be."""

    model: str
    batch: int
    length: int
    accum: int = 1
    engine: str = "eager"
    recompute: str = "none"
    vocab: int = VOCAB
    update: str = "after"
    shape: ModelConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (ModelConfig, type(None))):  # of a record
            object.__setattr__(self, "shape", from_fields(ModelConfig, self.shape, "cell: shape"))
        if not isinstance(self.model, str) or type(self.vocab) is not int or self.vocab < 1:
            raise UserError(f"cell: model {self.model!r:.40} must be a size's name, and vocab {self.vocab!r:.40} a number")
        if self.shape is not None and (self.shape.name, self.shape.vocab) != (self.model, self.vocab):
            raise UserError(f"cell: shape is that of {self.shape.name} with a vocabulary of {self.shape.vocab}, and not of "
                            f"{self.model} with {self.vocab}")
        _ = self.step  # whose check is ours

    @cached_property
    def step(self) -> StepConfig:
        return StepConfig(self.batch, self.length, self.accum, self.engine, self.recompute, self.update)

    @property
    def is_foreign(self) -> bool:
        return ":" in self.model

    @property
    def series(self) -> tuple:
        """Cells that differ in the batch alone have this in common."""
        return self.model, self.vocab, self.length, self.accum, self.engine, self.recompute, self.update

    def options(self) -> str:
        """What a command line says beside model, batch and length to measure this cell; "" or begins with a blank."""
        told = (("engine", "eager"), ("recompute", "none"), ("vocab", VOCAB), ("update", "after"), ("accum", 1))
        return "".join(f" --{name} {getattr(self, name)}" for name, usual in told if getattr(self, name) != usual)

    def within(self, other: "Cell") -> bool:
        """Whether `other` needs at least this cell's memory: the same but for a batch, length or accumulation that is
        no smaller (accumulation holds the gradients during the forward pass; above 2 it adds nothing)."""
        return ((self.model, self.vocab, self.engine, self.recompute, self.update)
                == (other.model, other.vocab, other.engine, other.recompute, other.update)
                and self.batch <= other.batch and self.length <= other.length
                and min(self.accum, 2) <= min(other.accum, 2))


def cell_of(model: ModelConfig, step: StepConfig) -> Cell:
    """The cell that measures a plan's model and step."""
    return Cell(model.name, step.batch, step.length, step.accum, step.engine, step.recompute, model.vocab, step.update,
                None if is_size(model.name) else model)


def grid(models: Iterable[str | ModelConfig], batches, lengths, accums, engines, recomputes, vocab: int,
         update: str = "after") -> list[Cell]:
    """All combinations, smallest first, so that what fits is known before what may not is tried. A model is a name, or one
    with its own shape, and then with its own vocabulary."""
    axes = list(itertools.product(batches, lengths, accums, engines, recomputes))
    order, cells = {}, []
    for model in models:
        name, shape, entries = (model, None, vocab) if isinstance(model, str) else (model.name, model, model.vocab)
        order[name] = len(order)
        cells += [Cell(name, *values, entries, update, shape) for values in axes]
    return sorted(cells, key=lambda c: (order[c.model], c.engine, c.recompute, c.accum, c.batch * c.length, c.batch))


def planes(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells in groups that differ in batch and length alone, in order."""
    found: dict[tuple, list[Cell]] = {}
    for c in cells:
        found.setdefault((c.model, c.vocab, c.accum, c.engine, c.recompute, c.update), []).append(c)
    return list(found.values())


def shape(cell: Cell) -> ModelConfig | None:
    """The model of a cell; None for somebody's own step."""
    return None if cell.is_foreign else cell.shape or ModelConfig.named(cell.model, cell.vocab)


def asked_cells(models: str | None, step: str | None, batches: str, lengths: str, accums: str, engines: str,
                recomputes: str, vocab: str | None, update: str, nproc: int = 1) -> list[Cell]:
    """The grid that a command's options ask for; `batches` are those of each of `nproc` processes. UserError for what can't
    be, before any device is asked."""
    entries = None if vocab is None else parse_count(vocab, "--vocab")
    cells = grid([step] if step else of_texts(_names(models), entries),
                 [b * nproc for b in parse_ints(batches, "--batch")], parse_ints(lengths, "--length"),
                 parse_ints(accums, "--accum"), _names(engines), _names(recomputes),
                 VOCAB if entries is None else entries, update)
    if not cells:
        raise UserError("--model, --engine and --recompute each need a name")
    if nproc > 1 and (step or update == "backward"):
        raise UserError("--nproc shares out a step of ours, which updates after its backward pass: leave --step and "
                        "--update out")
    for cell in cells:
        if step and cell.step != Cell(cell.model, cell.batch, cell.length).step:
            raise UserError("--step has its own engine, recomputation, accumulation and update: leave those options out")
        if refusal := refuse_update(cell.step, OptimizerConfig(1e-5, clip=clip_for(cell.step))):
            raise UserError(f"--update backward: {refusal}")
    return cells


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
