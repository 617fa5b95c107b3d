"""Somebody's own training step, made to look like ours so that it is paced and judged the same way."""

import importlib
import os
import sys
from types import SimpleNamespace

import torch

from probe.cell import Cell
from spillcliff.errors import UserError


def make_step_of(name: str):
    """The function called "package.module:make_step", found from the working folder as well; UserError if there is none.

    `make_step(batch, length, device)` builds a model and its optimizer on a torch.device and returns a callable without
    arguments that does one optimizer step over batch x length tokens.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise UserError(f"--step {name}: {e}; it is package.module:function, found from the folder you are in") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"--step {name}: {module_name} has no function {function_name!r}")
    return function


def check(name: str, report) -> dict:
    make_step_of(name)
    return {}


class AnyStep:
    """A step of make_step's; `step.accum` is 1, since what is within it is its own affair."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.step, self.device = SimpleNamespace(accum=1), device
        self._run = make_step_of(cell.model)(cell.batch, cell.length, device)
        if not callable(self._run):
            raise UserError(f"--step {cell.model} returned {type(self._run).__name__}; it must return a function that does "
                            f"one step")
        self._loss = torch.zeros((), device=device)

    def __call__(self, tokens: None, lr: float, mark) -> tuple[torch.Tensor, None]:
        self._run()
        mark()
        return self._loss, None
