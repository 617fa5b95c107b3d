"""What needs less memory than what was measured: where nothing fits, and where a run may have to go on with less. By
estimate, and said so. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from probe.cell import Cell
from probe.estimate.peak import CardMemory, estimate
from probe.records import Record
from spillcliff.hardware.fingerprints import device_count
from spillcliff.units import format_bytes, parse_count
from trainer.config import SIZES, StepConfig, half_batch
from trainer.plan import SmallerStep

ROOM = 0.99
"""Of the limit, up to which an estimate is offered: on an H200 the worst of 64 was 0.6% low."""
LEANER = {"none": ("elementwise", "block"), "elementwise": ("block",), "block": ()}


def alternatives(records: list[Record], length: int | None, limit_bytes: int, device: dict[str, Any]) -> str:
    """One more sentence, naming up to three cells that would fit, each with another thing given up: batch, time by
    recomputing, size; "" if none would, or where peaks can't be estimated."""
    kind = device.get("kind") or ("cpu" if records[0].device.startswith("cpu-") else "cuda")
    if kind not in ("cuda", "cpu"):
        return ""
    memory = CardMemory.of({"kind": kind} | device)
    cells = [r.cell for r in records if length in (None, r.cell.length)] or [records[0].cell]
    smallest = min(cells, key=lambda c: (c.step.tokens, c.length))
    base = smallest.with_step(length=length or smallest.length, accum=1)
    fitting = []
    for way in (_smaller_batches(base), _recomputing(base), _smaller_models(base)):
        for cell in way:
            need = estimate(cell, memory).device_bytes
            if need <= ROOM * limit_bytes:
                fitting.append((cell, need))
                break
    if not fitting:
        return "; nor would anything smaller, by estimate"
    told = "; ".join(f"{_name(cell)} ({format_bytes(need)})" for cell, need in fitting)
    cell = fitting[0][0]
    return (f". By estimate, not measured, these would: {told}. Measure one: probe grid --model {cell.model} "
            f"--batch {cell.batch} --length {cell.length}{cell.command_options()}")


def smaller_steps(pick: Record, step: StepConfig, records: list[Record], device: dict[str, Any]) -> list[SmallerStep]:
    """The planned `step` of `pick` in half and quarter micro-steps, as far as they need less memory than the pick: by
    measurement, else by as much as an estimate says."""
    kind = device.get("kind") or ("cpu" if pick.device.startswith("cpu-") else "cuda")
    own_bytes, batch, smaller = pick.peak_bytes, step.batch, []
    if kind not in ("cuda", "xpu") or own_bytes is None or step.update == "backward" or device_count(pick.device) > 1:
        return []
    memory = CardMemory.of({"kind": "cuda"} | device)
    measured = {r.cell: r.peak_bytes for r in records if r.fits and r.peak_bytes}
    for _ in range(2):
        half = half_batch(batch)
        if half is None:
            break
        batch, cell = half, pick.cell.with_step(batch=half, accum=2)
        scale = own_bytes / estimate(pick.cell, memory).device_bytes
        need = measured.get(cell) or int(scale * estimate(cell, memory).device_bytes)
        if need < own_bytes:
            smaller.append(SmallerStep(batch, step.batch * step.accum // batch, need))
    return smaller


def _name(cell: Cell) -> str:
    recompute = f" recompute {cell.step.recompute}" * (cell.step.recompute != "none")
    return f"{cell.model} B={cell.batch} L={cell.length}{recompute}"


def _smaller_batches(base: Cell) -> Iterator[Cell]:
    return (base.with_step(batch=b) for b in _halves(base.batch // 2))


def _recomputing(base: Cell) -> Iterator[Cell]:
    return (base.with_step(batch=b, recompute=r) for b in (base.batch, *_halves(base.batch // 2))
            for r in LEANER[base.step.recompute])


def _smaller_models(base: Cell) -> Iterator[Cell]:
    size = base.shape.parameters if base.shape else parse_count(base.model)
    return (replace(base, model=name, shape=None) for name in reversed(SIZES) if parse_count(name) < size)


def _halves(batch: int) -> Iterable[int]:
    while batch:
        yield batch
        batch //= 2
