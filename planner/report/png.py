"""The page's charts as PNG files, for where HTML can't be shown."""

import io
from collections.abc import Callable
from pathlib import Path

from planner.report import ticks
from planner.report.charts import RATIOS, drawn_ratio, reach
from planner.report.curve import usable
from planner.report.html import bytes_text, count_text, hours_text, number, tok_s_text
from spillcliff.files import write_atomic

INK, ACCENT, WARN, BAND = "#182126", "#0b6872", "#a33a00", "#0b687233"
DPI = 130
WIDE_IN = 7.0
MOST_ROWS = 40
"""Runs or models in a picture, the newest or last ones; more can't be read at a page's width."""
CUT = 34
"""Characters of a name."""


def draw(data: dict, folder: Path) -> list[Path]:
    """Writes hours.png, sizes.png (of more than one model) and receipts.png (of runs, if any) into `folder`, and returns
    those written. `data` is that of planner.report.page.html_page. UserError if they can't be written."""
    written = []
    figures = {"hours": _hours(data), "sizes": _sizes(data["sizes"]), "receipts": _receipts(data["receipts"])}
    for name, drawn in figures.items():
        if drawn is not None:
            buffer = io.BytesIO()
            drawn.savefig(buffer, format="png", dpi=DPI)
            path = Path(folder) / f"{name}.png"
            write_atomic(path, buffer.getvalue())
            written.append(path)
    return written


def _figure(high: float, columns: int = 1):
    """A figure of `high` inches, and its axes beside each other, without frames."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE_IN, high), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[:].set_color("0.6")
        axis.tick_params(labelsize=9, colors=INK, which="both", length=3, color="0.6")
        axis.minorticks_off()
        axis.set_axisbelow(True)
    return figure, axes


def _hours(data: dict):
    """Hours over the tokens seen, with the band and the corpora of the table."""
    points = usable(data["curve"])
    if len(points) < 2:
        return None
    figure, (axis,) = _figure(4.2)
    tokens, low, mid, high = zip(*points, strict=True)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.fill_between(tokens, low, high, color=BAND, linewidth=0, label="low to high")
    axis.plot(tokens, mid, color=ACCENT, linewidth=1.8, label="hours")
    marked = usable([row[1:] for row in data["corpora"]])
    axis.plot([m[0] for m in marked], [m[2] for m in marked], "o", color=INK, markersize=5)
    for seen, _, hours, _ in marked:
        axis.annotate(hours_text(hours), (seen, hours), textcoords="offset points", xytext=(7, -11), fontsize=9, color=INK)
    across = ticks.logarithmic(tokens[0], tokens[-1], 8)
    up = ticks.durations(min(low) * 3600, max(high) * 3600, 8)
    axis.set_xticks(across, map(count_text, across))
    axis.set_yticks([v / 3600 for v in up], map(ticks.duration_label, up))
    axis.minorticks_off()
    axis.grid(color="0.9")
    axis.set_xlabel("tokens seen (corpus x epochs)", fontsize=9)
    axis.set_title(_cut(data["title"], 70), fontsize=10, loc="left", parse_math=False)
    axis.legend(fontsize=9, frameon=False, loc="upper left")
    return figure


def _sizes(sizes: list[dict]):
    """tok/s, peak and hours of each model as bars."""
    if len(sizes) < 2:
        return None
    sizes = sizes[-MOST_ROWS:]
    figure, axes = _figure(1.0 + 0.34 * len(sizes), 3)
    hours = [(s["hours"] or {}).get("mid") for s in sizes]
    for axis, title, values, text in ((axes[0], "tok/s", [s["tok_s"] for s in sizes], tok_s_text),
                                      (axes[1], "peak memory", [s["peak_bytes"] for s in sizes], bytes_text),
                                      (axes[2], "time", hours, hours_text)):
        _bars(axis, title, values, text)
    axes[0].set_yticks(range(len(sizes)), [_cut(s["model"], 20) for s in sizes], parse_math=False)
    return figure


def _bars(axis, title: str, values: list[float | None], text: Callable[[object], str]) -> None:
    known = [number(v) or 0.0 for v in values]
    largest = max(known) or 1.0
    axis.barh(range(len(known)), [v / largest for v in known], height=0.55, color=ACCENT)
    for row, value in enumerate(values):
        axis.text(known[row] / largest + 0.03, row, text(value), va="center", fontsize=9, color=INK)
    axis.set_xlim(0, 1.6)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines["bottom"].set_visible(False)
    axis.set_title(title, fontsize=10, loc="left")


def _receipts(receipts: list[dict]):
    """Actual over planned of each run, as differences in percent, a mark for each figure."""
    receipts = [r for r in receipts if any(drawn_ratio(r, key) for key, _ in RATIOS)][-MOST_ROWS:]
    if not receipts:
        return None
    figure, (axis,) = _figure(1.5 + 0.3 * len(receipts))
    found = []
    for (key, label), marker, colour in zip(RATIOS, "osD", (ACCENT, INK, WARN), strict=True):
        marks = [(v, row) for row, r in enumerate(receipts) if (v := drawn_ratio(r, key)) is not None]
        axis.plot([v for v, _ in marks], [row for _, row in marks], marker, color=colour, label=label, markersize=6,
                  markeredgecolor="white")
        found += [v for v, _ in marks]
    low, high = reach(found)
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xticks(*zip(*ticks.differences(low, high, 7), strict=True))
    axis.minorticks_off()
    axis.axvline(1, color="0.5", linewidth=1)
    axis.grid(color="0.9")
    axis.set_yticks(range(len(receipts)), [_cut(r["run"], CUT) for r in receipts], parse_math=False)
    axis.set_ylim(len(receipts) - 0.5, -0.5)
    figure.legend(loc="outside lower right", ncols=3, fontsize=9, frameon=False)
    return figure


def _cut(text: object, most: int) -> str:
    """The end of a long text: that is where paths differ."""
    text = str(text).encode("utf-8", "replace").decode().replace("\n", " ")
    return text if len(text) <= most else "..." + text[3 - most:]
