"""Maps of tok/s and peak memory over batch and length: what a terminal and a picture both show, and the terminal's text."""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from probe.cell import Cell
from probe.records import Record, latest
from spillcliff.errors import UserError
from spillcliff.units import format_bytes
from trainer.config import VOCAB

NEVER_RUN = "-"
NO_FIGURE = "n/a"
"""What a cell that fits shows on a device that gives no peak."""

STATUS_WORDS = {"thrashes": "the allocator freed its cache and asked again", "spills": "into system memory",
                "oom": "out of memory", "timeout": "too slow to be measured", "crashed": "by another error",
                "contended": "another program used the device"}
BEYOND = ("spills", "oom", "thrashes", "timeout")
"""For want of memory or time, so that a larger cell fails too; crashed and contended say nothing of another cell."""

NARROWEST = 25
"""Columns that a batch and a length of 10 digits take with their frame of 5; a narrower terminal gets lines this wide."""

GAP = "  "
LEGEND_GAP = "   "


@dataclass(frozen=True)
class Series:
    """What the cells of one map have in common: all of a Cell but batch and length."""

    model: str
    vocab: int
    accum: int
    engine: str
    recompute: str
    update: str

    @classmethod
    def of(cls, cell: Cell) -> "Series":
        return cls(cell.model, cell.vocab, cell.accum, cell.engine, cell.recompute, cell.update)

    @property
    def file_name(self) -> str:
        extra = [f"accum{self.accum}"] * (self.accum > 1) + [f"v{self.vocab}"] * (self.vocab != VOCAB)
        model = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.model)
        return "-".join([model, self.engine, self.recompute, *extra, *["backward"] * (self.update == "backward")])

    @property
    def title(self) -> str:
        extra = f", vocabulary {self.vocab:,}" * (self.vocab != VOCAB) + ", update backward" * (self.update == "backward")
        return f"{_cut(self.model, 40)}, {self.engine}, recompute {self.recompute}, accumulation {self.accum}{extra}"


Places = frozenset[tuple[int, int]]
"""(row, column) each: of the sorted batches and lengths."""


def frontier(rows: int, columns: int, good: Iterable[tuple[int, int]], failed: Iterable[tuple[int, int]]) -> tuple[
        Places, Places, Places, Places]:
    """The cells on either side of the cliff and its edges, as CellMap has them: good, bad, upright, level. `failed` cells
    are known to be beyond it; those that are neither and lie past one are bad with it."""
    good, failed = frozenset(good), frozenset(failed)
    places = [(r, c) for r in range(rows) for c in range(columns)]
    beyond = set()
    for r, c in places:
        if (r, c) in failed or (r - 1, c) in beyond or (r, c - 1) in beyond:
            beyond.add((r, c))
    bad = failed | (beyond - good)

    def parted(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return (a in good and b in bad) or (a in bad and b in good)

    return (good, bad, frozenset((r, c) for r, c in places if parted((r, c - 1), (r, c))),
            frozenset((r, c) for r, c in places if parted((r - 1, c), (r, c))))


@dataclass(frozen=True)
class CellMap:
    """The cells of one series by place: (row, column), of the sorted batches and lengths.

    `good` cells fit and are not over `bound`, (bytes, "limit" or "cliff"), the lower of the two; `bad` ones failed for want
    of memory or time, are `over` it, or tell nothing themselves and lie beyond a bad one. Others are on neither side.
    The cliff is every edge between a good and a bad neighbour: `upright` ones left of their place, `level` ones above it.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    records: dict[tuple[int, int], Record]
    bound: tuple[int, str] | None
    over: frozenset[tuple[int, int]]
    good: frozenset[tuple[int, int]]
    bad: frozenset[tuple[int, int]]
    upright: frozenset[tuple[int, int]]
    level: frozenset[tuple[int, int]]
    pick: tuple[int, int] | None

    @classmethod
    def of(cls, records: Iterable[Record], limit_bytes: int | None, cliff_bytes: int | None) -> "CellMap":
        """The map of one series' records, oldest first; UserError if there are none."""
        newest = {(r.cell.batch, r.cell.length): r for r in records}
        if not newest:
            raise UserError("there is no measured cell to show; `probe grid` measures some")
        batches, lengths = (tuple(sorted(set(values))) for values in zip(*newest, strict=True))
        row, column = ({value: i for i, value in enumerate(axis)} for axis in (batches, lengths))
        placed = {(row[batch], column[length]): r for (batch, length), r in newest.items()}
        bound = min(((value, name) for value, name in ((limit_bytes, "limit"), (cliff_bytes, "cliff")) if value is not None),
                    default=None)
        fitting = {at for at, r in placed.items() if r.status == "fits"}
        over = {at for at in fitting if bound and (placed[at].peak_bytes or 0) > bound[0]}
        good, bad, upright, level = frontier(
            len(batches), len(lengths), fitting - over, over | {at for at, r in placed.items() if r.status in BEYOND})
        return cls(batches, lengths, placed, bound, frozenset(over), good, bad, upright, level,
                   pick=max(good, key=lambda at: (placed[at].tok_s, at), default=None))

    @property
    def under(self) -> str:
        """`" under the 5.0 GB limit"`, or nothing where there is no bound."""
        return f" under the {format_bytes(self.bound[0])} {self.bound[1]}" if self.bound else ""

    def text(self, at: tuple[int, int], figure: Callable[[Record], str]) -> str:
        """The figure of a cell that fits, else its status, else that it was never run."""
        record = self.records.get(at)
        if record is None:
            return NEVER_RUN
        return figure(record) if record.status == "fits" else record.status

    def mark(self, at: tuple[int, int]) -> str:
        return "!" if at in self.over else "*" if at == self.pick else ""


def series_of(records: Iterable[Record]) -> dict[Series, list[Record]]:
    """The newest record of each cell of one device, by series in order of first appearance; records come oldest first."""
    found: dict[Series, list[Record]] = {}
    for record in latest(records).values():
        found.setdefault(Series.of(record.cell), []).append(record)
    return found


SUMMARY_HEAD = ("model", "step", "fit", "tok/s", "B x L", "peak")


def summary(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """A row of text under SUMMARY_HEAD for each series of one device, the one measured last at the end: the model (and its
    vocabulary, v50257, if not the usual), engine/recompute (and accumulation, x2, above 1), how many of its cells fit,
    and tok/s, batch x length and peak of the fastest that does."""
    records = list(records)
    last = {Series.of(r.cell): i for i, r in enumerate(records)}
    rows = []
    for series, of_series in sorted(series_of(records).items(), key=lambda item: last[item[0]]):
        fitting = [r for r in of_series if r.status == "fits"]
        best = max(fitting, key=lambda r: r.tok_s, default=None)
        model = _cut(series.model, 16) + f" v{series.vocab}" * (series.vocab != VOCAB)
        step = (f"{series.engine}/{series.recompute}" + f" x{series.accum}" * (series.accum > 1)
                + " backward" * (series.update == "backward"))
        figures = (tok_s_text(best), f"{best.cell.batch} x {best.cell.length}", format_bytes(best.peak_bytes)) if best else (
            ("-",) * 3)
        rows.append((model, step, f"{len(fitting)}/{len(of_series)}", *figures))
    return rows


def tok_s_text(record: Record) -> str:
    """`"38,932"`; slow ones with a decimal, `"0.3"`, and what no card reaches shortened."""
    value = record.tok_s
    if value >= 1e8:
        return short_tok_s_text(record)
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def short_tok_s_text(record: Record) -> str:
    """Three digits: `"8.03k"`, `"38.9k"`, `"1.24M"`."""
    value = record.tok_s
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:
            return f"{value / scale:#.3g}".removesuffix(".") + unit
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def peak_text(record: Record) -> str:
    """Peak memory in GB, `"4.04"`."""
    if record.peak_bytes is None:
        return NO_FIGURE
    gb = record.peak_bytes / 1e9
    return f"{gb:.2f}" if gb < 1e5 else f"{gb:.1e}"


def lines(records: list[Record], limit_bytes: int | None, cliff_bytes: int | None, width: int = 80) -> list[str]:
    """Both maps of one series and their legend in ASCII, no line wider than `width` columns (at least 25). Batches go down,
    lengths across; the maps are side by side where that fits, else one under the other, in blocks of lengths if need be."""
    width = max(width, NARROWEST)
    cells = CellMap.of(records, limit_bytes, cliff_bytes)
    title = "".join(c if " " <= c <= "~" else "?" for c in Series.of(records[0].cell).title)
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
    drawn = []
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
    found = {r.status for r in cells.records.values()}
    entries = [f"* fastest that fits{cells.under}" if cells.pick else f"nothing fits{cells.under}"]
    if cells.over:
        entries.append(f"! over the {format_bytes(cells.bound[0])} {cells.bound[1]}")
    if cells.upright or cells.level:
        entries.append("|__ the cliff")
    if len(cells.records) < len(cells.batches) * len(cells.lengths):
        entries.append(f"{NEVER_RUN} never run")
    entries += [f"{status}: {meaning}" for status, meaning in STATUS_WORDS.items() if status in found]
    if any(r.status == "fits" and r.peak_bytes is None for r in cells.records.values()):
        entries.append(f"{NO_FIGURE}: this device gives no peak")
    packed = [""]
    for entry in entries:
        if packed[-1] and len(packed[-1] + LEGEND_GAP + entry) > width:
            packed.append("")
        packed[-1] += LEGEND_GAP * bool(packed[-1]) + entry
    return [line for row in packed for line in textwrap.wrap(row, width) or [""]]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most - 3] + "..."


ROW_HEAD = f"{'model':>6} {'batch':>5} {'length':>6} {'tok/s':>9} {'step':>9} {'peak':>9}  verdict"


def row(cell: Cell, record: Record | None, note: str) -> str:
    """A line under ROW_HEAD for a cell as it is done: its record, or None and in `note` why it was not run."""
    words, tok_s, step, peak = f"not run: {note}", "", "", ""
    if record:
        words = record.status + (f": {record.why}" if record.why else f" ({note})" if note else "")
        tok_s = tok_s_text(record) if record.step_s else ""
        step = f"{record.median_step_s * 1000:,.1f} ms" if record.step_s else ""
        peak = format_bytes(record.peak_bytes) if record.peak_bytes else ""
    if (cell.engine, cell.recompute, cell.accum) != ("eager", "none", 1):
        words = f"{cell.engine}/{cell.recompute} x{cell.accum} {words}"
    return f"{_cut(cell.model, 16):>6} {cell.batch:>5} {cell.length:>6} {tok_s:>9} {step:>9} {peak:>9}  {words}"
