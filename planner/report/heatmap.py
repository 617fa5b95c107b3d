"""The page's map of one series over batch and length: what was measured, and estimates between it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.decide.costmodel import CostModel
from planner.report.text import bytes_text, range_text, tok_s_text
from probe.cell import Cell
from probe.records import Record, Status
from probe.show.heatmap import STATUS_WORDS, CellMap, Place, Places, frontier, series_title
from trainer.plan import Span

SHADES = 9
"""Steps of the colour ramp, classes q0 to q8 in style.css."""
MOST_ESTIMATED = 120
"""Cells of a map above which gaps are left open: a fit to so many takes a second."""


@dataclass(frozen=True)
class Estimate:
    """What the cost model says of a cell that was not measured; `note` is what weakens it, "" if nothing does."""

    cell: Cell
    tok_s: Span
    peak_bytes: float | None
    note: str


@dataclass(frozen=True)
class MapCell:
    """A cell as it is drawn: `kind` is one of fits, estimated, over and failed; `title` is for whoever points at it."""

    kind: str
    cell: Cell
    tok_s: float | None
    peak_bytes: float | None
    status: Status | None
    is_pick: bool
    title: str

    @property
    def is_estimated(self) -> bool:
        return self.status is None

    @property
    def headline(self) -> str:
        return "~" * self.is_estimated + tok_s_text(self.tok_s) if self.tok_s else str(self.status)

    @property
    def peak(self) -> str:
        return "~" * self.is_estimated + bytes_text(self.peak_bytes) if self.peak_bytes else ""


@dataclass(frozen=True)
class SeriesMap:
    """The map of one series: what was `measured`, `estimates` of its gaps, and the plan's `pick`, of any series."""

    measured: CellMap
    estimates: dict[Place, Estimate]
    pick: Cell | None

    @classmethod
    def of(cls, records: Sequence[Record], limit_bytes: int | None, cliff_bytes: int | None,
           pick: Cell | None = None) -> "SeriesMap":
        """The map of one series' records, oldest first; UserError if there are none."""
        measured = CellMap.of(records, limit_bytes, cliff_bytes)
        return cls(measured, _estimates(measured), pick)

    @property
    def series(self) -> Cell:
        return next(iter(self.measured.records.values())).cell.series

    @property
    def title(self) -> str:
        return series_title(self.series)

    @cached_property
    def over(self) -> Places:
        """What fits, or would by estimate, but needs more than may be used."""
        bound = self.measured.bound
        return self.measured.over | {at for at, e in self.estimates.items() if bound and (e.peak_bytes or 0) > bound[0]}

    @cached_property
    def _edges(self) -> tuple[Places, Places]:
        """Those of the cliff, as CellMap has them, with the estimates on either side of it too."""
        m = self.measured
        good = m.good | (self.estimates.keys() - self.over - m.bad)
        return frontier(len(m.batches), len(m.lengths), good, m.bad | self.over)[2:]

    def is_upright(self, at: Place) -> bool:
        return at in self._edges[0]

    def is_level(self, at: Place) -> bool:
        return at in self._edges[1]

    @property
    def has_cliff(self) -> bool:
        return any(self._edges)

    @cached_property
    def cells(self) -> dict[Place, MapCell]:
        """The cells that something is known of."""
        return {at: self._estimated_cell(at, e) for at, e in self.estimates.items()} | {
            at: self._measured_cell(at, r) for at, r in self.measured.records.items()}

    def rows(self) -> Iterator[tuple[int, list[tuple[Place, MapCell | None]]]]:
        """(batch, its (place, cell) by length)"""
        for r, batch in enumerate(self.measured.batches):
            yield batch, [((r, c), self.cells.get((r, c))) for c in range(len(self.measured.lengths))]

    @property
    def statuses(self) -> dict[Status, str]:
        """What the failures in it mean."""
        statuses = {r.status for r in self.measured.records.values()}
        return {status: words for status, words in STATUS_WORDS.items() if status in statuses}

    @property
    def has_gaps(self) -> bool:
        return len(self.cells) < len(self.measured.batches) * len(self.measured.lengths)

    def _measured_cell(self, at: Place, r: Record) -> MapCell:
        peak = [f"peak {bytes_text(r.peak_bytes)}" + ", over the limit" * (at in self.over)] if r.peak_bytes else []
        speed = [f"{tok_s_text(r.tok_s)} tok/s"] if r.tok_s else []
        kind = "failed" if not r.fits else "over" if at in self.over else "fits"
        return MapCell(kind=kind, cell=r.cell, tok_s=r.tok_s if r.fits else None, peak_bytes=r.peak_bytes, status=r.status,
                       is_pick=r.cell == self.pick, title=_title(r.cell, [str(r.status), *speed, *peak], r.why))

    def _estimated_cell(self, at: Place, e: Estimate) -> MapCell:
        peak = [f"peak ~{bytes_text(e.peak_bytes)}" + ", over the limit" * (at in self.over)] if e.peak_bytes else []
        speed = f"~{tok_s_text(e.tok_s.mid)} tok/s ({range_text(e.tok_s.low, e.tok_s.high, tok_s_text)})"
        return MapCell(kind="over" if at in self.over else "estimated", cell=e.cell, tok_s=e.tok_s.mid,
                       peak_bytes=e.peak_bytes, status=None, is_pick=False,
                       title=_title(e.cell, ["estimated", speed, *peak], e.note))


def _title(cell: Cell, parts: list[str], why: str) -> str:
    return f"B={cell.batch} L={cell.length}: {', '.join(parts)}" + f"; {why}" * bool(why)


def _estimates(cells: CellMap) -> dict[Place, Estimate]:
    """The cost model's of the gaps; none where there is no model, or past the cliff."""
    records = list(cells.records.values())
    one = records[0].cell
    gaps = {(r, c): one.with_step(batch=b, length=n) for r, b in enumerate(cells.batches)
            for c, n in enumerate(cells.lengths) if (r, c) not in cells.records}
    if not gaps or len(gaps) + len(records) > MOST_ESTIMATED or one.is_custom:
        return {}
    try:
        predictions = CostModel(records).predict(list(gaps.values()))
    except ValueError:
        return {}
    return {at: Estimate(cell, Span(*(cell.step.tokens / s for s in (p.step_s.high, p.step_s.mid, p.step_s.low))),
                         p.peak_bytes.mid if p.peak_bytes else None, p.note)
            for (at, cell), p in zip(gaps.items(), predictions, strict=True) if p is not None}


@dataclass(frozen=True)
class Scale:
    """The lowest and the highest tok/s that are shaded: one for all maps, so that they can be compared."""

    low: float
    high: float

    @classmethod
    def of(cls, maps: Iterable[SeriesMap]) -> "Scale":
        speeds = [cell.tok_s for each in maps for cell in each.cells.values() if cell.tok_s]
        return cls(min(speeds, default=0.0), max(speeds, default=0.0))

    @property
    def shades(self) -> range:
        return range(SHADES if self.high > self.low else 0)

    def shade(self, tok_s: float) -> int:
        if not self.high > self.low:
            return SHADES // 2
        return min(SHADES - 1, int((tok_s - self.low) / (self.high - self.low) * SHADES))
