"""What would fit where nothing that was measured does: by estimate, and said so. Pure."""

import dataclasses
from collections.abc import Iterable, Iterator

from probe.cell import Cell
from probe.estimate.peak import CardMemory, estimate
from probe.records import Record
from spillcliff.units import format_bytes, parse_count
from trainer.config import SIZES

ROOM = 0.99
"""Of the limit, up to which an estimate is offered: on an H200 the worst of 64 was 0.6% low."""
LEANER = {"none": ("elementwise", "block"), "elementwise": ("block",), "block": ()}


def nearest(records: list[Record], length: int | None, limit_bytes: int, device: dict) -> str:
    """One more sentence, naming up to three cells that would fit, each with another thing given up: batch, time by
    recomputing, size; "" if none would, or where peaks can't be estimated."""
    kind = device.get("kind") or ("cpu" if records[0].device.startswith("cpu-") else "cuda")
    if kind not in ("cuda", "cpu"):
        return ""
    memory = CardMemory.of({"kind": kind} | device)
    asked = [r.cell for r in records if length in (None, r.cell.length)] or [records[0].cell]
    smallest = min(asked, key=lambda c: (c.step.tokens, c.length))
    base = dataclasses.replace(smallest, length=length or smallest.length, accum=1)
    found = []
    for way in (_smaller_batches(base), _recomputing(base), _smaller_models(base)):
        for cell in way:
            need = estimate(cell, memory).device_bytes
            if need <= ROOM * limit_bytes:
                found.append((cell, need))
                break
    if not found:
        return "; nor would anything smaller, by estimate"
    told = "; ".join(f"{_name(cell)} ({format_bytes(need)})" for cell, need in found)
    cell = found[0][0]
    return (f". By estimate, not measured, these would: {told}. Measure one: probe grid --model {cell.model} "
            f"--batch {cell.batch} --length {cell.length}{cell.options()}")


def _name(cell: Cell) -> str:
    return f"{cell.model} B={cell.batch} L={cell.length}" + f" recompute {cell.recompute}" * (cell.recompute != "none")


def _smaller_batches(base: Cell) -> Iterator[Cell]:
    return (dataclasses.replace(base, batch=b) for b in _halves(base.batch // 2))


def _recomputing(base: Cell) -> Iterator[Cell]:
    return (dataclasses.replace(base, batch=b, recompute=r) for b in (base.batch, *_halves(base.batch // 2))
            for r in LEANER[base.recompute])


def _smaller_models(base: Cell) -> Iterator[Cell]:
    size = base.shape.parameters if base.shape else parse_count(base.model)
    return (dataclasses.replace(base, model=n, shape=None) for n in reversed(SIZES) if parse_count(n) < size)


def _halves(batch: int) -> Iterable[int]:
    while batch:
        yield batch
        batch //= 2
