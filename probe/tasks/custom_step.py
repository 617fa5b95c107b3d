"""Somebody's own training step, made to look like ours so that it is timed and judged the same way."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from probe.cell import Cell
from spillcliff.errors import UserError

OUR_PACKAGES = ("spillcliff", "trainer", "probe", "planner")

_theirs: dict[str, ModuleType] = {}
"""The user's modules that are called like ours, while ours are in sys.modules."""


def _is_of(name: str, packages: tuple[str, ...]) -> bool:
    return name.partition(".")[0] in packages


def _clashing() -> tuple[str, ...]:
    """Which of our packages' names the folder that the user is in has for a module or a package of its own."""
    here = Path.cwd()
    return tuple(name for name in OUR_PACKAGES
                 if (here / f"{name}.py").is_file() or (here / name / "__init__.py").is_file())


@contextlib.contextmanager
def users_modules(clashing: tuple[str, ...]) -> Iterator[None]:
    """Inside, `import trainer` means the user's own trainer.py, where there is one, and outside ours."""
    if not clashing:
        yield
        return
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_of(name, clashing)}
    sys.modules.update(_theirs)
    try:
        yield
    finally:
        _theirs.update({name: sys.modules.pop(name) for name in list(sys.modules) if _is_of(name, clashing)})
        sys.modules.update(ours)


def load_make_step(name: str) -> Callable[..., Any]:
    """The function called "package.module:make_step", looked for in the working folder first; UserError if there is none.

    `make_step(batch, length, device)` builds a model and its optimizer on a torch.device and returns a callable without
    arguments that does one optimizer step over batch x length tokens.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with users_modules(_clashing()):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise UserError(f"--step {name}: {e}; it is package.module:function, looked for from the folder you are "
                        f"in") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"--step {name}: {module_name} has no function {function_name!r}")
    return function


class CustomStep:
    """A step of make_step's; `accum` is 1, since what is within it is its own affair. UserError for one that is none."""

    accum = 1

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.device, self._clashing = device, _clashing()
        make_step = load_make_step(cell.model)
        with users_modules(self._clashing):
            self._run = make_step(cell.batch, cell.length, device)
        if not callable(self._run):
            raise UserError(f"--step {cell.model} returned {type(self._run).__name__}; it must return a function that does "
                            f"one step")
        self._loss = torch.zeros((), device=device)

    def __call__(self, tokens: None, lr: float, mark: Callable[[], None]) -> tuple[torch.Tensor, None]:
        with users_modules(self._clashing):
            self._run()
        mark()
        return self._loss, None
