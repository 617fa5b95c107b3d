"""Records, plans and models as the commands would make them, and where things are."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from probe.cell import Cell
from probe.cliff import Cliff
from probe.records import Record, Status
from trainer.config import ModelConfig, OptimizerConfig, StepConfig
from trainer.plan import Plan, Predicted, Span

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parents[1] / "samples"
MODULES = {"probe": "probe.cli", "plan": "planner.cli", "train": "trainer.cli", "spillcliff": "spillcliff.cli"}
T = TypeVar("T")
SPAN = Span(1.0, 2.0, 3.0)
"""A forecast that means nothing."""


def make_record(batch: int = 4, length: int = 512, tok_s: float = 1000.0, peak: float = 4e9, status: str = "fits",
                accum: int = 1, engine: Any = "eager", recompute: Any = "none", **other: Any) -> Record:
    """A record of 150M as a grid would write it, with the given throughput and peak."""
    cell = Cell.of("150M", batch, length, accum, engine=engine, recompute=recompute)
    step_s = batch * length * accum / tok_s
    values: dict[str, Any] = {
        "at": "2026-01-01T00:00:00+00:00", "cell": cell, "model": ModelConfig.named("150M"), "status": Status(status),
        "device": "nvidia-geforce-gtx-1060", "step_s": (step_s,) * 5, "device_peak_bytes": int(peak),
        "micro_s": step_s * 0.9 / accum, "optimizer_s": step_s * 0.1}
    return Record(**(values | other))


def make_cliff(kind: Any, fast: float, bad: float, context: float = 0.3e9, free: float = 5.6e9) -> Cliff:
    """What a memory scan would have told of a GTX 1060."""
    return Cliff(schema=1, at="2026-01-01T00:00:00+00:00", device="nvidia-geforce-gtx-1060", kind=kind, fast_bytes=int(fast),
                 bad_bytes=int(bad), context_bytes=int(context), free_at_start_bytes=int(free), fast_bytes_s=170e9,
                 slow_bytes_s=10e9, seconds=4.0)


def make_plan(device: str = "cpu-x", **changes: Any) -> Plan:
    """A plan of `device` as `plan` would write it; its forecasts mean nothing."""
    values: dict[str, Any] = {
        "schema": 1, "at": "2026-01-01T00:00:00+00:00", "device": device, "model": ModelConfig.named("1M", 500),
        "step": StepConfig(2, 32), "corpus_tokens": 1000, "epochs": 1, "steps": 32, "optimizer": OptimizerConfig(1e-3),
        "eval": 10, "checkpoint": 10, "limit_bytes": 10**9,
        "predicted": Predicted(tok_s=SPAN, peak_bytes=SPAN, hours=SPAN), "why": [], "runners_up": [], "rejected": [],
        "records_sha256": "", "calibration": {}}
    return Plan(**(values | changes))


def write_records(path: Path, records: Iterable[Record]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in records))
    return path


def tiny(**changes: Any) -> ModelConfig:
    """A model of two layers that steps in milliseconds, with grouped attention."""
    return dataclasses.replace(ModelConfig("tiny", 2, 32, 4, 2, 64, vocab=300), **changes)


def gtx1060() -> list[Record]:
    """The first user's two measurements, as `probe grid` would have kept them."""
    case = json.loads((SAMPLES / "gtx1060.json").read_text())
    return [make_record(c["batch"], c["length"], c["tok_s"], c["peak_bytes"], c["status"], micro_s=None, optimizer_s=None)
            for c in case["cells"]]


def there(value: T | None) -> T:
    """A value that a test knows to be there."""
    assert value is not None
    return value
