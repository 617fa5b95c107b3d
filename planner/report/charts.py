"""The page's charts. Each is drawn once for a size, None where there is nothing to show."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from planner.decide.calibration import PastRun
from planner.report import ticks
from planner.report.curve import hours_at
from planner.report.drawing import COLOURS, TEXT_PX, Drawing, Size, style_ticks
from planner.report.heatmap import MapCell
from planner.report.page_data import PageData
from planner.report.text import bytes_text, end_of, hours_text, number_text, ratio_text, step_s_text, tok_s_text
from planner.report.ticks import Ticks
from spillcliff.schema import is_number
from trainer.run.receipt import FIGURES

MOST_ROWS = 40
"""Runs or models in a chart, the newest or last ones; more can't be read at a page's width."""
PANEL_PX = 150
"""Height of one of several charts below each other."""
FARTHEST = 1e3
"""A ratio beyond it, either way, is drawn there: so far off it says nothing but that."""

POINT = {"marker": "o", "markersize": 9, "color": COLOURS["accent"], "markeredgecolor": COLOURS["sheet"],
         "markeredgewidth": 1.5, "linestyle": "none"}
MARKS: dict[str, dict[str, Any]] = {
    "fits": POINT,
    "estimated": POINT | {"color": COLOURS["sheet"], "markeredgecolor": COLOURS["accent"], "markersize": 8},
    "over": POINT | {"marker": "D", "color": COLOURS["warn"]},
    "failed": POINT | {"marker": "x", "markeredgecolor": COLOURS["warn"], "markeredgewidth": 2.25},
    "pick": POINT | {"markersize": 18, "color": "none", "markeredgecolor": COLOURS["ink"], "markeredgewidth": 2.25}}
"""Told apart by shape, not by colour alone."""
MEANINGS = {"fits": "fits", "estimated": "estimated", "over": "over the limit", "failed": "failed", "pick": "the pick"}
ROW_MARKS = {"tok_s": POINT, "peak_bytes": POINT | {"marker": "s", "color": COLOURS["ink"]},
             "hours": POINT | {"marker": "D", "color": COLOURS["warn"], "markersize": 8}}
"""Of the figures of a receipt."""


def peaks(page: PageData, size: Size) -> Drawing | None:
    """Peak memory over the tokens of a micro-step, with the limit and the cliff as lines."""
    cells = sorted((cell for each in page.maps for cell in each.cells.values() if cell.peak_bytes),
                   key=lambda cell: (cell.is_pick, not cell.is_estimated))  # what is drawn last is on top
    if not cells:
        return None
    drawing = Drawing.blank(size)
    (axis,) = drawing.axes
    bounds = [(value, name) for value, name in ((page.limit_bytes, "limit"), (page.cliff_bytes, "cliff")) if value]
    top = 1.08 * max([cell.peak_bytes or 0 for cell in cells] + [value for value, _ in bounds])
    tokens = [cell.cell.step.micro_tokens for cell in cells]
    low, high = _spread(min(tokens) / 1.2, max(tokens) * 1.2, 4)
    _scale(axis, "x", low, high, ticks.counts(low, high, size.marks_x), is_log=True)
    _scale(axis, "y", 0, top, ticks.sizes(0, top, size.marks_y))
    _name(axis, "peak memory", "tokens in a micro-step (batch x length)")
    for i, (value, name) in enumerate(sorted(bounds)):
        _bound(axis, value, name, is_below=i == 0 and len(bounds) == 2)
    for cell in cells:
        if cell.is_pick:
            _mark_cell(drawing, cell, "pick")
        _mark_cell(drawing, cell, cell.kind)
    kinds = {cell.kind for cell in cells} | {"pick" for cell in cells if cell.is_pick}
    _legend(drawing, size, {MEANINGS[kind]: style for kind, style in MARKS.items() if kind in kinds})
    return drawing


def _mark_cell(drawing: Drawing, cell: MapCell, kind: str) -> None:
    drawing.mark(drawing.axes[0], cell.cell.step.micro_tokens, cell.peak_bytes or 0, f"{cell.cell.model} {cell.title}",
                 **MARKS[kind])


def _bound(axis: Any, value: float, name: str, is_below: bool) -> None:
    """A line of its own kind; of two that lie close the lower one's words go below it."""
    style = {"limit": {"color": COLOURS["ink"], "linewidth": 1.75, "linestyle": (0, (4, 2.5))},
             "cliff": {"color": COLOURS["cliff"], "linewidth": 3}}[name]
    axis.axhline(value, clip_on=False, **style)
    axis.annotate(f"{name} {bytes_text(value)}", (0, value), xycoords=("axes fraction", "data"), fontsize=TEXT_PX,
                  textcoords="offset points", xytext=(6, -4 if is_below else 4), va="top" if is_below else "bottom",
                  color=style["color"], annotation_clip=False)


def hours(page: PageData, size: Size) -> Drawing | None:
    """Hours over the tokens seen, the band around them, the corpora of the table, and a marker at the plan's tokens that
    the page's script moves."""
    points = page.curve
    if page.plan is None or len(points) < 2:
        return None
    drawing = Drawing.blank(size)
    (axis,) = drawing.axes
    low, high = points[0][0], points[-1][0]
    shortest, longest = _spread(min(p[1] for p in points), max(p[3] for p in points), 4)
    _scale(axis, "x", low, high, ticks.counts(low, high, size.marks_x), is_log=True)
    _scale(axis, "y", shortest, longest, is_log=True, marks=[
        (v / 3600, text) for v, text in ticks.durations(shortest * 3600, longest * 3600, size.marks_y)])
    _name(axis, "time", "tokens seen (corpus x epochs)")
    tokens, lows, mids, highs = zip(*points, strict=True)
    axis.fill_between(tokens, lows, highs, color=COLOURS["accent"], alpha=0.2, linewidth=0, clip_on=False)
    axis.plot(tokens, mids, color=COLOURS["accent"], linewidth=1.75, clip_on=False)
    for corpus in page.corpora:
        tokens_seen = corpus.tokens * page.plan.epochs
        if low <= tokens_seen <= high and shortest <= corpus.hours.mid <= longest:
            drawing.mark(axis, tokens_seen, corpus.hours.mid, f"{corpus.name} tokens: {hours_text(corpus.hours.mid)}",
                         marker="o", markersize=5, color=COLOURS["ink"])
            if size.is_wide:
                axis.annotate(hours_text(corpus.hours.mid), (tokens_seen, corpus.hours.mid), textcoords="offset points",
                              xytext=(8, -14), fontsize=TEXT_PX, color=COLOURS["ink"])
    tokens_seen = page.plan.corpus_tokens * page.plan.epochs
    at = min(max(tokens_seen, low), high), min(max(hours_at(points, tokens_seen).mid, shortest), longest)
    axis.plot(*at, gid="marker", clip_on=False, **MARKS["pick"])
    drawing.has_marker = True
    return drawing


def soak(page: PageData, size: Size) -> Drawing | None:
    """Seconds of a step over time, and the temperature below it where a card tells one; nothing without two windows."""
    windows = page.soak.windows if page.soak else ()
    if len(windows) < 2:
        return None
    heats = [(w.at_s, w.temperature_c) for w in windows if w.temperature_c is not None]
    panels: list[tuple[str, Sequence[tuple[float, float]], Callable[[object], str]]] = [
        ("step", [(w.at_s, w.step_s) for w in windows], step_s_text)]
    if len(heats) > 1:
        panels.append(("temperature", heats, lambda v: number_text(v, "{:.0f} °C".format)))
    drawing = Drawing.blank(size, height=PANEL_PX * len(panels), rows=len(panels))
    for axis, (name, values, text) in zip(drawing.axes, panels, strict=True):
        low, high = min(v for _, v in values), max(v for _, v in values)
        more = max((high - low) * 0.15, abs(high) * 0.01, 1e-9)
        is_last = axis is drawing.axes[-1]
        _scale(axis, "x", windows[0].at_s, windows[-1].at_s,
               ticks.clock(windows[0].at_s, windows[-1].at_s, size.marks_x) if is_last else [])
        _scale(axis, "y", low - more, high + more, [(v, text(v)) for v in ticks.linear(low - more, high + more, 3)])
        _name(axis, name, "time under load" if is_last else "")
        axis.plot(*zip(*values, strict=True), color=COLOURS["accent"], linewidth=1.75, clip_on=False)
    return drawing


def receipts(page: PageData, size: Size) -> Drawing | None:
    """Actual over planned of each run, a row of marks; the newest MOST_ROWS."""
    shown = [run for run in page.past if _ratios(run)][-MOST_ROWS:]
    if not shown:
        return None
    drawing = Drawing.blank(size, height=90 + 28 * len(shown))
    (axis,) = drawing.axes
    far = 1.15 * max(0.05, *(abs(math.log(ratio)) for run in shown for ratio in _ratios(run).values()))
    low, high = math.exp(-far), math.exp(far)
    _scale(axis, "x", low, high, ticks.differences(low, high, size.marks_x - 1), is_log=True)
    _scale(axis, "y", len(shown) - 0.5, -0.5, [
        (row, end_of(run.run, 34 if size.is_wide else 16)) for row, run in enumerate(shown)])
    axis.grid(axis="x", color=COLOURS["rule"], linewidth=1, clip_on=False)
    axis.axvline(1, color=COLOURS["quiet"], linewidth=1, clip_on=False)
    for row, run in enumerate(shown):
        for key, ratio in _ratios(run).items():
            title = f"{run.run}: {FIGURES[key]} {ratio_text(run.receipt['ratio'][key])}"
            drawing.mark(axis, ratio, row, title, **ROW_MARKS[key])
    _legend(drawing, size, {FIGURES[key]: style for key, style in ROW_MARKS.items()})
    return drawing


def _ratios(run: PastRun) -> dict[str, float]:
    """Actual over planned of the figures that a receipt has, kept where an axis can reach it."""
    ratios = {key: run.receipt["ratio"].get(key) for key in FIGURES}
    return {key: min(max(ratio, 1 / FARTHEST), FARTHEST) for key, ratio in ratios.items() if is_number(ratio, 1e-300)}


def models(page: PageData, size: Size) -> Drawing | None:
    """tok/s, peak and hours of each model as bars; nothing for one alone."""
    rows = page.models[-MOST_ROWS:]
    if len(rows) < 2:
        return None
    drawing = Drawing.blank(size, height=60 + 28 * len(rows), columns=3)
    columns: tuple[tuple[str, list[float | None], Callable[[object], str]], ...] = (
        ("tok/s", [r.tok_s for r in rows], tok_s_text), ("peak memory", [r.peak_bytes for r in rows], bytes_text),
        ("time", [r.hours.mid if r.hours else None for r in rows], hours_text))
    for axis, (name, values, text) in zip(drawing.axes, columns, strict=True):
        largest = max(v or 0 for v in values) or 1
        shares = [(v or 0) / largest for v in values]
        axis.barh(range(len(rows)), shares, height=0.55, color=COLOURS["accent"])
        for row, value in enumerate(values):
            axis.text(shares[row] + 0.03, row, text(value), va="center", fontsize=TEXT_PX, color=COLOURS["ink"])
        _scale(axis, "x", 0, 1.6, [])
        _scale(axis, "y", len(rows) - 0.5, -0.5, [])
        axis.spines["bottom"].set_visible(False)
        axis.set_title(name, fontsize=TEXT_PX, fontweight="bold", loc="left")
    _scale(drawing.axes[0], "y", len(rows) - 0.5, -0.5, [(i, end_of(row.model, 20)) for i, row in enumerate(rows)])
    return drawing


def _spread(low: float, high: float, least: float) -> tuple[float, float]:
    """The ends of a logarithmic axis, at least a factor of `least` apart."""
    if high / low >= least:
        return low, high
    middle = math.sqrt(low) * math.sqrt(high)
    return middle / math.sqrt(least), middle * math.sqrt(least)


def _scale(axis: Any, which: str, low: float, high: float, marks: Ticks, is_log: bool = False) -> None:
    if is_log:
        axis.set(**{f"{which}scale": "log"})
    axis.set(**{f"{which}lim": (low, high)})
    set_ticks = axis.set_xticks if which == "x" else axis.set_yticks
    set_ticks([value for value, _ in marks], [text for _, text in marks], parse_math=False)
    style_ticks(axis)


def _name(axis: Any, up: str, across: str) -> None:
    """The axes' names, and lines at the marks of the upright one."""
    style = {"fontsize": TEXT_PX, "fontweight": "bold", "color": COLOURS["ink"]}
    axis.set_title(up, loc="left", pad=10, **style)
    axis.set_xlabel(across, loc="right", labelpad=6, **style)
    axis.grid(axis="y", color=COLOURS["rule"], linewidth=1, clip_on=False)


def _legend(drawing: Drawing, size: Size, styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in styles.items()]
    drawing.figure.legend(handles=handles, loc="outside lower left", ncols=5 if size.is_wide else 3, fontsize=TEXT_PX,
                          frameon=False, labelcolor=COLOURS["quiet"], handletextpad=0.2, columnspacing=1, handlelength=1.5)
