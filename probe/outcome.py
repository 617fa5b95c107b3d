"""What a task's process tells the one that started it: how far it is, and how it ended."""

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from probe.records import Measurement

A = TypeVar("A")
"""The answer of a task."""
P = TypeVar("P")
"""The progress that it tells meanwhile."""


@dataclass(frozen=True)
class CellProgress:
    """How far a cell's process is: setting up, or stepping, and what it has measured so far."""

    setting_up: bool = True
    measured: Measurement = field(default_factory=Measurement)


@dataclass(frozen=True)
class Outcome(Generic[A, P]):
    """How a task's process ended. `answer` is what it sent when it was done, `error` the (type, text) of the exception that
    ended it, `killed` why we ended it, `certain` the evidence of a spill that was certain, `resident_bytes` what it held
    when the machine ran out of memory, `exit_code` as the system gave it (negative: a signal), `printed` the end of what it
    printed, `progress` the last that it told, `seconds` how long it ran."""

    answer: A | None = None
    progress: P | None = None
    error: tuple[str, str] | None = None
    killed: Literal["timeout", "spill", "memory", ""] = ""
    certain: str = ""
    resident_bytes: int = 0
    seconds: float = 0.0
    exit_code: int | None = None
    printed: str = ""
