"""Where a card stops being fast: what the memory scan told, and the cliff in a grid of records. Pure but for the cliff's
file."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from probe.cell import Cell
from probe.records import Record, Status
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.schema import Number
from spillcliff.units import format_bytes
from trainer.run.slowdown import FALL

ATTENTION_WEIGHT = 5
"""How much slower than products attention's operations may run, when a longer length is excused for its lower tok/s: on
an H200 torch's fp32 kernel runs at 30 of 51 TFLOP/s, attention made of plain products at 12."""

MARGIN = 0.9
"""Share of the memory that was free at the start which is taken as the limit where none was given or measured. A GTX
1060 with 5.6 GB free was fast at 4.04 GB and had spilled at 5.67."""

CLIFF_MARGIN = 0.97
"""Share of the measured cliff that is taken as the limit: what other programs take varies while a run lasts for days."""


@dataclass(frozen=True)
class Cliff:
    """What a scan of a card's memory told. `fast_bytes` of allocations were fast; with `bad_bytes` a pass over some
    block took several times as long (kind "collapse") or the allocation failed ("failure"); kind "reserve" met no
    cliff up to what the card must keep free, and its `bad_bytes` is None. `context_bytes` is the process's claim
    beside its allocations; rates are bytes read and written per second, in a fast block and in the slow one. UserError for
    a kind that contradicts its bytes."""

    schema: int
    at: str
    device: str
    kind: Literal["collapse", "failure", "reserve"]
    fast_bytes: Annotated[int, Number()]
    bad_bytes: Annotated[int | None, Number()]
    context_bytes: Annotated[int, Number()]
    free_at_start_bytes: Annotated[int, Number()]
    fast_bytes_s: Annotated[float, Number()]
    slow_bytes_s: Annotated[float | None, Number()]
    seconds: Annotated[float, Number()]
    software: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.bad_bytes is None) != (self.kind == "reserve"):
            raise UserError(f"kind {self.kind!r:.40} with bad_bytes {self.bad_bytes!r:.40} can't be; `probe cliff` makes it "
                            f"again")

    @property
    def device_bytes(self) -> int:
        """The claim on the card, context included, up to which it is fast."""
        return self.fast_bytes + self.context_bytes

    def shows_fast(self, peak_bytes: int | None) -> bool:
        """Whether so much was found to be fast and no collapse past it: what is slow then has another cause than memory."""
        return self.kind != "collapse" and (peak_bytes or 0) <= self.device_bytes

    @classmethod
    def load(cls, path: Path) -> "Cliff | None":
        """What `path` holds, None if there is no such file; UserError if it is no cliff."""
        if not path.exists():
            return None
        values = read_json(path, "cliff file")
        try:
            schema.check_version(values, 1)
            return schema.read(cls, values)
        except UserError as e:
            raise UserError(f"cliff file {path}: {e}") from None

    def save(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))


def spill_bound(total_bytes: int | None, cliff: Cliff | None, free_bytes: int | None) -> tuple[int | None, str]:
    """(bytes, what they are) of allocations beyond which a card has certainly spilled: its own memory, or where the
    memory scan collapsed. With more memory free now than there was then, that is as much further."""
    if cliff and cliff.kind == "collapse" and cliff.bad_bytes is not None:
        bound = cliff.bad_bytes + max(0, (free_bytes or 0) - cliff.free_at_start_bytes)
        if not total_bytes or bound < total_bytes:
            return bound, f"where this card's cliff is at {format_bytes(bound)}"
    return total_bytes, f"on a card of {format_bytes(total_bytes)}"


def _excuse(smaller: Record, length: int) -> float:
    """How many times as much a token of `length` may rightly cost as one of the smaller record's length."""
    if smaller.model is None:  # somebody's own step: at worst all of it is attention, which grows with the length
        return max(1.0, length / smaller.cell.length)
    products = smaller.model.flops_per_token(0)
    cost = [products + ATTENTION_WEIGHT * (smaller.model.flops_per_token(at) - products)
            for at in (length, smaller.cell.length)]
    return max(1.0, cost[0] / cost[1])


@dataclass(frozen=True)
class Demand:
    """The tok/s that a cell must have by what a `smaller` one had."""

    smaller: Record
    tok_s: float


def demand_on(cell: Cell, records: Iterable[Record]) -> Demand | None:
    """The highest demand of a smaller cell that fits; None if there is no smaller one. Smaller is no larger in batch, length
    and accumulation and otherwise the same."""
    highest = None
    for r in records:
        # an excuse only lowers what is demanded, so that few need be looked at closely
        most = highest.tok_s if highest else 0.0
        if r.fits and r.tok_s > most and r.cell.step.micro_tokens < cell.step.micro_tokens and r.cell.within(cell) and (
                tok_s := r.tok_s / _excuse(r, cell.length)) > most:
            highest = Demand(r, tok_s)
    return highest


def can_spill(record: Record) -> bool:
    """Whether a fall of this record's throughput would show a spill: not on a processor, nor while heat or a power cap
    slowed the card, nor while another program used it."""
    return not (record.device.startswith("cpu-") or record.status is Status.CONTENDED or record.throttle_bits)


def fall_reason(cell: Cell, tok_s: float, records: Iterable[Record]) -> str | None:
    """Why this throughput shows a spill: it fell although the cell grew. None if it did not fall."""
    demand = demand_on(cell, records)
    if demand is None or tok_s * FALL >= demand.tok_s:
        return None
    smaller = demand.smaller.cell
    if smaller.length == cell.length:
        return (f"slower than the smaller batch: spilled ({tok_s:,.0f} tok/s where B={smaller.batch} had "
                f"{demand.smaller.tok_s:,.0f})")
    return (f"slower than a smaller cell allows: spilled ({tok_s:,.0f} tok/s where B={smaller.batch} L={smaller.length} had "
            f"{demand.smaller.tok_s:,.0f})")


def default_limit(records: Iterable[Record], cliff: Cliff | None = None) -> tuple[int, str] | None:
    """(limit in bytes of a process's whole claim, where it comes from) on one device; None if nothing says."""
    if cliff:
        what = "up to which the card was fast" if cliff.kind == "reserve" else f"where its {cliff.kind} was measured"
        return int(cliff.device_bytes * CLIFF_MARGIN), f"{CLIFF_MARGIN:.0%} of the {format_bytes(cliff.device_bytes)} {what}"
    free = [r.free_at_start_bytes for r in records if r.free_at_start_bytes]
    if not free:
        return None
    return int(min(free) * MARGIN), f"{MARGIN:.0%} of the memory that was free when it was measured"
