"""Runs the cells of a grid, one process each, and writes each record before the next cell starts."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from probe import records
from probe.cell import Cell, planes
from probe.cliff import Cliff
from probe.estimate.peak import CardMemory, estimate
from probe.grid import search
from probe.grid.session import now
from probe.outcome import CellProgress, Outcome
from probe.records import UNDECIDED, Measurement, Record
from probe.tasks.table import MeasureCell, MeasureDistributed
from probe.tasks.worker import START_S, Workers
from probe.verdict import Card, judge, slow_step_s, stuck_reason
from spillcliff.files import Say, ignore
from spillcliff.hardware.device import DeviceFacts, on_battery
from spillcliff.hardware.fingerprints import device_count

TIMES_SECONDS = 12
"""A cell's process is ended after so many times its `seconds`, and what it may take to start."""
FIRST_KERNELS_S = 30
"""What a card's context and first kernels may take beside."""

Show = Callable[[Cell, Record | None, str], None]
"""Is told of each cell: its record, or None and why it was not run."""


class Bench:
    """One device, what is known of it, and the file that what is measured goes to. `seconds` is the time for a cell."""

    def __init__(self, workers: Workers, device: str, facts: DeviceFacts, path: Path, *, seconds: float,
                 cliff: Cliff | None = None, limit_bytes: int | None = None, memory: CardMemory | None = None,
                 say: Say = ignore) -> None:
        self.workers, self.device, self.facts, self.path, self.seconds = workers, device, facts, path, seconds
        self.limit_bytes, self.memory, self.count = limit_bytes, memory or CardMemory(), device_count(facts.fingerprint)
        self._predicted: dict[Cell, int | None] = {}  # the search asks again and again, at 30 ms each
        self.card = Card(facts.total_bytes, facts.kind != "cpu", cliff)
        known = records.load(path, say) if path.exists() else []
        self.newest = {cell: r for (name, cell), r in records.latest(known).items() if name == facts.fingerprint}

    def predict(self, cell: Cell) -> int | None:
        """Bytes of the process's whole claim; None for somebody's own step, and where there is no estimate."""
        if cell not in self._predicted:
            can_estimate = not cell.is_custom and self.facts.kind in ("cuda", "cpu") and self.count == 1
            self._predicted[cell] = estimate(cell, self.memory).device_bytes if can_estimate else None
        return self._predicted[cell]

    def measure(self, cell: Cell) -> Record:
        """Runs one cell, judges it and puts it on disk. Its process is ended when it takes too long, or as soon as it has
        certainly spilled."""
        begin = time.monotonic()
        is_on_battery = on_battery(self.facts.uuid)
        # a cell that is slow for want of mains would read as one that has spilled beside those that had them
        others = [r for r in self.newest.values() if r.cell != cell and r.on_battery == is_on_battery]
        outcome = self._run(cell, slow_step_s(cell, self.card, others))
        status, why = judge(outcome, cell, self.card, others)
        measured = outcome.answer or (outcome.progress or CellProgress()).measured
        record = Record(at=now(), cell=cell, model=cell.config, status=status, why=why, device=self.facts.fingerprint,
                        software=self.facts.software, cell_s=time.monotonic() - begin, predicted_bytes=self.predict(cell),
                        on_battery=is_on_battery or on_battery(self.facts.uuid), **records.measured_fields(measured))
        records.append(self.path, record)
        self.newest[cell] = record
        return record

    def _run(self, cell: Cell, slow_s: float | None) -> Outcome[Measurement, CellProgress]:
        on_host = not self.card.is_card
        if self.count > 1:
            return self.workers.run(MeasureDistributed(cell, self.device, self.seconds, self.facts.fingerprint),
                                    START_S + TIMES_SECONDS * self.seconds, on_host)
        return self.workers.run(MeasureCell(cell, self.device, self.facts.uuid, self.seconds, self.card, slow_s),
                                FIRST_KERNELS_S + TIMES_SECONDS * self.seconds, on_host,
                                certain=lambda progress, quiet_s: stuck_reason(cell, slow_s, progress, quiet_s))

    def run(self, cells: Sequence[Cell], every_cell: bool, again: bool, show: Show) -> list[Record]:
        """Measures what is missing of `cells`, all of it or what the pick needs. Returns the latest record of every cell
        that has one. What was measured on battery is measured again on mains."""
        is_on_battery = on_battery(self.facts.uuid)
        kept = {} if again else {c: r for c, r in self.newest.items()
                                 if r.status not in UNDECIDED and (is_on_battery or not r.on_battery)}
        kept = {c: kept[c] for c in cells if c in kept}
        for cell, record in kept.items():
            show(cell, record, "measured before" + ", on battery" * record.on_battery)
        for plane in planes(cells):
            known = {c: kept[c] for c in plane if c in kept}
            missing = iter([c for c in plane if c not in kept])
            while cell := next(missing, None) if every_cell else search.next_cell(  # type: ignore[assignment]
                    plane, known, self.limit_bytes, self.predict):
                kept[cell] = known[cell] = self.measure(cell)
                show(cell, known[cell], "on battery" * known[cell].on_battery)
            if not every_cell:
                for cell, why in search.left_out(plane, known, self.limit_bytes, self.predict).items():
                    show(cell, None, why)
        return [kept[cell] for cell in cells if cell in kept]
