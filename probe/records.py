"""Records of measured cells: the schema, appended to and read from JSON lines."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from probe.cell import Cell
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import Line, Say, append_line, ignore, parse_lines, read_lines
from spillcliff.hardware.device import THROTTLED
from spillcliff.hardware.energy import LEAST_S
from spillcliff.schema import Number
from trainer.config import ModelConfig

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
"""1: first version."""

Seconds = Annotated[float, Number()]
StepSeconds = Annotated[float, Number(1e-7)]
"""No step is shorter: a kernel's launch alone takes some microseconds."""
READINGS = ("clock_mhz", "temperature_c", "power_w", "utilization", "throttle")


class Status(StrEnum):
    """What came of an attempt to run a cell."""

    FITS = "fits"
    THRASHES = "thrashes"
    SPILLS = "spills"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    CONTENDED = "contended"


WANT_OF_MEMORY = frozenset({Status.OOM, Status.SPILLS, Status.THRASHES})
"""What ended so needs more memory than there is, and so does every larger cell."""
BEYOND = WANT_OF_MEMORY | {Status.TIMEOUT}
"""For want of memory or time, so that a larger cell fails too; crashed and contended say nothing of another cell."""
UNDECIDED = frozenset({Status.TIMEOUT, Status.CRASHED, Status.CONTENDED})
"""Verdicts that say nothing lasting of a cell: a grid that is started again measures it again."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of a cell, to its end or as far as its process came. Times are raw seconds, sizes bytes, None where
    a platform can't tell.

    `micro_s` is one forward and backward pass, `optimizer_s` clip and update, `eval_s` one forward pass without gradients,
    `setup_s` what comes before the first steady step (weights, first kernels), `start_up_s` Python and its libraries.
    `non_local_growth_bytes` is what moved to system memory while it ran, `timed_retries` how often the allocator had to free
    its cache and ask again during timed steps, `alloc_retries` in all. `energy_j` is what the card took over the timed steps
    (of several together, one of them). `readings` are the card's own (READINGS), and under
    "others" what other programs did meanwhile.
    """

    warmup_s: tuple[StepSeconds, ...] = ()
    step_s: tuple[StepSeconds, ...] = ()
    micro_s: Annotated[float | None, Number()] = None
    optimizer_s: Annotated[float | None, Number()] = None
    eval_s: Annotated[float | None, Number()] = None
    setup_s: Annotated[float | None, Number()] = None
    start_up_s: Annotated[float | None, Number()] = None
    allocated_peak_bytes: Annotated[int | None, Number()] = None
    reserved_peak_bytes: Annotated[int | None, Number()] = None
    device_peak_bytes: Annotated[int | None, Number()] = None
    free_at_start_bytes: Annotated[int | None, Number()] = None
    non_local_growth_bytes: Annotated[int | None, Number(-schema.MOST)] = None
    alloc_retries: int = 0
    timed_retries: int = 0
    energy_j: Annotated[float | None, Number()] = None
    readings: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def median_step_s(self) -> float | None:
        return median(self.step_s) if self.step_s else None

    @property
    def peak_bytes(self) -> int | None:
        """The device figure, or the next best that the platform has."""
        for value in (self.device_peak_bytes, self.reserved_peak_bytes, self.allocated_peak_bytes):
            if value is not None:
                return value
        return None

    @property
    def clock_mhz(self) -> float | None:
        return self.readings.get("clock_mhz")

    @property
    def power_w(self) -> float | None:
        """What the card drew during the timed steps; in old records, which have no energy, its reading at the end of a load
        that was long enough for one. None where that can't be told."""
        if self.energy_j and self.step_s:
            return self.energy_j / sum(self.step_s)
        power = self.readings.get("power_w")
        is_long = sum(self.warmup_s) + sum(self.step_s) >= LEAST_S
        return float(power) if is_long and schema.is_number(power, 1e-9) else None

    @property
    def throttle_bits(self) -> int:
        """The bits that mean a throttle."""
        return int(self.readings.get("throttle") or 0) & THROTTLED


def measured_fields(measured: Measurement) -> dict[str, Any]:
    """Every field of it, for a record."""
    return {f.name: getattr(measured, f.name) for f in dataclasses.fields(measured)}


@dataclass(frozen=True, kw_only=True)
class Record(Measurement):
    """One measured cell and the verdict on it: `why` is one line for anything but fits, else "".

    `cell_s` is the whole time that the cell took of its grid, `on_battery` whether the machine was on battery then,
    `predicted_bytes` the peak that was estimated beforehand (of the whole claim, as peak_bytes). `model` is None for
    somebody's own step.
    """

    schema: int = SCHEMA
    at: str
    cell: Cell
    model: ModelConfig | None
    status: Status
    device: str
    why: str = ""
    software: dict[str, str | None] = field(default_factory=dict)
    cell_s: Annotated[float | None, Number()] = None
    on_battery: bool = False
    predicted_bytes: Annotated[int | None, Number()] = None

    @cached_property
    def tok_s(self) -> float:
        """batch x length x accum / median(step_s); 0 without a timed step."""
        return self.cell.step.tokens / self.median_step_s if self.median_step_s else 0.0

    @property
    def fits(self) -> bool:
        return self.status is Status.FITS

    @classmethod
    def from_json(cls, values: object) -> "Record":
        """Checks one record; UserError says what is wrong. Unknown fields are ignored."""
        if not isinstance(values, dict):
            raise UserError("a record must be a JSON object")
        schema.check_version(values, SCHEMA)
        cell = Cell.from_json(values.get("cell"))
        if cell.config is None:
            values = values | {"model": None}
        elif values.get("model") is None:
            raise UserError("model must be a JSON object")
        record = schema.read(cls, values | {"cell": cell}, "the record")
        if record.fits and not record.step_s:
            raise UserError("a cell that fits must have step_s, at least one time")
        if not all(schema.is_number(record.readings[name], -300) for name in READINGS
                   if record.readings.get(name) is not None):
            raise UserError(f"readings must be a JSON object whose values are numbers ({', '.join(READINGS)})")
        return record

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self) | {"cell": self.cell.to_json()}
        if self.model:
            values["model"]["parameters"] = self.model.parameters
        return values


_DEVICE = b'"device": "'
"""Before a record's device, as `append` writes it; within a text the quotes would be escaped."""


def load(path: Path | str, say: Say = ignore) -> list[Record]:
    """The records of a file, oldest first. A torn last line (a process killed while writing) is named by `say` and left
    out; any other damage is a UserError with file and line."""
    return _parse(path, read_lines(path, "records"), say)


def _parse(path: Path | str, lines: Iterable[Line], say: Say = ignore) -> list[Record]:
    return parse_lines(path, "records", lines, Record.from_json, say)


def lines_by_device(path: Path | str) -> dict[str, list[Line]]:
    """A file's lines, unread but for the device of each: of 100,000 a plan needs those of one device, and to read them all
    takes 6 s. Under "" those whose device can't be told so, since somebody else wrote them."""
    groups: dict[bytes, list[Line]] = {}
    for line in read_lines(path, "records"):
        start = line.text.find(_DEVICE) + len(_DEVICE)
        end = line.text.find(b'"', start)
        name = line.text[start:end] if start >= len(_DEVICE) and end > 0 else b""
        groups.setdefault(name, []).append(line)
    return {name.decode(errors="replace"): lines for name, lines in groups.items()}


def of_device(paths: Iterable[Path], choose: Callable[[list[str]], str], say: Say = ignore) -> list[Record]:
    """The records of the one device that `choose` takes of all that the files have."""
    groups = [(path, lines_by_device(path)) for path in paths]
    names = [name for path, group in groups
             for name in (*(n for n in group if n), *(r.device for r in _parse(path, group.get("", []))))]
    if not names:
        return []
    chosen = choose(list(dict.fromkeys(names)))
    records = []
    for path, group in groups:
        lines = sorted([*group.get(chosen, []), *group.get("", [])], key=lambda line: line.number)
        records += [r for r in _parse(path, lines, say) if r.device == chosen]
    return records


def append(path: Path, record: Record) -> None:
    """Adds one line, on disk when this returns."""
    append_line(path, record.to_json())


def latest(records: Iterable[Record]) -> dict[tuple[str, Cell], Record]:
    """The newest record of each (device, cell); records come oldest first."""
    return {(r.device, r.cell): r for r in records}


def digest(records: Iterable[Record]) -> str:
    """SHA-256 that tells these records from others, whatever their order. Fields at their default are left out, so that one
    which a later version adds changes nothing."""
    lines = [json.dumps(_unusual(record), sort_keys=True, separators=(",", ":")) for record in records]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _unusual(value: Any) -> Any:
    """A dataclass's fields that are not at their defaults, and those of the dataclasses in them."""
    if not dataclasses.is_dataclass(value):
        return value
    usual: dict[str, Any] = _defaults(type(value))  # type: ignore[arg-type]  # a class can be hashed
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: _unusual(own) for name, own in fields.items() if name not in usual or own != usual[name]}


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            defaults[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            defaults[f.name] = f.default_factory()
    return defaults


def frame(records: Iterable[Record]) -> "pandas.DataFrame":
    """The records as a pandas frame, a row each, with tok_s, step_s (median) and peak_bytes worked out."""
    import pandas

    return pandas.DataFrame([{name: value for name, value in r.cell.to_json().items() if name != "shape"} | {
        "status": str(r.status), "why": r.why, "device": r.device, "tok_s": r.tok_s if r.step_s else None,
        "step_s": r.median_step_s, "peak_bytes": r.peak_bytes, "allocated_peak_bytes": r.allocated_peak_bytes,
        "reserved_peak_bytes": r.reserved_peak_bytes, "energy_j": r.energy_j,
        "on_battery": r.on_battery, "at": r.at} for r in records])
