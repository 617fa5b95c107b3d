"""What `plan report` shows: a plan, records and past runs as the one dict that page.py and pictures.py draw."""

import dataclasses
import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from planner.decide.build import TABLE, Forecast, Question, digest, side_by_side
from planner.decide.choose import Candidate, step_name
from planner.decide.costmodel import CostModel, option
from planner.decide.inputs import Known, kinds, of_model
from probe.cell import Cell
from probe.cliff import default_limit
from probe.records import Record, latest
from spillcliff.units import format_count
from trainer.plan import Plan, Span

CURVE = np.logspace(6, 11, 51)
"""Tokens for which the hours are drawn: the smallest corpus worth a run, to a hundred billion."""
MOST_ESTIMATED = 120
"""Cells of a map above which gaps are left open: a fit to so many takes a second."""


def pick_of(plan: Plan, records: Sequence[Record]) -> Candidate | None:
    """The measured cell that a plan's step comes from; None if its record is not there."""
    accum, alone = plan.step.accum, dataclasses.replace(plan.step, accum=1)
    there = [Candidate(r, accum) for r in records if r.model == plan.model and r.status == "fits"
             and dataclasses.replace(r.cell.step, accum=1) == alone and (r.cell.accum > 1) == (accum > 1)]
    return min(there, key=Candidate.stretch, default=None)


def forecast_of(plan: Plan, records: Sequence[Record], known: Known) -> Forecast | None:
    """The forecast that a plan holds, so that other corpora can be asked of it; None if its record is not there."""
    pick = pick_of(plan, records)
    if pick is None:
        return None
    tok_s, tokens = plan.predicted.tok_s, plan.step.tokens
    step_s = Span(tokens / tok_s.high, tokens / tok_s.mid, tokens / tok_s.low)
    return Forecast(plan, pick, step_s, known.calibration(pick.record).rates, known.power_w(pick.record))


def page_data(plan: Plan | None, records: Sequence[Record], known: Known, notes: list[str]) -> dict:
    """Everything that the page shows; see page.html_page for its keys. `records` are of one device, the plan's if there is
    one; without, the maps alone are shown, and why there is no plan."""
    records = list(latest(records).values())
    default, source = default_limit(records, known.cliff) or (None, "not known")
    data = {
        "title": f"{records[0].device}: no plan", "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": records[0].device, "notes": notes, "plan": None, "failure": "", "limit_bytes": default,
        "limit_from": source, "cliff_bytes": known.cliff and known.cliff.device_bytes,
        "series": _series(records, default, None), "curve": [], "corpora": [], "sizes": [], "receipts": [],
        "soak": _soak(known), "records": [_row(r) for r in records]}
    if plan is None:
        return data | {"failure": "no plan was made yet: plan --corpus 100M makes one"}
    forecast = forecast_of(plan, records, known)
    if forecast is None:
        notes = [*notes, "the record that this plan was made from is not there: hours are the plan's own, in proportion"]
    if forecast and digest([r for r in records if r.model == plan.model]) != plan.records_sha256:
        notes = [*notes, "cells were measured since this plan was made: plan again to count them"]
    of_device = [p for p in known.past if p.device == plan.device]
    return data | {
        "title": f"{plan.model.name} on {plan.device}", "device": plan.device, "notes": notes, "plan": plan.to_json(),
        "limit_bytes": plan.limit_bytes,
        "limit_from": next((line.partition(": ")[2] for line in plan.why if str(line).startswith("limit ")), ""),
        "series": _series(records, plan.limit_bytes, forecast and forecast.pick.record.cell),
        "curve": [[tokens, *_ends(_hours(plan, forecast, tokens, 1.0))] for tokens in CURVE.tolist()],
        "corpora": [[format_count(size), size, *_ends(plan.predicted.hours if size == plan.corpus_tokens else
                                                      _hours(plan, forecast, size, plan.epochs))]
                    for size in sorted({*TABLE, plan.corpus_tokens})],
        "sizes": _sizes(records, plan, known),
        "receipts": [{"run": p.run, "at": p.plan.at, "model": p.plan.model.name, "step": step_name(p.plan.step),
                      **{k: p.receipt[k] for k in ("planned", "actual", "ratio")}} for p in of_device]}


def _hours(plan: Plan, forecast: Forecast | None, corpus: float, epochs: float) -> Span:
    if forecast:
        return forecast.hours_of(corpus, epochs)
    share = corpus * epochs / (plan.corpus_tokens * plan.epochs)
    return Span(*(share * hours for hours in _ends(plan.predicted.hours)))


def _ends(span: Span) -> tuple[float, float, float]:
    return span.low, span.mid, span.high


def _series(records: list[Record], limit_bytes: int | None, pick: Cell | None) -> list[dict]:
    """One map for each option, the pick's first, gaps filled by the cost model."""
    groups: dict[tuple, list[Record]] = {}
    for r in records:
        groups.setdefault(option(r.cell), []).append(r)
    first = pick and option(pick)
    found = []
    for key, group in sorted(groups.items(), key=lambda kv: kv[0] != first):
        cells = [{"batch": r.cell.batch, "length": r.cell.length, "status": r.status, "why": r.why,
                  "tok_s": r.tok_s, "peak_bytes": r.peak_bytes, "estimated": False, "tok_s_low": None, "tok_s_high": None,
                  "pick": r.cell == pick, "over": (r.peak_bytes or 0) > (limit_bytes or math.inf)} for r in group]
        model, vocab, accum, engine, recompute, update = key
        found.append({"model": model, "engine": engine, "recompute": recompute, "accum": accum, "update": update,
                      "vocab": vocab, "cells": cells + _estimated(group, limit_bytes or math.inf)})
    return found


def _estimated(group: list[Record], limit_bytes: float) -> list[dict]:
    batches, lengths = ({getattr(r.cell, name) for r in group} for name in ("batch", "length"))
    there = {(r.cell.batch, r.cell.length) for r in group}
    gaps = [dataclasses.replace(group[0].cell, batch=b, length=n) for b in sorted(batches) for n in sorted(lengths)
            if (b, n) not in there]
    if not gaps or len(gaps) + len(group) > MOST_ESTIMATED or group[0].cell.is_foreign:
        return []
    try:
        predictions = CostModel(group).predict(gaps)
    except ValueError:
        return []
    return [{"batch": c.batch, "length": c.length, "status": "", "why": p.note, "tok_s": c.step.tokens / p.step_s.mid,
             "tok_s_low": c.step.tokens / p.step_s.high, "tok_s_high": c.step.tokens / p.step_s.low,
             "peak_bytes": p.peak_bytes and p.peak_bytes.mid, "estimated": True, "pick": False,
             "over": bool(p.peak_bytes) and p.peak_bytes.mid > limit_bytes}
            for c, p in zip(gaps, predictions, strict=True) if p is not None]


def _sizes(records: list[Record], plan: Plan, known: Known) -> list[dict]:
    """The plan, and every other measured model at its corpus and limit."""
    question = Question(plan.corpus_tokens, None, plan.epochs, None, None, plan.limit_bytes)
    groups = {f"{model} {vocab}": of_model(records, model, vocab) for model, vocab in kinds(records)}
    rows = []
    for name, forecast in side_by_side(groups, question, known).items():
        model = groups[name][0].model
        row = {"model": model.name, "parameters": model.parameters, "pick": "", "tok_s": None, "peak_bytes": None,
               "hours": None, "tokens_per_parameter": plan.corpus_tokens * plan.epochs / model.parameters, "note": ""}
        if model == plan.model:
            forecast = plan
        if isinstance(forecast, str):
            row["note"] = forecast
        else:
            chosen = forecast if forecast is plan else forecast.plan
            p = chosen.predicted
            row |= {"pick": step_name(chosen.step), "tok_s": p.tok_s.mid, "peak_bytes": p.peak_bytes.mid,
                    "hours": dataclasses.asdict(p.hours)}
        rows.append(row)
    return sorted(rows, key=lambda row: row["parameters"])


def _soak(known: Known) -> dict | None:
    if not known.soaks:
        return None
    s = known.soaks[-1]
    names = ("at_s", "step_s", "clock_mhz", "temperature_c", "power_w")
    return {"at": s.at, "factor": s.factor, "settled": s.settled,
            "windows": [{name: getattr(w, name) for name in names} for w in s.windows]}


def _row(r: Record) -> dict:
    c = r.cell
    return {"at": r.at, "model": c.model, "batch": c.batch, "length": c.length, "accum": c.accum, "engine": c.engine,
            "recompute": c.recompute, "update": c.update, "vocab": c.vocab, "status": r.status, "why": r.why,
            "tok_s": r.tok_s, "step_s": r.median_step_s, "peak_bytes": r.peak_bytes,
            "reserved_peak_bytes": r.reserved_peak_bytes, "allocated_peak_bytes": r.allocated_peak_bytes}
