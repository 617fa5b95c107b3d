"""What the page and the pictures are drawn from, gathered from records as `plan` would."""

import math
from pathlib import Path

from planner.decide.build import Question, build
from planner.decide.inputs import Known
from planner.report.page_data import page_data
from spillcliff.errors import NoPlan

EMPTY = {"title": "A plan", "at": "2026-01-01T00:00:00+00:00", "device": "gtx", "notes": [], "plan": None,
         "failure": "no cell fits",
         "limit_bytes": None, "limit_from": "", "cliff_bytes": None, "series": [], "curve": [],
         "corpora": [], "sizes": [], "receipts": [], "soak": None, "records": []}


def cell(batch=4, length=512, **other) -> dict:
    values = {"batch": batch, "length": length, "status": "fits", "why": "", "tok_s": 1000.0, "peak_bytes": 4e9,
              "estimated": False, "tok_s_low": None, "tok_s_high": None, "pick": False, "over": False}
    return values | other


def series(*cells, **other) -> dict:
    return {"model": "150M", "engine": "eager", "recompute": "none", "accum": 1, "update": "after", "vocab": 32000,
            "cells": list(cells)} | other


def record_row(r) -> dict:
    c = r.cell
    return {"at": r.at, "model": c.model, "batch": c.batch, "length": c.length, "accum": c.accum, "engine": c.engine,
            "recompute": c.recompute, "update": c.update, "vocab": c.vocab, "status": r.status, "why": r.why,
            "tok_s": r.tok_s, "step_s": r.median_step_s, "peak_bytes": r.peak_bytes,
            "reserved_peak_bytes": r.reserved_peak_bytes, "allocated_peak_bytes": r.allocated_peak_bytes}


def gathered(records, limit_bytes: int, corpus: int = 100_000_000, **other) -> dict:
    """The data of one model's records on one device, with a limit of its own."""
    question, known = Question(corpus, None, 1.0, None, None, limit_bytes), Known()
    try:
        return page_data(build(records, question, known).plan, records, known, []) | other
    except NoPlan as e:
        return page_data(None, records, known, []) | {"failure": str(e), "limit_bytes": limit_bytes} | other


def soak_windows(n=60) -> list[dict]:
    """A card that heats up and throttles, settled by the end."""
    return [{"at_s": 30.0 * i, "step_s": 0.9 + 0.06 * (1 - math.exp(-i / 12)) + 0.004 * math.sin(i * 2.4),
             "clock_mhz": 1700 - 3 * i, "temperature_c": None if i == 7 else 48 + 34 * (1 - math.exp(-i / 9)),
             "power_w": 120.0} for i in range(n)]


def size_row(model: str, parameters: float, tok_s: float | None, peak_bytes: float | None, note: str = "") -> dict:
    hours = tok_s and {"low": 1e8 / tok_s / 3600 * 0.98, "mid": 1e8 / tok_s / 3600, "high": 1e8 / tok_s / 3600 * 1.03}
    return {"model": model, "parameters": parameters, "pick": "B=4 L=512" if tok_s else None, "tok_s": tok_s,
            "peak_bytes": peak_bytes, "hours": hours, "tokens_per_parameter": 1e8 / parameters, "note": note}


def receipt(run: str, **ratio: float | None) -> dict:
    planned = {"tok_s": 2269.0, "peak_bytes": 4.04e9, "hours": 12.2}
    return {"run": run, "at": "2026-01-01T00:00:00+00:00", "model": "150M", "step": "B=4 L=512", "planned": planned,
            "actual": {k: planned[k] * v if (v := ratio.get(k)) else None for k in planned},
            "ratio": {k: ratio.get(k) for k in planned}}


def written(folder: Path, text: str, name: str = "page.html") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
