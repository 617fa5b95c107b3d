"""All that is done in a process of its own: each task with its arguments, its answer and the progress that it tells. The
functions behind them are imported where they run, since torch must not be imported here."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from probe.cell import Cell
from probe.outcome import CellProgress
from probe.records import Measurement
from probe.soak import Window
from probe.verdict import Card
from spillcliff.hardware.device import DeviceFacts
from trainer.config import ModelConfig

A = TypeVar("A")
P = TypeVar("P")


class Task(Generic[A, P]):
    """Something to be done in a fresh process, where it is sent to: its fields must be picklable. Its answer is never
    None."""

    @abstractmethod
    def run(self, send: Callable[[P], None]) -> A:
        """Does it and returns the answer; `send` takes the progress."""


class Description(NamedTuple):
    """What a device is, and bytes per second that a disk takes of a checkpoint (None where it can't be written)."""

    facts: DeviceFacts
    disk_write_bytes_s: float | None


class CopyRates(NamedTuple):
    """Bytes per second from a card to host memory, as a checkpoint begins: into memory that is new to the process, and into
    the same again."""

    first_copy_bytes_s: float
    copy_bytes_s: float


class SoakProgress(NamedTuple):
    """The windows of a soak so far, and whether its speed has settled."""

    windows: tuple[Window, ...]
    settled: bool = False


class ScanAnswer(NamedTuple):
    """The fields of a Cliff that were measured; see there."""

    kind: str
    fast_bytes: int
    bad_bytes: int | None
    context_bytes: int
    free_at_start_bytes: int
    fast_bytes_s: float
    slow_bytes_s: float | None
    seconds: float


@dataclass(frozen=True)
class DescribeDevice(Task[Description, None]):
    """Of the device called `name`, and the disk of `folder`."""

    name: str | None
    folder: Path

    def run(self, send: Callable[[None], None]) -> Description:
        from probe.tasks.describe_device import describe

        return describe(self.name, self.folder)


@dataclass(frozen=True)
class TimeStartUp(Task[float, None]):
    """Seconds of starting Python and importing what a run does, for a process that is started anew."""

    def run(self, send: Callable[[None], None]) -> float:
        from probe.tasks.describe_device import start_up_s

        return start_up_s()


@dataclass(frozen=True)
class TimeCopies(Task[CopyRates, None]):
    """Of the card called `name`."""

    name: str

    def run(self, send: Callable[[None], None]) -> CopyRates:
        from probe.tasks.describe_device import time_copies

        return time_copies(self.name)


@dataclass(frozen=True)
class ScanMemory(Task[ScanAnswer, int]):
    """Takes the memory of the CUDA card `name` block by block; tells the bytes that it holds."""

    name: str
    uuid: str

    def run(self, send: Callable[[int], None]) -> ScanAnswer:
        from probe.tasks.memory_scan import scan_card

        return scan_card(self.name, self.uuid, send)


@dataclass(frozen=True)
class CheckCustomStep(Task[bool, None]):
    """True if `name` is somebody's own step that can be imported, else UserError."""

    name: str

    def run(self, send: Callable[[None], None]) -> bool:
        from probe.tasks.custom_step import load_make_step

        return callable(load_make_step(self.name))


@dataclass(frozen=True)
class MeasureCell(Task[Measurement, CellProgress]):
    """Runs the step that trains until its time is known, for about `seconds`. `slow_s` are seconds of a step beyond which it
    shows a spill, None where that is not known."""

    cell: Cell
    device: str
    uuid: str
    seconds: float
    card: Card
    slow_s: float | None = None

    def run(self, send: Callable[[CellProgress], None]) -> Measurement:
        from probe.tasks.measure_cell import measure_cell

        return measure_cell(self, send)


@dataclass(frozen=True)
class MeasureDistributed(Task[Measurement, CellProgress]):
    """The same by the several devices that are called `group`, each with its part of the step."""

    cell: Cell
    device: str
    seconds: float
    group: str

    def run(self, send: Callable[[CellProgress], None]) -> Measurement:
        from probe.tasks.measure_distributed import measure_distributed

        return measure_distributed(self, send)


@dataclass(frozen=True)
class RunSoak(Task[SoakProgress, SoakProgress]):
    """Runs a step for `seconds`, or until its speed has settled."""

    model: ModelConfig
    cell: Cell
    device: str
    uuid: str
    seconds: float

    def run(self, send: Callable[[SoakProgress], None]) -> SoakProgress:
        from probe.tasks.run_soak import run_soak

        return run_soak(self, send)
