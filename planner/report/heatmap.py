"""A map of tok/s over batch and length as an HTML table, with the cliff as a line through it."""

from collections.abc import Iterable

from planner.report.html import bytes_text, esc, number, scroller, span_text, tok_s_text
from probe.show.heatmap import BEYOND, STATUS_WORDS, Series, frontier

SHADES = 9
"""Steps of the colour ramp, classes q0 to q8 in page.html."""

Place = tuple[int, int]


def ends(all_series: Iterable[dict]) -> tuple[float, float]:
    """The lowest and the highest tok/s that are shaded: one scale for all maps, so that they can be compared."""
    known = [v for s in all_series for cell in s["cells"] if runs(cell) and (v := number(cell["tok_s"])) is not None]
    return min(known, default=0.0), max(known, default=0.0)


def heat_map(series: dict, low: float, high: float) -> str:
    """The map of one series, shaded from `low` to `high` tok/s, and its legend; nothing if it has no cells."""
    newest = {}
    for cell in sorted(series["cells"], key=lambda cell: not cell["estimated"]):
        newest[cell["batch"], cell["length"]] = cell
    if not newest:
        return ""
    batches, lengths = (sorted(set(values)) for values in zip(*newest, strict=True))
    cells = {(batches.index(b), lengths.index(n)): cell for (b, n), cell in newest.items()}
    over = {at for at, cell in cells.items() if cell["over"]}
    fitting = {at for at, cell in cells.items() if runs(cell)} - over
    failed = over | {at for at, cell in cells.items() if cell["status"] in BEYOND}
    *_, upright, level = frontier(len(batches), len(lengths), fitting, failed)

    def shade(cell: dict) -> str:
        value = number(cell["tok_s"])
        if not runs(cell) or value is None:
            return ""
        return f" q{min(SHADES - 1, int((value - low) / (high - low) * SHADES))}" if high > low else f" q{SHADES // 2}"

    def drawn(at: Place) -> str:
        edges = " up" * (at in upright) + " level" * (at in level)
        if at not in cells:
            return f'<td class="none{edges}"><span aria-label="never run">·</span></td>'
        return _cell(cells[at], shade(cells[at]) + edges)

    rows = "\n".join(f'<tr><th scope="row">{batch:,}</th>{"".join(drawn((r, c)) for c in range(len(lengths)))}</tr>'
                     for r, batch in enumerate(batches))
    heads = "".join(f'<th scope="col">{length:,}</th>' for length in lengths)
    name = f"tok/s over batch and length: {series_title(series)}"
    return (scroller(name, f'<table class="map"><thead><tr><th class="corner" scope="col">batch<span> \\ </span>length</th>'
                           f'{heads}</tr></thead>\n<tbody>{rows}</tbody></table>')
            + _legend(cells, len(batches) * len(lengths), bool(upright or level), low, high))


def series_title(series: dict) -> str:
    return Series(**{name: series[name] for name in ("model", "vocab", "accum", "engine", "recompute", "update")}).title


def runs(cell: dict) -> bool:
    """Whether a cell has a throughput to be shaded by: measured as fitting, or estimated and not known to fail."""
    return cell["status"] == "fits" or (cell["estimated"] and cell["status"] not in STATUS_WORDS)


def describe(cell: dict) -> str:
    """A cell in words, for whoever points at it."""
    about = "~" * cell["estimated"]
    parts = ["estimated" if cell["estimated"] else cell["status"]]
    if number(cell["tok_s"]) is not None:
        between = (cell["tok_s_low"], cell["tok_s_high"])
        band = f" ({span_text(*between, tok_s_text)})" if cell["estimated"] and None not in between else ""
        parts.append(f"{about}{tok_s_text(cell['tok_s'])} tok/s{band}")
    if number(cell["peak_bytes"]) is not None:
        parts.append(f"peak {about}{bytes_text(cell['peak_bytes'])}" + ", over the limit" * cell["over"])
    why = f"; {cell['why']}" if cell["why"] else ""
    return f"B={cell['batch']} L={cell['length']}: {', '.join(map(str, parts))}{why}"


def _cell(cell: dict, classes: str) -> str:
    about = "~" * cell["estimated"]
    works = runs(cell)
    main = about + (tok_s_text(cell["tok_s"]) if works else esc(cell["status"]))
    peak = about + bytes_text(cell["peak_bytes"]) if number(cell["peak_bytes"]) is not None else ""
    flags = '<span class="flag">over</span>' * cell["over"] + '<span class="flag picked">pick</span>' * cell["pick"]
    names = "".join(f" {name}" for name, holds in (("failed", not works), ("over", cell["over"]), ("pick", cell["pick"]),
                                                   ("estimated", cell["estimated"])) if holds)
    return (f'<td class="cell{names}{classes}" title="{esc(describe(cell))}"><b>{main}</b><small>{esc(peak)}</small>{flags}'
            "</td>")


def _legend(cells: dict[Place, dict], places: int, cliff: bool, low: float, high: float) -> str:
    """What the signs of this map mean, those that are in it."""
    found = {cell["status"] for cell in cells.values()}
    entries = []
    if any(runs(cell) for cell in cells.values()):
        ramp = "".join(f'<i class="q{i}"></i>' for i in range(SHADES)) if high > low else ""
        entries.append(f'<span class="ramp">{ramp}</span>{span_text(low, high, tok_s_text)} tok/s over all maps; peak below')
    if any(cell["pick"] for cell in cells.values()):
        entries.append('<span class="sign pick"></span>the pick')
    if cliff:
        entries.append('<span class="sign cliff"></span>the cliff: fits on one side, fails on the other')
    if any(cell["over"] for cell in cells.values()):
        entries.append('<span class="flag">over</span>its peak is over the limit')
    if any(cell["estimated"] for cell in cells.values()):
        entries.append("<span><i>~ estimated</i>, not measured</span>")
    if len(cells) < places:
        entries.append("· never run")
    entries += [f"<b>{status}</b> {esc(meaning)}" for status, meaning in STATUS_WORDS.items() if status in found]
    return '<ul class="legend">' + "".join(f"<li>{entry}</li>" for entry in entries) + "</ul>"
