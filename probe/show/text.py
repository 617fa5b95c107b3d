"""What the prober's commands say, as text and rows: pure."""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from probe.cell import Cell
from probe.cliff import Cliff
from probe.estimate.peak import Estimate
from probe.records import Record
from probe.show.heatmap import (
    NEVER_RUN,
    NO_FIGURE,
    SHOWN_OPTIONS,
    STATUS_WORDS,
    CellMap,
    cut,
    peak_text,
    series_of,
    series_title,
    short_tok_s_text,
    tok_s_text,
)
from spillcliff.hardware.device import THROTTLED, DeviceFacts
from spillcliff.units import format_bytes
from trainer.config import ENGINES, VOCAB

NARROWEST = 25
"""Columns that a batch and a length of 10 digits take with their frame of 5; a narrower terminal gets lines this wide."""

GAP = "  "
LEGEND_GAP = "   "


ROW_HEAD = f"{'model':>6} {'batch':>5} {'length':>6} {'tok/s':>9} {'step':>9} {'peak':>9}  verdict"


def row(cell: Cell, record: Record | None, note: str) -> str:
    """A line under ROW_HEAD for a cell as it is done: its record, or None and in `note` why it was not run."""
    words, tok_s, step, peak = f"not run: {note}", "", "", ""
    if record:
        words = record.status + (f": {record.why}" if record.why else f" ({note})" if note else "")
        tok_s = tok_s_text(record) if record.step_s else ""
        step = f"{record.median_step_s * 1000:,.1f} ms" if record.median_step_s else ""
        peak = format_bytes(record.peak_bytes) if record.peak_bytes else ""
    if cell.step.unusual().keys() & set(SHOWN_OPTIONS):
        words = f"{cell.step.engine}/{cell.step.recompute} x{cell.accum} {words}"
    return f"{cut(cell.model, 16):>6} {cell.batch:>5} {cell.length:>6} {tok_s:>9} {step:>9} {peak:>9}  {words}"


SUMMARY_HEAD = ("model", "step", "fit", "tok/s", "B x L", "peak")


def summary(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """A row of text under SUMMARY_HEAD for each series of one device, the one measured last at the end: the model (and its
    vocabulary, v50257, if not the usual), engine/recompute (and accumulation, x2, above 1), how many of its cells fit,
    and tok/s, batch x length and peak of the fastest that does."""
    records = list(records)
    last = {r.cell.series: i for i, r in enumerate(records)}
    rows: list[tuple[str, ...]] = []
    for series, of_series in sorted(series_of(records).items(), key=lambda item: last[item[0]]):
        fitting = [r for r in of_series if r.fits]
        best = max(fitting, key=lambda r: r.tok_s, default=None)
        model = cut(series.model, 16) + f" v{series.vocab}" * (series.vocab != VOCAB)
        figures = (tok_s_text(best), f"{best.cell.batch} x {best.cell.length}", format_bytes(best.peak_bytes)) if best else (
            ("-",) * 3)
        rows.append((model, _option_text(series), f"{len(fitting)}/{len(of_series)}", *figures))
    return rows


def _option_text(cell: Cell) -> str:
    """`"graph/none x2"`, and what else is unusual."""
    extra = [str(value) for name, value in cell.step.unusual().items() if name not in SHOWN_OPTIONS]
    return " ".join([f"{cell.step.engine}/{cell.step.recompute}", *[f"x{cell.accum}"] * (cell.accum > 1), *extra])


def map_lines(records: list[Record], limit_bytes: int | None, cliff_bytes: int | None, width: int = 80) -> list[str]:
    """Both maps of one series and their legend in ASCII, no line wider than `width` columns (at least 25). Batches go down,
    lengths across; the maps are side by side where that fits, else one under the other, in blocks of lengths if need be."""
    width = max(width, NARROWEST)
    cells = CellMap.of(records, limit_bytes, cliff_bytes)
    title = "".join(c if " " <= c <= "~" else "?" for c in series_title(records[0].cell))
    return [*textwrap.wrap(title, width), "", *_maps(cells, width), "", *_legend(cells, width)]


@dataclass(frozen=True)
class _Sheet:
    """One map's text by place, and how wide its columns are: the cliff's own, a blank, the longest text, the mark's own."""

    name: str
    texts: dict[tuple[int, int], str]
    wide: tuple[int, ...]

    @classmethod
    def of(cls, cells: CellMap, name: str, figure: Callable[[Record], str]) -> "_Sheet":
        rows = range(len(cells.batches))
        texts = {(r, c): cells.text((r, c), figure) for r in rows for c in range(len(cells.lengths))}
        return cls(name, texts, tuple(3 + max(len(str(length)), *(len(texts[r, c]) for r in rows))
                                      for c, length in enumerate(cells.lengths)))


def _maps(cells: CellMap, width: int) -> list[str]:
    every = range(len(cells.lengths))
    labels = _labels(cells, every)
    room = width - len(labels[0])
    peak = _Sheet.of(cells, "peak GB", peak_text)
    full, short = (_Sheet.of(cells, "tok/s", figure) for figure in (tok_s_text, short_tok_s_text))
    for tok_s in (full, short):
        beside = [a + b + GAP + c for a, b, c in
                  zip(labels, _map(cells, tok_s, every), _map(cells, peak, every), strict=True)]
        if len(beside[0]) <= width:
            return [line.rstrip() for line in beside]
    drawn: list[str] = []
    for sheet in (full if sum(full.wide) <= room else short, peak):
        for block in _blocks(sheet.wide, room):
            drawn += [""] * bool(drawn)
            drawn += [(a + b).rstrip() for a, b in zip(_labels(cells, block), _map(cells, sheet, block), strict=True)]
    return drawn


def _blocks(wide: tuple[int, ...], room: int) -> list[range]:
    """The columns in runs that are at most `room` wide together."""
    blocks, start, used = [], 0, 0
    for c, columns in enumerate(wide):
        if c > start and used + columns > room:
            blocks.append(range(start, c))
            start, used = c, 0
        used += columns
    return [*blocks, range(start, len(wide))]


def _labels(cells: CellMap, columns: range) -> list[str]:
    rows = ["", "batch"]
    for r, batch in enumerate(cells.batches):
        rows += [""] * any((r, c) in cells.level for c in columns)
        rows.append(str(batch))
    wide = max(map(len, rows))
    return [row.rjust(wide) + " " for row in rows]


def _map(cells: CellMap, sheet: _Sheet, columns: range) -> list[str]:
    """The map of some lengths, line by line as _labels has them, all of one width. The cliff's level edges are a line of
    their own above their row, where there are any."""
    rows = ["".join(f"{cells.lengths[c]:>{sheet.wide[c] - 1}} " for c in columns)]
    for r in range(len(cells.batches)):
        if any((r, c) in cells.level for c in columns):
            rows.append("".join(
                ("|" if (r - 1, c) in cells.upright else "_" if {(r, c - 1), (r, c)} & cells.level else " ")
                + ("_" if (r, c) in cells.level else " ") * (sheet.wide[c] - 1) for c in columns))
        rows.append("".join(
            ("|" if (r, c) in cells.upright else " ") + sheet.texts[r, c].rjust(sheet.wide[c] - 2)
            + cells.mark((r, c)).ljust(1) for c in columns))
    heading = f"  {sheet.name} at length"
    rows.insert(0, heading if len(heading) <= len(rows[0]) else f"  {sheet.name}")
    widest = max(map(len, rows))
    return [row.ljust(widest) for row in rows]


def _legend(cells: CellMap, width: int) -> list[str]:
    """What the signs of this map mean, as many to a line as fit."""
    statuses = {r.status for r in cells.records.values()}
    entries = [f"* fastest that fits{cells.under}" if cells.pick else f"nothing fits{cells.under}"]
    if cells.over:
        entries.append(f"! {cells.over_words}")
    if cells.upright or cells.level:
        entries.append("|__ the cliff")
    if len(cells.records) < len(cells.batches) * len(cells.lengths):
        entries.append(f"{NEVER_RUN} never run")
    entries += [f"{status}: {meaning}" for status, meaning in STATUS_WORDS.items() if status in statuses]
    if any(r.fits and r.peak_bytes is None for r in cells.records.values()):
        entries.append(f"{NO_FIGURE}: this device gives no peak")
    packed = [""]
    for entry in entries:
        if packed[-1] and len(packed[-1] + LEGEND_GAP + entry) > width:
            packed.append("")
        packed[-1] += LEGEND_GAP * bool(packed[-1]) + entry
    return [line for row in packed for line in textwrap.wrap(row, width) or [""]]


def cliff_line(cliff: Cliff) -> str:
    size, fast = format_bytes(cliff.device_bytes), f"{cliff.fast_bytes_s / 1e9:,.0f}"
    return {"collapse": f"cliff: {size} with its context; past it {fast} GB/s fell to "
                        f"{(cliff.slow_bytes_s or 0) / 1e9:,.1f}, without an error",
            "failure": f"cliff: {size} with its context; past it memory can't be had ({fast} GB/s)",
            "reserve": f"no cliff up to {size} with its context ({fast} GB/s); the rest was left alone"}[cliff.kind]


def card_rows(facts: DeviceFacts, free_bytes: int | None, disk_bytes_s: float | None, refusals: Mapping[Any, str | None],
              readings: dict[str, float], memory: dict[str, float], is_on_battery: bool) -> list[tuple[str, str]]:
    """(what, value) of a device: facts, engines, what it takes beside a step's tensors, what it shows now."""
    rows = [("name", facts.name), ("memory", format_bytes(facts.total_bytes)), ("free now", format_bytes(free_bytes)),
            ("capability", "{}.{}".format(*facts.capability) if facts.capability else "-"), ("cores", str(facts.cores)),
            ("torch", facts.torch), ("CUDA", facts.cuda or "-"), ("driver", facts.driver or "-"),
            ("allocator", facts.allocator), ("disk", f"{format_bytes(disk_bytes_s)}/s"),
            ("engines", ", ".join(e for e in ENGINES if not refusals[e])), ("precision", "fp32, TF32 off"),
            ("power", "battery: a run would be refused" if is_on_battery else "mains, or no battery")]
    names = {"context_bytes": "context", "graph_bytes": "graphs", "process_bytes": "process"}
    rows += [(label, f"{format_bytes(memory[key])} beside the tensors") for key, label in names.items() if key in memory]
    readings_shown = {"clock_mhz": ("clock", "{} MHz"), "temperature_c": ("temperature", "{} C"),
                      "power_w": ("draws", "{:.0f} W"), "utilization": ("utilization", "{}%")}
    rows += [(label, text.format(readings[key])) for key, (label, text) in readings_shown.items() if key in readings]
    if "throttle" in readings:
        rows.append(("throttled", "yes" if int(readings["throttle"]) & THROTTLED else "no"))
    return rows


def estimate_lines(cell: Cell, peak: Estimate, about: str) -> list[str]:
    """One cell's peak, part by part."""
    return [f"{cell.model} B={cell.batch} L={cell.length} {cell.step.engine}/{cell.step.recompute} x{cell.accum} on {about}",
            *(f"  {name:12} {format_bytes(size):>10}" for name, size in peak.parts.items()),
            f"peak {format_bytes(peak.device_bytes)}, most in: {peak.moment}; allocated "
            f"{format_bytes(peak.allocated_bytes)}, reserved {format_bytes(peak.reserved_bytes)}"]


ESTIMATE_HEAD = ("cell", "allocated", "reserved", "whole claim", "most in")


def estimate_rows(peaks: dict[Cell, Estimate]) -> list[tuple[str, ...]]:
    return [(f"{c.model} B={c.batch} L={c.length} {c.step.engine}/{c.step.recompute} x{c.accum}",
             format_bytes(e.allocated_bytes), format_bytes(e.reserved_bytes), format_bytes(e.device_bytes), e.moment)
            for c, e in peaks.items()]
