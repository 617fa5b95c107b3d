"""Where a card stops being fast, seen in a grid of records: pure."""

from collections.abc import Iterable

from probe.cell import Cell
from probe.records import Record
from trainer.device import THROTTLED

FALL = 1.5
"""A fall of tok/s beyond this factor against a smaller batch is no noise: the smallest spill measured (a quarter of a GB
past a cap of 5 GB, on an H200) made the step 4.2x longer, a GTX 1060's first one 3.2x."""

MARGIN = 0.9
"""Share of the memory that was free at the start which is taken as the limit where none was given or measured. A GTX
1060 with 5.6 GB free was fast at 4.04 GB and had spilled at 5.67."""


def smaller_best(cell: Cell, records: Iterable[Record]) -> Record | None:
    """The fastest record that fits, of the same series with a smaller batch; None if there is none."""
    peers = [r for r in records if r.status == "fits" and r.cell.series == cell.series and r.cell.batch < cell.batch]
    return max(peers, key=lambda r: r.tok_s, default=None)


def can_spill(record: Record) -> bool:
    """Whether a fall of this record's throughput would show a spill: not on a processor, nor while heat or a power cap
    slowed the card."""
    return not record.device.startswith("cpu-") and not int(record.readings.get("throttle") or 0) & THROTTLED


def fell(cell: Cell, tok_s: float, records: Iterable[Record]) -> str | None:
    """Why this throughput shows a spill: it fell although the batch grew. None if it did not fall."""
    best = smaller_best(cell, records)
    if best is None or tok_s * FALL >= best.tok_s:
        return None
    return (f"slower than the smaller batch: spilled ({tok_s:,.0f} tok/s where B={best.cell.batch} had "
            f"{best.tok_s:,.0f})")


def default_limit(records: Iterable[Record]) -> tuple[int, str] | None:
    """(limit in bytes, where it comes from) of one device's records; None if none says what was free."""
    free = [r.free_at_start_bytes for r in records if r.free_at_start_bytes]
    if not free:
        return None
    return int(min(free) * MARGIN), f"{MARGIN:.0%} of the memory that was free when it was measured"
