"""Records of measured cells: the schema, appended to and read from JSON lines."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from probe.cell import Cell, shape
from spillcliff import jsonl
from spillcliff.errors import UserError
from spillcliff.units import is_figure
from trainer.config import ModelConfig, from_fields, refuse_software

SCHEMA = 1
"""1: first version."""

SHORTEST_S = 1e-7
"""No step is shorter: a kernel's launch alone takes some microseconds."""
READINGS = ("clock_mhz", "temperature_c", "power_w", "utilization", "throttle")
STATUSES = ("fits", "thrashes", "spills", "oom", "timeout", "crashed", "contended")


@dataclass(frozen=True)
class Record:
    """One measured cell. Times are raw seconds, sizes bytes, None where a platform cannot tell.

    Beyond the contract's fields: `eval_s` is one forward pass without gradients, `setup_s` what comes before the first
    steady step (weights, first kernels), `cell_s` the whole time that the cell took of its grid,
    `predicted_bytes` the peak that was estimated beforehand (of the whole claim, as peak_bytes). `model` is None for
    somebody's own step.
    """

    schema: int
    at: str
    cell: Cell
    model: ModelConfig | None
    status: str
    device: str
    why: str = ""
    software: dict = field(default_factory=dict)
    warmup_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    micro_s: float | None = None
    optimizer_s: float | None = None
    eval_s: float | None = None
    setup_s: float | None = None
    cell_s: float | None = None
    predicted_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    free_at_start_bytes: int | None = None
    alloc_retries: int = 0
    readings: dict = field(default_factory=dict)

    @cached_property
    def median_step_s(self) -> float | None:
        return median(self.step_s) if self.step_s else None

    @cached_property
    def tok_s(self) -> float | None:
        """batch x length x accum / median(step_s)."""
        return self.cell.step.tokens / self.median_step_s if self.step_s else None

    @property
    def peak_bytes(self) -> int | None:
        """The device figure, or the next best that the platform has."""
        for value in (self.device_peak_bytes, self.reserved_peak_bytes, self.allocated_peak_bytes):
            if value is not None:
                return value
        return None

    @classmethod
    def from_json(cls, values: object) -> "Record":
        """Checks one record; UserError says what is wrong. Unknown fields are ignored."""
        if not isinstance(values, dict):
            raise UserError("a record must be a JSON object")
        schema = values.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise UserError(f"schema {schema!r:.40} is newer than this version reads ({SCHEMA}); update spillcliff")
        if schema != SCHEMA:
            raise UserError(f"schema is {schema!r:.40}; this version reads {SCHEMA}")
        values = dict(values)
        values["cell"] = from_fields(Cell, values.get("cell"), "cell")
        is_ours = shape(values["cell"]) is not None
        values["model"] = from_fields(ModelConfig, values.get("model"), "model") if is_ours else None
        for name in ("warmup_s", "step_s"):
            times = values.get(name, [])
            if not isinstance(times, (list, tuple)) or not all(is_figure(t, SHORTEST_S) for t in times):
                raise UserError(f"{name} must be a list of seconds above zero")
            values[name] = tuple(times)
        record = from_fields(cls, values, "the record")
        if record.status not in STATUSES:
            raise UserError(f"status {record.status!r:.40} is unknown; it is one of {', '.join(STATUSES)}")
        if record.status == "fits" and not record.step_s:
            raise UserError("a cell that fits must have step_s, at least one time")
        for name in ("at", "device", "why"):
            if not isinstance(getattr(record, name), str):
                raise UserError(f"{name} must be text")
        refuse_software(record.software)
        if not isinstance(record.readings, dict) or not all(
                is_figure(record.readings[name], -300) for name in READINGS if record.readings.get(name) is not None):
            raise UserError(f"readings must be an object of numbers ({', '.join(READINGS)})")
        for name in ("micro_s", "optimizer_s", "eval_s", "setup_s", "cell_s", "predicted_bytes", "allocated_peak_bytes",
                     "reserved_peak_bytes", "device_peak_bytes", "free_at_start_bytes"):
            value = getattr(record, name)
            if value is not None and not is_figure(value):
                raise UserError(f"{name} is {value!r:.40}; it must be a number of 0 or more, or null")
        if not isinstance(record.alloc_retries, int):
            raise UserError(f"alloc_retries is {record.alloc_retries!r:.40}; it must be a whole number")
        return record

    def to_json(self) -> dict:
        values = dataclasses.asdict(self)
        if self.model:
            values["model"]["parameters"] = self.model.parameters
        return values


_DEVICE = b'"device": "'
"""Before a record's device, as `append` writes it; within a text the quotes would be escaped."""


def load(path: Path | str, say=lambda line: None) -> list[Record]:
    """The records of a file, oldest first. A torn last line (a process killed while writing) is named by `say` and left
    out; any other damage is a UserError with file and line."""
    return jsonl.parse(path, "records", jsonl.lines(path, "records"), Record.from_json, say)


def lines_by_device(path: Path | str) -> dict[str, list[jsonl.Line]]:
    """A file's lines, unread but for the device of each: of 100,000 a plan needs those of one device, and to read them all
    takes 6 s. Under "" those whose device can't be told so, since somebody else wrote them."""
    found: dict[bytes, list[jsonl.Line]] = {}
    for line in jsonl.lines(path, "records"):
        start = line.text.find(_DEVICE) + len(_DEVICE)
        end = line.text.find(b'"', start)
        name = line.text[start:end] if start >= len(_DEVICE) and end > 0 else b""
        found.setdefault(name, []).append(line)
    return {name.decode(errors="replace"): lines for name, lines in found.items()}


def of_devices(paths: Iterable[Path], choose: Callable[[list[str]], str], say=lambda line: None) -> list[Record]:
    """The records of the one device that `choose` takes of all that the files have."""
    def parsed(path: Path, lines: list[jsonl.Line], say=lambda line: None) -> list[Record]:
        return jsonl.parse(path, "records", lines, Record.from_json, say)

    groups = [(path, lines_by_device(path)) for path in paths]
    names = [name for path, group in groups
             for name in (*(n for n in group if n), *(r.device for r in parsed(path, group.get("", []))))]
    if not names:
        return []
    chosen, found = choose(list(dict.fromkeys(names))), []
    for path, group in groups:
        lines = sorted([*group.get(chosen, []), *group.get("", [])], key=lambda line: line.number)
        found += [r for r in parsed(path, lines, say) if r.device == chosen]
    return found


def append(path: Path, record: Record) -> None:
    """Adds one line, on disk when this returns."""
    jsonl.append(path, record.to_json())


def latest(records: Iterable[Record]) -> dict[tuple[str, Cell], Record]:
    """The newest record of each (device, cell); records come oldest first."""
    return {(r.device, r.cell): r for r in records}


def frame(records: Iterable[Record]):
    """The records as a pandas frame, a row each, with tok_s, step_s (median) and peak_bytes worked out."""
    import pandas as pd

    return pd.DataFrame([{name: value for name, value in dataclasses.asdict(r.cell).items() if name != "shape"} | {
        "status": r.status, "why": r.why, "device": r.device, "tok_s": r.tok_s, "step_s": r.median_step_s,
        "peak_bytes": r.peak_bytes, "allocated_peak_bytes": r.allocated_peak_bytes,
        "reserved_peak_bytes": r.reserved_peak_bytes, "at": r.at} for r in records])
