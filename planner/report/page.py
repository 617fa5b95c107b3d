"""A plan and all that led to it as one HTML document that needs nothing else: no network, no library, and without
JavaScript only the sliders, the sorting and the folding of long tables are missing."""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from planner.report import charts
from planner.report.curve import hours_at
from planner.report.drawing import NARROW, WIDE, Drawing, Size
from planner.report.heatmap import MapCell, Scale, SeriesMap
from planner.report.page_data import PageData
from planner.report.text import (
    NONE,
    band_text,
    bytes_text,
    count_text,
    hours_text,
    printable,
    range_text,
    ratio_text,
    step_s_text,
    time_text,
    tok_s_text,
)
from probe.records import Record
from probe.show.heatmap import Place

FEW_RECORDS = 500
"""Rows of the records that are shown until more are asked for; template/style.css counts to the same number."""


@dataclass(frozen=True)
class Column:
    """A column of the records: its key in the page's data, its heading, the class of its cells, what it sorts by, and that
    as text."""

    key: str
    heading: str
    kind: str
    value: Callable[[Record], Any]
    text: Callable[[Any], str] = str

    def cell(self, record: Record) -> str:
        value = self.value(record)
        return NONE if value is None else self.text(value)


RECORD_COLUMNS = (
    Column("model", "model", "t", lambda r: r.cell.model), Column("batch", "batch", "n", lambda r: r.cell.batch),
    Column("length", "length", "n", lambda r: r.cell.length), Column("accum", "accum", "n", lambda r: r.cell.accum),
    Column("status", "status", "t", lambda r: str(r.status)),
    Column("tok_s", "tok/s", "n", lambda r: r.tok_s if r.step_s else None, tok_s_text),
    Column("step_s", "step", "n", lambda r: r.median_step_s, step_s_text),
    Column("peak_bytes", "peak", "n", lambda r: r.peak_bytes, bytes_text),
    Column("engine", "engine", "t", lambda r: r.cell.step.engine),
    Column("recompute", "recompute", "t", lambda r: r.cell.step.recompute),
    Column("update", "update", "t", lambda r: r.cell.step.update),
    Column("vocab", "vocab", "n", lambda r: r.cell.vocab, "{:,}".format),
    Column("reserved_peak_bytes", "reserved", "n", lambda r: r.reserved_peak_bytes, bytes_text),
    Column("allocated_peak_bytes", "allocated", "n", lambda r: r.allocated_peak_bytes, bytes_text),
    Column("at", "measured", "t", lambda r: r.at, time_text), Column("why", "why", "w", lambda r: r.why))


@dataclass(frozen=True)
class _Chart:
    """A chart in both sizes, and its name."""

    name: str
    svg: Markup


CHARTS: dict[str, tuple[str, Callable[[PageData, Size], Drawing | None]]] = {
    "peaks": ("peak memory of each measured cell against the limit", charts.peaks),
    "hours": ("hours over the tokens seen, with the band of the forecast", charts.hours),
    "receipts": ("actual over planned, of every run", charts.receipts),
    "soak": ("step time and temperature under load", charts.soak)}


def html_page(page: PageData) -> str:
    """The document. Text in it may hold anything."""
    script = files("planner.report").joinpath("template/script.js").read_text(encoding="utf-8")
    style = files("planner.report").joinpath("template/style.css").read_text(encoding="utf-8")
    return _environment().get_template("page.html").render(
        page=page, maps=page.maps, scale=Scale.of(page.maps), charts={key: _chart(key, page) for key in CHARTS},
        hours_of_plan=hours_at(page.curve, page.plan.corpus_tokens * page.plan.epochs) if (
            page.plan and len(page.curve) > 1) else None,
        rejected=_rejected(page), few_records=FEW_RECORDS, style=Markup(style), script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data={"curve": page.curve,
              "records": [{column.key: column.value(r) for column in RECORD_COLUMNS} for r in page.records]})


def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("planner.report", "template"), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, finalize=_finalize)
    environment.filters |= {"tok_s": tok_s_text, "bytes": bytes_text, "count": count_text, "hours": hours_text,
                            "ratio": ratio_text, "time": time_text, "band": band_text, "range": range_text}
    environment.globals |= {"tok_s_text": tok_s_text, "bytes_text": bytes_text, "hours_text": hours_text,
                            "record_columns": RECORD_COLUMNS}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _finalize(value: object) -> object:
    """Of whatever is put into the page: markup as it is, all else as text that can be written."""
    return value if isinstance(value, Markup) else printable(value)


def _chart(key: str, page: PageData) -> _Chart | None:
    name, draw = CHARTS[key]
    drawings = [(size, drawing) for size in (WIDE, NARROW) if (drawing := draw(page, size))]
    svg = "".join(drawing.svg(key, size.name, name) for size, drawing in drawings)
    return _Chart(name, Markup(svg)) if svg else None


def _rejected(page: PageData) -> list[tuple[str, str]]:
    """The cells that the plan rejected and why, or where there is no plan whatever did not fit."""
    if page.plan:
        return [(str(r.step), "; ".join(r.why)) for r in page.plan.rejected]
    return [(str(cell.cell), _why_not(each, at, cell)) for each in page.maps for at, cell in each.cells.items()
            if cell.kind in ("over", "failed")]


def _why_not(each: SeriesMap, at: Place, cell: MapCell) -> str:
    if cell.kind == "over":
        return f"{cell.peak} is {each.measured.over_words}"
    record = each.measured.records[at]
    return f"{record.status}: {record.why}" if record.why else str(record.status)
