"""The page's charts as SVG, each drawn twice: for a desk and for a phone, so that text keeps its size on both."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.report import ticks
from planner.report.curve import Point, hours_at
from planner.report.heatmap import describe, runs
from planner.report.html import bytes_text, count_text, esc, figure, number, ratio_text, step_text

CHARACTER = 6.6
"""Pixels that a figure takes at the charts' 12 pixel text, widely."""


@dataclass(frozen=True)
class Size:
    """Pixels, and how many marks its axes have room for."""

    name: str
    wide: int
    high: int
    across: int
    up: int


SIZES = (Size("wide", 860, 330, 8, 7), Size("narrow", 344, 280, 4, 7))


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


@dataclass(frozen=True)
class Labels:
    """An axis' name, and its marks as (value, text)."""

    name: str
    marks: Sequence[tuple[float, str]]


def _chart(name: str, draw: Callable[[Size], str], note: str = "") -> str:
    return f'<figure class="chart" role="group" aria-label="{esc(name)}">{"".join(map(draw, SIZES))}{note}</figure>'


def _svg(size: Size, name: str, parts: Sequence[str], high: float | None = None, extra: str = "") -> str:
    return (f'<svg class="{size.name}" role="img" aria-label="{esc(name)}" viewBox="0 0 {size.wide} {high or size.high}"'
            f'{extra}>{"".join(parts)}</svg>')


def _text(x: float, y: float, text: str, anchor: str = "start", name: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{name}">{esc(text)}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, name: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{name}"/>'


def _path(points: Sequence[tuple[float, float]], name: str, closed: bool = False) -> str:
    return f'<path class="{name}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}{"Z" * closed}"/>'


def _margin(labels: Labels) -> float:
    return max([24.0, *(len(text) * CHARACTER + 14 for _, text in labels.marks)])


def _grid(x: Axis, y: Axis, across: Labels, up: Labels) -> list[str]:
    """Lines at the marks of `up`, and both axes' marks and names; the plot lies between the ends of `x` and `y`."""
    parts = [_text(0, min(y.start, y.end) - 12, up.name, name="name")]
    for value, text in up.marks:
        parts += [_line(x.start, y.at(value), x.end, y.at(value), "grid"),
                  _text(x.start - 8, y.at(value) + 4, text, "end")]
    base = max(y.start, y.end)
    for value, text in across.marks:
        at = x.at(value)
        room = len(text) * CHARACTER / 2
        parts += [_line(at, base, at, base + 4, "tick"), _text(min(at, x.end + 12 - room), base + 18, text, "middle")]
    return [*parts, _line(x.start, base, x.end, base, "axis"), _text(x.end, base + 36, across.name, "end", "name")]


def _spread(low: float, high: float, least: float) -> tuple[float, float]:
    """The ends of a logarithmic axis, at least a factor of `least` apart."""
    if high / low >= least:
        return low, high
    middle = math.sqrt(low) * math.sqrt(high)
    return middle / math.sqrt(least), middle * math.sqrt(least)


MARKS = {
    "fits": '<circle r="4.5" class="fits"/>', "estimated": '<circle r="4" class="estimated"/>',
    "over": '<path d="M0 -6 L6 0 L0 6 L-6 0Z" class="over"/>',
    "failed": '<path d="M-4.5 -4.5 L4.5 4.5 M-4.5 4.5 L4.5 -4.5" class="failed"/>', "pick": '<circle r="9" class="ring"/>'}
"""Told apart by shape, not by colour alone."""

MEANINGS = {"fits": "fits", "estimated": "estimated", "over": "over the limit", "failed": "failed", "pick": "the pick"}


def _kind(cell: dict) -> str:
    return "over" if cell["over"] else "failed" if not runs(cell) else "estimated" if cell["estimated"] else "fits"


def peaks(series: Sequence[dict], limit_bytes: float | None, cliff_bytes: float | None) -> str:
    """Peak memory over the tokens of a micro-step, with the limit and the cliff as lines; nothing without a peak."""
    found = [(s, c, c["batch"] * c["length"], peak) for s in series for c in s["cells"]
             if (peak := number(c["peak_bytes"])) is not None]
    if not found:
        return ""
    found.sort(key=lambda item: (item[1]["pick"], not item[1]["estimated"]))  # what is drawn last is on top
    bounds = sorted((v, name) for value, name in ((limit_bytes, "limit"), (cliff_bytes, "cliff"))
                    if (v := number(value)) is not None)
    top = max([peak for *_, peak in found] + [v for v, _ in bounds]) * 1.08 or 1.0
    low, high = _spread(min(t for _, _, t, _ in found) / 1.2, max(t for _, _, t, _ in found) * 1.2, 4)
    name = "peak memory of each measured cell against the limit"

    def draw(size: Size) -> str:
        up = Labels("peak memory", [(v, bytes_text(v) if v else "0") for v in ticks.linear(0, top, size.up)])
        across = Labels("tokens in a micro-step (batch x length)",
                        [(v, count_text(v)) for v in ticks.logarithmic(low, high, size.across)])
        x, y = Axis(low, high, _margin(up), size.wide - 14, True), Axis(0, top, size.high - 48, 26)
        parts = _grid(x, y, across, up)
        for i, (value, what) in enumerate(bounds):
            # two lines lie close: the lower one's words go below it
            shift = 15 if i == 0 and len(bounds) == 2 else -6
            parts += [_line(x.start, y.at(value), x.end, y.at(value), what),
                      _text(x.start + 6, y.at(value) + shift, f"{what} {bytes_text(value)}", name=f"{what}-name")]
        for s, c, tokens, peak in found:
            ring = MARKS["pick"] if c["pick"] else ""
            parts.append(f'<g transform="translate({x.at(tokens):.1f} {y.at(peak):.1f})">{ring}{MARKS[_kind(c)]}'
                         f"<title>{esc(s['model'])} {esc(describe(c))}</title></g>")
        return _svg(size, name, parts)

    kinds = {_kind(c) for _, c, _, _ in found} | {"pick" for _, c, _, _ in found if c["pick"]}
    key = "".join(f'<li><svg class="key" viewBox="-10 -10 20 20" aria-hidden="true">{mark}</svg>{MEANINGS[kind]}</li>'
                  for kind, mark in MARKS.items() if kind in kinds)
    return _chart(name, draw, f'<ul class="legend">{key}</ul>')


def hours(points: Sequence[Point], tokens: float) -> str:
    """Hours over the tokens seen, the band around them, and a marker at `tokens` that the page's script moves."""
    low, high = _spread(points[0][0], points[-1][0], 1.01)
    shortest, longest = _spread(min(p[1] for p in points), max(p[3] for p in points), 4)
    now = hours_at(points, tokens)[1]

    def draw(size: Size) -> str:
        up = Labels("time", [(v / 3600, ticks.duration_label(v))
                             for v in ticks.durations(shortest * 3600, longest * 3600, size.up)])
        across = Labels("tokens seen (corpus x epochs)",
                        [(v, count_text(v)) for v in ticks.logarithmic(low, high, size.across)])
        x = Axis(low, high, _margin(up), size.wide - 14, True)
        y = Axis(shortest, longest, size.high - 48, 26, True)
        band = [(x.at(p[0]), y.at(p[1])) for p in points] + [(x.at(p[0]), y.at(p[3])) for p in reversed(points)]
        at = [min(max(v, min(a.start, a.end)), max(a.start, a.end)) for v, a in ((x.at(tokens), x), (y.at(now), y))]
        ends = " ".join(f'data-{name}="{a.low!r} {a.high!r} {a.start!r} {a.end!r}"' for name, a in (("x", x), ("y", y)))
        return _svg(size, "hours over the tokens seen, with the band of the forecast", [
            *_grid(x, y, across, up), _path(band, "band", True), _path([(x.at(p[0]), y.at(p[2])) for p in points], "curve"),
            f'<g class="marker" transform="translate({at[0]:.2f} {at[1]:.2f})"><circle r="9" class="ring"/>'
            '<circle r="4.5" class="fits"/></g>'], extra=f" {ends}")

    return _chart("hours over the tokens seen", draw)


def soak(windows: Sequence[dict]) -> str:
    """Seconds of a step over time, and the temperature below it where a card tells one; nothing without two windows."""
    rows = [(at, step, number(w["temperature_c"])) for w in windows
            if (at := number(w["at_s"])) is not None and (step := number(w["step_s"])) is not None]
    if len(rows) < 2 or not rows[-1][0] > rows[0][0]:
        return ""
    heats = [(at, heat) for at, _, heat in rows if heat is not None]
    panels = [("step", [(at, step) for at, step, _ in rows], step_text)]
    panels += [("temperature", heats, lambda v: figure(v, "{:.0f} °C".format))] if len(heats) > 1 else []
    name = "step time and temperature under load"
    each, gap = 104, 44

    def draw(size: Size) -> str:
        parts = []
        total = len(panels) * (each + gap) + 24
        ups = []
        for title, values, text in panels:
            low, high = min(v for _, v in values), max(v for _, v in values)
            more = max((high - low) * 0.15, abs(high) * 0.01) or 1.0
            low, high = low - more, high + more
            ups.append((low, high, Labels(title, [(v, text(v)) for v in ticks.linear(low, high, 3)])))
        left = max(_margin(up) for _, _, up in ups)
        across = Labels("time under load", [(v, ticks.duration_label(v) if v else "0")
                                            for v in ticks.clock(rows[0][0], rows[-1][0], size.across)])
        x = Axis(rows[0][0], rows[-1][0], left, size.wide - 14)
        for i, ((low, high, up), (_, values, _)) in enumerate(zip(ups, panels, strict=True)):
            top = 26 + i * (each + gap)
            y = Axis(low, high, top + each, top)
            last = i == len(panels) - 1
            parts += _grid(x, y, across if last else Labels("", []), up)
            parts.append(_path([(x.at(at), y.at(v)) for at, v in values], "curve"))
        return _svg(size, name, parts, total)

    return _chart(name, draw)


RATIOS = (("tok_s", "tok/s"), ("peak_bytes", "peak"), ("hours", "time"))


def drawn_ratio(receipt: dict, key: str) -> float | None:
    """Actual over planned, kept where an axis can reach it; None where it is unknown."""
    value = number(receipt["ratio"].get(key))
    return None if value is None or value <= 0 else min(max(value, 1e-3), 1e3)


def reach(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis with 1 in its middle that holds `values`, and 5% at least."""
    far = max([0.05, *(abs(math.log(v)) for v in values)]) * 1.15
    return math.exp(-far), math.exp(far)


def ratios(receipts: Sequence[dict]) -> str:
    """Actual over planned, a row of dots for each of RATIOS; nothing without one."""
    found = {key: [(v, r) for r in receipts if (v := drawn_ratio(r, key)) is not None] for key, _ in RATIOS}
    values = [v for of_key in found.values() for v, _ in of_key]
    if not values:
        return ""
    low, high = reach(values)
    name = "actual over planned, of every run"

    def draw(size: Size) -> str:
        x = Axis(low, high, 64, size.wide - 24, True)
        base = 22 + 34 * len(RATIOS)
        parts = []
        for v, text in ticks.differences(low, high, size.across - 1):
            parts += [_line(x.at(v), 12, x.at(v), base, "axis" if v == 1 else "grid"),
                      _text(x.at(v), base + 18, text, "middle")]
        for i, (key, label) in enumerate(RATIOS):
            y = 30 + 34 * i
            parts.append(_text(0, y + 4, label, name="name"))
            for value, r in found[key]:
                text = esc(f"{r['run']}: {label} {ratio_text(r['ratio'][key])}")
                parts.append(f'<g transform="translate({x.at(value):.1f} {y})">{MARKS["fits"]}<title>{text}</title></g>')
        return _svg(size, name, parts, base + 26)

    return _chart(name, draw)

