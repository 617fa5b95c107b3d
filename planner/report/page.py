"""A plan and all that led to it as one HTML document that needs nothing else: no network, no library, and without
JavaScript only the sliders, the sorting and the folding of long tables are missing."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files

from planner.report import charts
from planner.report.curve import hours_at, usable
from planner.report.heatmap import ends, heat_map, runs, series_title
from planner.report.html import (
    NONE,
    band_text,
    bar,
    bytes_text,
    cell_name,
    count_text,
    esc,
    figure,
    finite,
    hours_text,
    number,
    ratio_text,
    scroller,
    step_text,
    table,
    time_text,
    tok_s_text,
    under,
)

OPEN_MAPS = 3
"""More maps than these are folded."""

FEW_RECORDS = 500
"""Rows of the records that are shown until more are asked for; page.html's style counts to the same number."""


def html_page(data: dict) -> str:
    """The document for what planner gathers: see the keys in tests/test_page.py. Text in it may hold anything."""
    template = files("planner.report").joinpath("page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    parts = (_head(data), _pick(data), _maps(data), _peaks(data), _hours(data), _sizes(data), _receipts(data), _soak(data),
             _others(data), _records(data))
    values = {
        "title": esc(data["title"]), "body": "\n".join(filter(None, parts)), "data": _embedded(data),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}
    # one pass, so that text which looks like a placeholder stays what it is
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _embedded(data: dict) -> str:
    """The data as JSON that can't end its script element: ASCII alone, without <, > and &."""
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _section(name: str, title: str, *content: str) -> str:
    """A section under a heading; nothing if it would be empty."""
    inside = "\n".join(filter(None, content))
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>\n{inside}</section>' if (
        inside) else ""


def _head(data: dict) -> str:
    notes = "".join(f'<p class="note">{esc(note)}</p>' for note in data["notes"])
    return (f'<header><h1>{esc(data["title"])}</h1><p class="about"><span>{esc(data["device"])}</span>'
            f'<time>{time_text(data["at"])}</time></p>{notes}</header>')


def _tile(label: str, value: str, more: str) -> str:
    more = f"<span>{more}</span>" * bool(more)
    return f'<div class="tile"><dt>{label}</dt><dd><strong>{value}</strong>{more}</dd></div>'


def _pick(data: dict) -> str:
    plan = data["plan"]
    if plan is None:
        return _section("pick", "No plan", f'<p class="failure">{esc(data["failure"])}</p>', _bounds(data))
    step, model, predicted = plan["step"], plan["model"], plan["predicted"]
    tokens = step["batch"] * step["length"] * step["accum"]
    tok_s, peak, hours = (predicted[name] for name in ("tok_s", "peak_bytes", "hours"))
    limit = plan["limit_bytes"]
    of_limit = f"{peak['mid'] / limit:.0%} of the {bytes_text(limit)} limit"
    corpus = f"{count_text(plan['corpus_tokens'])} tokens" + f" x {plan['epochs']:g} epochs" * (plan["epochs"] != 1)
    settings = (f"{esc(model['name'])} ({count_text(model.get('parameters'))} parameters), engine {esc(step['engine'])}, "
                f"recompute {esc(step['recompute'])}, update {esc(step['update'])}")
    why = "".join(f"<li>{esc(line)}</li>" for line in plan["why"])
    return _section(
        "pick", f'The pick: B={step["batch"]} L={step["length"]} accum={step["accum"]}', f'<p class="about">{settings}</p>',
        '<dl class="tiles">'
        + _tile("throughput", f"{tok_s_text(tok_s['mid'])} tok/s",
                band_text(tok_s["low"], tok_s["mid"], tok_s["high"], tok_s_text))
        + _tile("peak memory", bytes_text(peak["mid"]), of_limit)
        + _tile(corpus, hours_text(hours["mid"]), band_text(hours["low"], hours["mid"], hours["high"], hours_text))
        + _tile("optimizer steps", f"{plan['steps']:,}", f"of {tokens:,} tokens each") + "</dl>",
        f'<h3>Why</h3><ul class="why">{why}</ul>' if why else "", _bounds(data))


def _bounds(data: dict) -> str:
    parts = [f"Limit {bytes_text(data['limit_bytes'])}" + f" ({esc(data['limit_from'])})" * bool(data["limit_from"])] * (
        data["limit_bytes"] is not None)
    parts += [f"cliff at {bytes_text(data['cliff_bytes'])}" if data["cliff_bytes"] is not None else "no cliff found"]
    return f'<p class="quiet">{"; ".join(parts)}.</p>'


def _maps(data: dict) -> str:
    """A map for each series, the pick's first, those past OPEN_MAPS folded."""
    ordered = sorted((s for s in data["series"] if s["cells"]), key=lambda s: not any(c["pick"] for c in s["cells"]))
    folds, (low, high) = len(ordered) > OPEN_MAPS, ends(ordered)
    drawn = []
    for i, series in enumerate(ordered):
        title, body = esc(series_title(series)), heat_map(series, low, high)
        drawn.append(f"<details><summary>{title}</summary>{body}</details>" if folds and i else f"<h3>{title}</h3>{body}")
    return _section("maps", "Throughput over batch and length", *drawn)


def _peaks(data: dict) -> str:
    return _section("peaks", "Peak memory against the limit",
                    charts.peaks(data["series"], data["limit_bytes"], data["cliff_bytes"]))


def _hours(data: dict) -> str:
    """The hours over corpus and epochs: a chart, sliders for the script, and a table."""
    points = usable(data["curve"])
    live = chart = ""
    if points:
        plan = data["plan"]
        corpus = number(plan and plan["corpus_tokens"]) or points[len(points) // 2][0]
        epochs = number(plan and plan["epochs"]) or 1.0
        low, mid, high = hours_at(points, corpus * epochs)
        live = (f'<div class="live"><p class="answer"><output id="hours-mid" for="corpus epochs">{hours_text(mid)}</output> '
                f'<output id="hours-band" for="corpus epochs">{band_text(low, mid, high, hours_text)}</output></p>'
                '<p class="quiet"><output id="hours-seen" for="corpus epochs">'
                f'{count_text(corpus * epochs)} tokens seen</output></p>'
                + _slider("corpus", f"{count_text(corpus)} tokens", points[0][0], corpus, points[-1][0])
                + _slider("epochs", f"{epochs:g}", 0.1, epochs, 100.0) + "</div>")
        chart = charts.hours(points, corpus * epochs) if len(points) > 1 else ""
    rows = [(esc(label), count_text(tokens), under(hours_text(mid), band_text(low, mid, high, hours_text)))
            for label, tokens, low, mid, high in data["corpora"]]
    head = (("corpus", "l"), ("tokens", "n"), ("hours", "n"))
    return _section("hours", "Hours for a corpus", live, chart, table("hours of each corpus", head, rows))


def _slider(name: str, shown: str, low: float, value: float, high: float) -> str:
    """A range whose places stand for `low` to `high` in equal factors; wider if `value` lies outside."""
    return (f'<div class="slider"><label for="{name}">{name}</label><output id="{name}-shown" for="{name}">{shown}</output>'
            f'<input type="range" id="{name}" min="0" max="1000" step="5" data-low="{min(low, value)!r}" '
            f'data-high="{max(high, value)!r}" data-value="{value!r}"></div>')


def _sizes(data: dict) -> str:
    sizes = data["sizes"]
    head = (("model", "l"), ("parameters", "n"), ("tok/s", "n"), ("peak", "n"), ("hours", "n"), ("tokens a parameter", "n"),
            ("pick", "t"), ("note", "w"))
    fastest, largest = (max((number(s[name]) or 0.0 for s in sizes), default=0.0) for name in ("tok_s", "peak_bytes"))
    rows = []
    for s in sizes:
        hours = s["hours"] or {"low": None, "mid": None, "high": None}
        rows.append((esc(s["model"]), count_text(s["parameters"]),
                     bar(s["tok_s"], fastest, tok_s_text(s["tok_s"])),
                     bar(s["peak_bytes"], largest, bytes_text(s["peak_bytes"])),
                     under(hours_text(hours["mid"]), band_text(hours["low"], hours["mid"], hours["high"], hours_text)),
                     figure(s["tokens_per_parameter"], lambda v: f"{v:,.3g}"), esc(s["pick"] or NONE), esc(s["note"] or "")))
    return _section("sizes", "Sizes side by side", table("sizes side by side", head, rows))


def _receipts(data: dict) -> str:
    receipts = data["receipts"]
    texts = (("tok_s", tok_s_text), ("peak_bytes", bytes_text), ("hours", hours_text))
    head = (("run", "l"), ("tok/s", "n"), ("peak", "n"), ("time", "n"))
    rows = []
    for r in receipts:
        figures = (under(f"{text(r['actual'].get(key))} <b>{ratio_text(r['ratio'].get(key))}</b>",
                         f"planned {text(r['planned'].get(key))}") for key, text in texts)
        about = ", ".join([*(esc(v) for v in (r["model"], r["step"]) if v), time_text(r["at"])])
        rows.append((under(esc(r["run"]), about), *figures))
    return _section("receipts", "Planned against actual", charts.ratios(receipts),
                    table("planned against actual", head, rows))


def _soak(data: dict) -> str:
    soak = data["soak"]
    if not soak:
        return ""
    factor = f"{ratio_text(soak['factor'])} step time under lasting load" if number(soak["factor"]) is not None else ""
    words = [time_text(soak["at"])] + [factor] * bool(factor) + ["settled" if soak["settled"] else "not settled"]
    return _section("soak", "Under lasting load", f'<p class="quiet">{", ".join(filter(None, words))}.</p>',
                    charts.soak(soak["windows"]))


def _others(data: dict) -> str:
    """Runners-up, and the rejected: the plan's, or where there is no plan whatever did not fit."""
    plan = data["plan"]
    runners = []
    if plan:
        runners = [(esc(cell_name(r["cell"])), tok_s_text(r.get("tok_s")), bytes_text(r.get("peak_bytes")),
                    ratio_text(r.get("hours_ratio"))) for r in plan["runners_up"]]
        rejected = [(esc(cell_name(r["cell"])), esc("; ".join(r["why"]))) for r in plan["rejected"]]
    else:
        rejected = [(esc(f"{s['model']} {cell_name(s | c)}"), esc(_against(c, data["limit_bytes"])))
                    for s in data["series"] for c in s["cells"] if c["over"] or not runs(c)]
    head = (("cell", "t"), ("tok/s", "n"), ("peak", "n"), ("time", "n"))
    return (_section("runners-up", "Runners-up", table("runners-up", head, runners))
            + _section("rejected", "Rejected", table("rejected cells", (("cell", "t"), ("why", "w")), rejected)))


def _against(cell: dict, limit_bytes: float | None) -> str:
    over = [f"{bytes_text(cell['peak_bytes'])} is over the {bytes_text(limit_bytes)} limit"] * cell["over"]
    return "; ".join(over + [f"{cell['status']}: {cell['why']}" if cell["why"] else str(cell["status"])] * (not runs(cell)))


RECORD_COLUMNS: Sequence[tuple[str, str, str]] = (
    ("model", "model", "t"), ("batch", "batch", "n"), ("length", "length", "n"), ("accum", "accum", "n"),
    ("status", "status", "t"), ("tok_s", "tok/s", "n"), ("step_s", "step", "n"), ("peak_bytes", "peak", "n"),
    ("engine", "engine", "t"), ("recompute", "recompute", "t"), ("update", "update", "t"), ("vocab", "vocab", "n"),
    ("reserved_peak_bytes", "reserved", "n"), ("allocated_peak_bytes", "allocated", "n"), ("at", "measured", "t"),
    ("why", "why", "w"))
"""Key in a record, heading, class of the cells."""

_RECORD_TEXTS = {"tok_s": tok_s_text, "step_s": step_text, "peak_bytes": bytes_text, "reserved_peak_bytes": bytes_text,
                 "allocated_peak_bytes": bytes_text, "at": time_text}


def _records(data: dict) -> str:
    """Every record. The script sorts the rows by the embedded data, and folds what is past FEW_RECORDS."""
    records = data["records"]
    if not records:
        return ""
    heads = "".join(f'<th scope="col" class="{kind}" data-key="{key}">{label}</th>' for key, label, kind in RECORD_COLUMNS)
    rows = "\n".join(
        "<tr>" + "".join(f'<td class="{kind}">{_record_text(r, key)}</td>' for key, _, kind in RECORD_COLUMNS) + "</tr>"
        for r in records)
    more = (f'<p><button type="button" id="show-all">show all {len(records):,} records</button></p>'
            if len(records) > FEW_RECORDS else "")
    drawn = f'<table class="data records"><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>'
    count = f'<p class="quiet">{len(records):,} measured</p>'
    return _section("records", "Records", count, scroller("records", drawn), more)


def _record_text(record: dict, key: str) -> str:
    if key in _RECORD_TEXTS:
        return _RECORD_TEXTS[key](record[key])
    value = record[key]
    return NONE if value is None else esc(f"{value:,}" if key == "vocab" and isinstance(value, int) else value)
