"""The maps of tok/s and peak memory over batch and length as a picture."""

import io
import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from probe.cliff import Cliff
from probe.records import Record
from probe.show.heatmap import CellMap, Place, peak_text, series_file_name, series_of, series_title, tok_s_text
from probe.store import DeviceFolder
from spillcliff.files import write_atomic

CELL_IN = 0.92, 0.4
"""Inches: "1,234,567" and "contended" at 9 points take 0.7."""
FRAME_IN = 2.0, 1.9
"""Inches beside and above the cells: labels, headings, title and legend."""
SMALLEST_IN = 6.4, 2.6
TITLE_PER_IN = 12
"""Characters; at 10 points DejaVu Sans has 13 lower-case ones to an inch."""
ACROSS = 6
"""Lengths up to which the maps are side by side: more make a picture so wide that its text can't be read on a page."""
DPI = 130
MOST_PIXELS = 2e7
MOST_PIXELS_ALONG = 32_000
"""Agg draws at most 2**16 along an axis; a huge grid is drawn coarser instead."""

SHADES = 0.04, 0.42
"""The part of a colour map that is used: black text has a contrast of 10 on it, OVER of 4."""
OVER = "#a00000"
CLIFF = "#d62728"
PLAIN = "0.93"
FAILED: dict[str, Any] = {"facecolor": PLAIN, "edgecolor": "0.8", "hatch": "////"}


def draw_maps(records: list[Record], name: str, limit_bytes: int | None, cliff: Cliff | None,
              folder: DeviceFolder) -> list[Path]:
    """A picture of each series' maps; UserError if one can't be written."""
    pictures = []
    cliff_bytes = cliff.device_bytes if cliff else None
    for series, of_series in series_of(records).items():
        pictures.append(folder.picture(series_file_name(series)))
        heat_map(of_series, f"{name}: {series_title(series)}", limit_bytes, pictures[-1], cliff_bytes)
    return pictures


def heat_map(records: list[Record], title: str, limit_bytes: int | None, path: Path, cliff_bytes: int | None = None) -> None:
    """Two maps of one series in a PNG, tok/s and peak in GB, batches down and lengths across: cells that failed bear their
    status, cells never run a dot, peaks over the limit are in red, the fastest that fits has a frame, and a red line is the
    cliff. The file is the old one or the whole new one; UserError if it can't be written."""
    write_atomic(path, _draw(CellMap.of(records, limit_bytes, cliff_bytes), title))


def _draw(cells: CellMap, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = len(cells.lengths) <= ACROSS
    maps_in = [n * inches for n, inches in zip((len(cells.lengths), len(cells.batches)), CELL_IN, strict=True)]
    maps_in[0 if across else 1] *= 2
    wide, high = (max(maps + frame, least) for maps, frame, least in zip(maps_in, FRAME_IN, SMALLEST_IN, strict=True))
    figure = Figure(figsize=(wide, high), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(*((1, 2) if across else (2, 1)))
    for axis, name, colours, figures, text in (
            (axes[0], "throughput, tok/s", "Greens", {at: r.tok_s for at, r in cells.records.items()}, tok_s_text),
            (axes[1], "peak memory, GB", "Blues", {at: r.peak_bytes for at, r in cells.records.items()}, peak_text)):
        _map(axis, cells, name, colours, figures, text)
    figure.suptitle(textwrap.fill(title, int(wide * TITLE_PER_IN), max_lines=3, placeholder="..."), fontsize=10,
                    parse_math=False)
    _legend(figure, cells)
    buffer = io.BytesIO()
    dpi = min(DPI, math.sqrt(MOST_PIXELS / (wide * high)), MOST_PIXELS_ALONG / max(wide, high))
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()


def _map(axis: Any, cells: CellMap, name: str, colours: str, figures: Mapping[Place, float | None],
         text: Callable[[Record], str]) -> None:
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    rows, columns = len(cells.batches), len(cells.lengths)
    known = {at: value for at, value in figures.items() if value is not None and cells.records[at].fits}
    low, span = min(known.values(), default=0), max(known.values(), default=0) - min(known.values(), default=0)
    image = np.ones((rows, columns, 3))
    for at in cells.records:
        part = (known[at] - low) / span if at in known and span else 0.5
        shade = SHADES[0] + (SHADES[1] - SHADES[0]) * part
        image[at] = colormaps[colours](shade)[:3] if at in known else to_rgb(PLAIN)
    axis.imshow(image, aspect="auto", interpolation="nearest")
    never_run = [(r, c) for r in range(rows) for c in range(columns) if (r, c) not in cells.records]
    axis.plot([c for _, c in never_run], [r for r, _ in never_run], "o", color="0.75", markersize=2.5)
    failed = [at for at, record in cells.records.items() if not record.fits]
    axis.add_collection(PatchCollection([Rectangle((c - 0.5, r - 0.5), 1, 1) for r, c in failed], linewidth=0, **FAILED))
    for at, record in cells.records.items():
        fits, over = record.fits, at in cells.over
        axis.text(*at[::-1], cells.text(at, text) + "!" * over, ha="center", va="center", fontsize=9,
                  color=OVER if over else "black" if fits else "0.25",
                  weight="bold" if over or at == cells.pick else "normal",
                  bbox=None if fits else {"facecolor": PLAIN, "edgecolor": "none", "pad": 1})
    axis.set_xticks(range(columns), map(str, cells.lengths))
    axis.set_yticks(range(rows), map(str, cells.batches))
    axis.set_xticks([c - 0.5 for c in range(1, columns)], minor=True)
    axis.set_yticks([r - 0.5 for r in range(1, rows)], minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="both", length=0, labeltop=True, labelbottom=False, labelsize=9)
    axis.spines[:].set_color("0.7")
    axis.set_title(name, fontsize=10)
    axis.set_xlabel("length", fontsize=9)
    axis.xaxis.set_label_position("top")
    axis.set_ylabel("batch", fontsize=9)
    if cells.pick:
        r, c = cells.pick
        axis.add_patch(Rectangle((c - 0.45, r - 0.39), 0.9, 0.78, fill=False, edgecolor="black", linewidth=2))
    edges = [[(c - 0.5, r - 0.5), (c - 0.5, r + 0.5)] for r, c in cells.upright]
    edges += [[(c - 0.5, r - 0.5), (c + 0.5, r - 0.5)] for r, c in cells.level]
    axis.add_collection(LineCollection(edges, colors=CLIFF, linewidths=3.5, capstyle="projecting", zorder=5))


def _legend(figure: Any, cells: CellMap) -> None:
    """What the signs of this map mean, those that are in it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    signs: list[Patch | Line2D] = []
    if cells.pick:
        signs.append(Patch(facecolor="none", edgecolor="black", linewidth=2, label=f"fastest that fits{cells.under}"))
    if cells.upright or cells.level:
        signs.append(Line2D([], [], color=CLIFF, linewidth=3.5, label="the cliff"))
    if cells.over:
        signs.append(Line2D([], [], linestyle="none", marker="$1.2!$", markersize=16, color=OVER,
                            label=cells.over_words))
    if any(not r.fits for r in cells.records.values()):
        signs.append(Patch(linewidth=0, label="failed", **FAILED))
    if len(cells.records) < len(cells.batches) * len(cells.lengths):
        signs.append(Line2D([], [], linestyle="none", marker="o", markersize=2.5, color="0.75", label="never run"))
    if signs:
        figure.legend(handles=signs, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
