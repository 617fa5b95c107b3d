"""Maps of tok/s and peak memory over batch and length: what a terminal, a picture and the page all show."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from probe.cell import Cell
from probe.records import BEYOND, Record, Status, latest
from spillcliff.errors import UserError
from spillcliff.units import format_bytes
from trainer.config import VOCAB

NEVER_RUN = "-"
NO_FIGURE = "n/a"
"""What a cell that fits shows on a device that gives no peak."""

STATUS_WORDS = {
    Status.THRASHES: "the allocator freed its cache and asked again", Status.SPILLS: "into system memory",
    Status.OOM: "out of memory", Status.TIMEOUT: "too slow to be measured", Status.CRASHED: "by another error",
    Status.CONTENDED: "another program used the device"}

Place = tuple[int, int]
"""(row, column) of the sorted batches and lengths."""


def series_title(cell: Cell) -> str:
    """What the cells of one map have in common with `cell`, in words."""
    extra = f", vocabulary {cell.vocab:,}" * (cell.vocab != VOCAB)
    extra += "".join(f", {name} {value}" for name, value in cell.step.unusual().items() if name not in SHOWN_OPTIONS)
    return (f"{cut(cell.model, 40)}, {cell.step.engine}, recompute {cell.step.recompute}, accumulation {cell.accum}{extra}")


def series_file_name(cell: Cell) -> str:
    """The same for a file's name."""
    extra = [f"accum{cell.accum}"] * (cell.accum > 1) + [f"v{cell.vocab}"] * (cell.vocab != VOCAB)
    extra += [str(value) for name, value in cell.step.unusual().items() if name not in SHOWN_OPTIONS]
    model = "".join(c if c.isalnum() or c in "._-" else "-" for c in cell.model)
    return "-".join([model, cell.step.engine, cell.step.recompute, *extra])


SHOWN_OPTIONS = ("accum", "engine", "recompute")
"""Options of a step that are always told; others only where they are unusual."""


Places = frozenset[Place]


def frontier(rows: int, columns: int, good: Iterable[Place], failed: Iterable[Place]) -> tuple[
        Places, Places, Places, Places]:
    """The cells on either side of the cliff and its edges, as CellMap has them: good, bad, upright, level. `failed` cells
    are known to be beyond it; those that are neither and lie past one are bad with it."""
    good, failed = frozenset(good), frozenset(failed)
    places = [(r, c) for r in range(rows) for c in range(columns)]
    beyond: set[Place] = set()
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
        fitting = {at for at, r in placed.items() if r.fits}
        over = {at for at in fitting if bound and (placed[at].peak_bytes or 0) > bound[0]}
        good, bad, upright, level = frontier(
            len(batches), len(lengths), fitting - over, over | {at for at, r in placed.items() if r.status in BEYOND})
        return cls(batches, lengths, placed, bound, frozenset(over), good, bad, upright, level,
                   pick=max(good, key=lambda at: (placed[at].tok_s, at), default=None))

    @property
    def under(self) -> str:
        """`" under the 5.0 GB limit"`, or nothing where there is no bound."""
        return f" under the {format_bytes(self.bound[0])} {self.bound[1]}" if self.bound else ""

    @property
    def over_words(self) -> str:
        """`"over the 5.0 GB limit"`, or nothing where there is no bound."""
        return f"over the {format_bytes(self.bound[0])} {self.bound[1]}" if self.bound else ""

    def text(self, at: tuple[int, int], figure: Callable[[Record], str]) -> str:
        """The figure of a cell that fits, else its status, else that it was never run."""
        record = self.records.get(at)
        if record is None:
            return NEVER_RUN
        return figure(record) if record.fits else str(record.status)

    def mark(self, at: tuple[int, int]) -> str:
        return "!" if at in self.over else "*" if at == self.pick else ""


def series_of(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    """The newest record of each cell of one device, by series in order of first appearance; records come oldest first."""
    groups: dict[Cell, list[Record]] = {}
    for record in latest(records).values():
        groups.setdefault(record.cell.series, []).append(record)
    return groups


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


def cut(text: str, most: int) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else text[:most - 3] + "..."
