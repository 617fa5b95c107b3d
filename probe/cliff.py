"""Where a card stops being fast: what the memory scan told, and the cliff in a grid of records. Pure but for the cliff's
file."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from probe.cell import Cell
from probe.records import Measurement, Record, Status
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.schema import Number
from spillcliff.units import format_bytes
from trainer.config import RECOMPUTES
from trainer.run.slowdown import allowed_fall

ATTENTION_WEIGHT = 5
"""How much slower than products attention's operations may run, when a longer length is excused for its lower tok/s: on
an H200 torch's fp32 kernel runs at 30 of 51 TFLOP/s, attention made of plain products at 12."""

GROWS = 1.3
"""The most that a growing trend is asked to go on: with FALL a batch that has less than 0.87 of the one before has spilled
if tok/s grew up to there, where it may only grow on or stay."""

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

    def shows_fast(self, measured: Measurement) -> bool:
        """Whether so much as it took was found to be fast and no collapse past it: what is slow then has another cause than
        memory. Where nothing says how much it took nothing is shown."""
        claim_bytes = whole_claim(measured, self)
        return self.kind != "collapse" and claim_bytes is not None and claim_bytes <= self.device_bytes

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


def whole_claim(measured: Measurement, cliff: Cliff | None) -> int | None:
    """Bytes of the whole claim on the card: the device's figure, else what the allocator held and the context that the
    memory scan saw (nothing without a scan); None where neither is known."""
    if measured.device_peak_bytes is not None or measured.peak_bytes is None:
        return measured.device_peak_bytes
    return measured.peak_bytes + (cliff.context_bytes if cliff else 0)


def spill_bound(total_bytes: int | None, cliff: Cliff | None, free_bytes: int | None) -> tuple[int | None, str]:
    """(bytes, what they are) of allocations beyond which a card has certainly spilled: its own memory, or where the
    memory scan collapsed. With more memory free now than there was then, that is as much further."""
    if cliff and cliff.kind == "collapse" and cliff.bad_bytes is not None:
        bound = cliff.bad_bytes + max(0, (free_bytes or 0) - cliff.free_at_start_bytes)
        if not total_bytes or bound < total_bytes:
            return bound, f"where this card's cliff is at {format_bytes(bound)}"
    return total_bytes, f"on a card of {format_bytes(total_bytes)}"


def past_bound(measured: Measurement, bound_bytes: int | None, what: str) -> str | None:
    """Why its allocations have certainly spilled: beyond what spill_bound gave. None if they are not."""
    for size, word in ((measured.reserved_peak_bytes, "reserved"), (measured.allocated_peak_bytes, "allocated")):
        if size is not None and bound_bytes and size > bound_bytes:
            return f"{format_bytes(size)} {word} {what}"
    return None


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
    """The tok/s that a cell must have by what a `smaller` one had, or by the trend that ends with it."""

    smaller: Record
    tok_s: float


def demand_on(cell: Cell, records: Iterable[Record]) -> Demand | None:
    """The highest demand of a smaller cell that fits; None if there is no smaller one. Smaller is no larger in batch, length
    and accumulation and otherwise the same, or recomputes more, which takes time and saves memory."""
    highest: Demand | None = None
    on_axis: list[Record] = []
    for r in records:
        if not r.fits:
            continue
        # an excuse only lowers what is demanded, so that few need be looked at closely
        most = highest.tok_s if highest else 0.0
        if r.tok_s > most and _needs_less(r.cell, cell) and (tok_s := r.tok_s / _excuse(r, cell.length)) > most:
            highest = Demand(r, tok_s)
        if r.cell.batch < cell.batch and r.cell.length == cell.length and r.cell.step == replace(
                cell.step, batch=r.cell.batch) and r.cell.within(cell):
            on_axis.append(r)
    trend = _trend(sorted(on_axis, key=lambda r: r.cell.batch)[-2:], cell.batch)
    return trend if trend and (highest is None or trend.tok_s > highest.tok_s) else highest


def _needs_less(smaller: Cell, cell: Cell) -> bool:
    """Whether `smaller` needs less memory and no less time for a token."""
    ranks = RECOMPUTES.index(smaller.step.recompute), RECOMPUTES.index(cell.step.recompute)
    if ranks[0] > ranks[1]:
        return smaller.with_step(recompute=cell.step.recompute).within(cell)
    return smaller.step.micro_tokens < cell.step.micro_tokens and smaller.within(cell)


def _trend(last: Sequence[Record], batch: int) -> Demand | None:
    """What a batch must have by how tok/s grew over the last two smaller ones; None where it did not grow. Half of the
    growth is asked to go on, and no more than GROWS: a card that is busy from there on gains nothing by a larger batch."""
    if len(last) < 2:
        return None
    a, b = last
    per_doubling = math.log2(b.tok_s / a.tok_s) / math.log2(b.cell.batch / a.cell.batch)
    if per_doubling <= 0:
        return None
    return Demand(b, b.tok_s * min(GROWS, (batch / b.cell.batch) ** (per_doubling / 2)))


def can_spill(record: Record) -> bool:
    """Whether a fall of this record's throughput would show a spill: not on a processor, nor while another program used the
    card."""
    return not (record.device.startswith("cpu-") or record.status is Status.CONTENDED)


def fall_reason(cell: Cell, measured: Measurement, records: Iterable[Record]) -> str | None:
    """Why what was measured of `cell` shows a spill: its throughput fell although the cell grew, further than heat
    explains. None if it did not."""
    demand = demand_on(cell, records) if measured.median_step_s else None
    if demand is None or not measured.median_step_s:
        return None
    tok_s, smaller = cell.step.tokens / measured.median_step_s, demand.smaller.cell
    usual_mhz = demand.smaller.clock_mhz
    clock_share = measured.clock_mhz / usual_mhz if measured.clock_mhz and usual_mhz else None
    if tok_s * allowed_fall(measured.throttle_bits, clock_share) >= demand.tok_s:
        return None
    had = f"spilled ({tok_s:,.0f} tok/s where {_differs(smaller, cell)} had {demand.smaller.tok_s:,.0f}"
    if smaller.step.recompute != cell.step.recompute:
        return f"slower than with more recomputation: {had})"
    if smaller.length != cell.length:
        return f"slower than a smaller cell allows: {had})"
    if demand.tok_s > demand.smaller.tok_s:
        return f"slower than the smaller batches' trend: {had} and still grew)"
    return f"slower than the smaller batch: {had})"


def _differs(smaller: Cell, cell: Cell) -> str:
    """The smaller cell, by what tells it from the other."""
    words = [] if (smaller.batch, smaller.length) == (cell.batch, cell.length) and smaller.step != cell.step else [
        f"B={smaller.batch}"]
    words += [] if smaller.length == cell.length else [f"L={smaller.length}"]
    words += [] if smaller.step.recompute == cell.step.recompute else [f"--recompute {smaller.step.recompute}"]
    return " ".join(words)


def asked_limit(limit_bytes: int, records: Iterable[Record], cliff: Cliff | None) -> tuple[int, str]:
    """(limit in bytes of a process's whole claim, what it is) where the user named one: it is theirs to name, but not past
    where the card was seen to end."""
    if cliff and cliff.kind != "reserve" and limit_bytes > cliff.device_bytes:
        return limit_bytes, f"as asked, past this card's {cliff.kind} at {format_bytes(cliff.device_bytes)}, which holds"
    free = [r.free_at_start_bytes for r in records if r.free_at_start_bytes]
    if free and limit_bytes > max(free):
        return limit_bytes, f"as asked, more than the {format_bytes(max(free))} that were free when it was measured"
    return limit_bytes, "as asked"


def default_limit(records: Iterable[Record], cliff: Cliff | None = None) -> tuple[int, str] | None:
    """(limit in bytes of a process's whole claim, where it comes from) on one device; None if nothing says."""
    if cliff:
        what = "up to which the card was fast" if cliff.kind == "reserve" else f"where its {cliff.kind} was measured"
        return int(cliff.device_bytes * CLIFF_MARGIN), f"{CLIFF_MARGIN:.0%} of the {format_bytes(cliff.device_bytes)} {what}"
    free = [r.free_at_start_bytes for r in records if r.free_at_start_bytes]
    if not free:
        return None
    return int(min(free) * MARGIN), f"{MARGIN:.0%} of the memory that was free when it was measured"
