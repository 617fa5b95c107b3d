"""Where a card stops being fast: what the ballast probe found, and the cliff in a grid of records. Pure."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from probe.cell import Cell
from probe.records import Record
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.hardware.device import THROTTLED
from spillcliff.units import format_bytes, is_figure
from trainer.config import from_fields
from trainer.run.slowdown import FALL

ATTENTION_WEIGHT = 5
"""How much slower than products attention's operations may run, when a longer length is excused for its lower tok/s: on
an H200 torch's fp32 kernel runs at 30 of 51 TFLOP/s, attention made of plain products at 12."""

MARGIN = 0.9
"""Share of the memory that was free at the start which is taken as the limit where none was given or measured. A GTX
1060 with 5.6 GB free was fast at 4.04 GB and had spilled at 5.67."""

CLIFF_MARGIN = 0.97
"""Share of the measured cliff that is taken as the limit: what other programs take varies while a run lasts for days."""

KINDS = ("collapse", "failure", "reserve")


@dataclass(frozen=True)
class Cliff:
    """What the ballast probe found on a card. `fast_bytes` of allocations were fast; with `bad_bytes` a pass over some
    block took several times as long (kind "collapse") or the allocation failed ("failure"); kind "reserve" found no
    cliff up to what the card must keep free, and its `bad_bytes` is None. `context_bytes` is this process's claim
    beside its allocations; rates are bytes read and written per second, in a fast block and in the slow one."""

    schema: int
    at: str
    device: str
    kind: str
    fast_bytes: int
    bad_bytes: int | None
    context_bytes: int
    free_at_start_bytes: int
    fast_bytes_s: float
    slow_bytes_s: float | None
    seconds: float
    software: dict = field(default_factory=dict)

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
        if values.get("schema") != 1:
            raise UserError(f"cliff file {path}: schema is {values.get('schema')!r:.40}; this version reads 1")
        cliff = from_fields(cls, values, f"cliff file {path}")
        for name in ("fast_bytes", "context_bytes", "free_at_start_bytes", "fast_bytes_s", "slow_bytes_s", "seconds"):
            value = getattr(cliff, name)
            if not is_figure(value) and not (value is None and name == "slow_bytes_s"):
                raise UserError(f"cliff file {path}: {name} is {value!r:.40}; it must be a number of 0 or more")
        bad = cliff.bad_bytes
        if cliff.kind not in KINDS or (bad is None) != (cliff.kind == "reserve") or not (bad is None or is_figure(bad)):
            raise UserError(f"cliff file {path}: kind {cliff.kind!r:.40} with bad_bytes {bad!r:.40} can't be; `probe cliff` "
                            f"makes it again")
        return cliff

    def save(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))


def wall(total_bytes: int | None, cliff: Cliff | None, free_bytes: int | None) -> tuple[int | None, str]:
    """(bytes, what they are) of allocations beyond which a card has certainly spilled: its own memory, or where the
    ballast collapsed. With more memory free now than there was then, that is as much further."""
    if cliff and cliff.kind == "collapse":
        more = max(0, (free_bytes or 0) - cliff.free_at_start_bytes)
        if not total_bytes or cliff.bad_bytes + more < total_bytes:
            return cliff.bad_bytes + more, f"where this card's cliff is at {format_bytes(cliff.bad_bytes + more)}"
    return total_bytes, f"on a card of {format_bytes(total_bytes)}"


def _excuse(reference: Record, length: int) -> float:
    """How many times as much a token of `length` may rightly cost as one of the reference's length."""
    if reference.model is None:  # somebody's own step: at worst all of it is attention, which grows with the length
        return max(1.0, length / reference.cell.length)
    products = reference.model.flops_per_token(0)
    cost = [products + ATTENTION_WEIGHT * (reference.model.flops_per_token(at) - products)
            for at in (length, reference.cell.length)]
    return max(1.0, cost[0] / cost[1])


def reference(cell: Cell, records: Iterable[Record]) -> tuple[Record, float] | None:
    """(the smaller cell that fits whose throughput demands the most of `cell`, tok/s that it demands); None if there is no
    smaller one. Smaller is no larger in batch, length and accumulation and otherwise the same."""
    found, most = None, 0.0
    for r in records:
        # an excuse only lowers what is demanded, so that few need be looked at closely
        if r.status == "fits" and r.tok_s > most and r.cell.batch * r.cell.length < cell.batch * cell.length and (
                r.cell.within(cell) and (demand := r.tok_s / _excuse(r, cell.length)) > most):
            found, most = r, demand
    return found and (found, most)


def can_spill(record: Record) -> bool:
    """Whether a fall of this record's throughput would show a spill: not on a processor, nor while heat or a power cap
    slowed the card, nor while another program used it."""
    return not (record.device.startswith("cpu-") or record.status == "contended"
                or int(record.readings.get("throttle") or 0) & THROTTLED)


def fell(cell: Cell, tok_s: float, records: Iterable[Record]) -> str | None:
    """Why this throughput shows a spill: it fell although the cell grew. None if it did not fall."""
    found = reference(cell, records)
    if found is None or tok_s * FALL >= found[1]:
        return None
    smaller = found[0].cell
    if smaller.length == cell.length:
        return (f"slower than the smaller batch: spilled ({tok_s:,.0f} tok/s where B={smaller.batch} had "
                f"{found[0].tok_s:,.0f})")
    return (f"slower than a smaller cell allows: spilled ({tok_s:,.0f} tok/s where B={smaller.batch} L={smaller.length} had "
            f"{found[0].tok_s:,.0f})")


def default_limit(records: Iterable[Record], cliff: Cliff | None = None) -> tuple[int, str] | None:
    """(limit in bytes of a process's whole claim, where it comes from) on one device; None if nothing says."""
    if cliff:
        what = "up to which the card was fast" if cliff.kind == "reserve" else f"where its {cliff.kind} was measured"
        return int(cliff.device_bytes * CLIFF_MARGIN), f"{CLIFF_MARGIN:.0%} of the {format_bytes(cliff.device_bytes)} {what}"
    free = [r.free_at_start_bytes for r in records if r.free_at_start_bytes]
    if not free:
        return None
    return int(min(free) * MARGIN), f"{MARGIN:.0%} of the memory that was free when it was measured"
