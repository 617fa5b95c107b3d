"""What `plan report` shows: a plan, records and past runs as the page and its pictures draw them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from planner.decide.build import TABLE, Forecast, PlanRequest, side_by_side
from planner.decide.calibration import PastRun
from planner.decide.choose import Candidate
from planner.decide.inputs import PlanInputs, models_in, of_model
from planner.report.curve import Point, usable
from planner.report.heatmap import SeriesMap
from probe.cell import Cell
from probe.cliff import default_limit
from probe.records import Record, latest
from probe.show.heatmap import series_of
from probe.soak import Soak
from spillcliff.units import format_count
from trainer.config import StepConfig
from trainer.plan import Plan, Span

CURVE = np.logspace(6, 11, 51)
"""Tokens for which the hours are drawn: the smallest corpus worth a run, to a hundred billion."""


@dataclass(frozen=True)
class Corpus:
    """A corpus and its hours."""

    name: str
    tokens: int
    hours: Span


@dataclass(frozen=True)
class ModelRow:
    """What the planner picks for one model at the plan's corpus and limit; `note` says why where that is nothing."""

    model: str
    parameters: int
    tokens_per_parameter: float
    step: StepConfig | None = None
    tok_s: float | None = None
    peak_bytes: float | None = None
    hours: Span | None = None
    note: str = ""


@dataclass(frozen=True)
class PageData:
    """All that is shown. `records` are of one device. Without a plan, `failure` says why there is none, and what a plan
    brings is empty. `curve` are points that a logarithm can be taken of."""

    title: str
    at: str
    device: str
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None
    failure: str = ""
    limit_bytes: int | None = None
    limit_from: str = ""
    cliff_bytes: int | None = None
    maps: list[SeriesMap] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)
    corpora: list[Corpus] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)
    past: list[PastRun] = field(default_factory=list)
    soak: Soak | None = None
    records: list[Record] = field(default_factory=list)


def pick_of(plan: Plan, records: Sequence[Record]) -> Candidate | None:
    """The measured cell that a plan's step comes from; None if its record is not there."""
    accum, one_micro_step = plan.step.accum, replace(plan.step, accum=1)
    candidates = [Candidate(r, accum) for r in records if r.model == plan.model and r.fits
                  and replace(r.cell.step, accum=1) == one_micro_step and (r.cell.accum > 1) == (accum > 1)]
    return min(candidates, key=Candidate.stretch, default=None)


def forecast_of(plan: Plan, records: Sequence[Record], inputs: PlanInputs) -> Forecast | None:
    """The forecast that a plan holds, so that other corpora can be asked of it; None if its record is not there."""
    pick = pick_of(plan, records)
    if pick is None:
        return None
    tok_s, tokens = plan.predicted.tok_s, plan.step.tokens
    return Forecast(plan=plan, pick=pick, step_s=Span(tokens / tok_s.high, tokens / tok_s.mid, tokens / tok_s.low),
                    rates=inputs.calibration(pick.record).rates, power_w=inputs.power_w(pick.record))


def page_data(plan: Plan | None, records: Sequence[Record], inputs: PlanInputs, notes: Sequence[str]) -> PageData:
    """What the page shows of a device's `records`, at least one and of the plan's device, oldest first. `notes` come before
    everything else."""
    records = list(latest(records).values())
    cliff_bytes = inputs.cliff.device_bytes if inputs.cliff else None
    device, at = records[0].device, datetime.now(UTC).isoformat(timespec="seconds")
    soak = inputs.soaks[-1] if inputs.soaks else None
    if plan is None:
        limit_bytes, limit_from = default_limit(records, inputs.cliff) or (None, "not known")
        return PageData(
            title=f"{device}: no plan", at=at, device=device, notes=list(notes), cliff_bytes=cliff_bytes, soak=soak,
            failure="no plan was made yet: plan --corpus 100M makes one", limit_bytes=limit_bytes, limit_from=limit_from,
            maps=_maps(records, limit_bytes, cliff_bytes, None), records=records)
    forecast = forecast_of(plan, records, inputs)
    curve = [(tokens, hours.low, hours.mid, hours.high) for tokens in CURVE.tolist()
             for hours in [_hours(plan, forecast, tokens, 1.0)]]
    pick = forecast.pick.record.cell if forecast else None
    corpora = [Corpus(format_count(size), size, plan.predicted.hours if size == plan.corpus_tokens else
                      _hours(plan, forecast, size, plan.epochs)) for size in sorted({*TABLE, plan.corpus_tokens})]
    return PageData(
        title=f"{plan.model.name} on {plan.device}", at=at, device=plan.device,
        notes=[*notes, *_warnings(plan, forecast, records)], plan=plan, limit_bytes=plan.limit_bytes,
        limit_from=next((line.partition(": ")[2] for line in plan.why if line.startswith("limit ")), ""),
        cliff_bytes=cliff_bytes, maps=_maps(records, plan.limit_bytes, cliff_bytes, pick),
        curve=usable(curve), corpora=corpora, models=_models(records, plan, inputs),
        past=[run for run in inputs.past if run.device == plan.device], soak=soak, records=records)


def _warnings(plan: Plan, forecast: Forecast | None, records: list[Record]) -> list[str]:
    warnings = []
    if forecast is None:
        warnings.append("the record that this plan was made from is not there: hours are the plan's own, in proportion")
    if any(r.model == plan.model and _is_later(r.at, plan.at) for r in records):
        warnings.append("cells were measured since this plan was made: plan again to count them")
    return warnings


def _is_later(at: str, than: str) -> bool:
    """Whether one time, as files have it, is after another; not if one of them is no time."""
    try:
        return datetime.fromisoformat(at) > datetime.fromisoformat(than)
    except (ValueError, TypeError):  # TypeError: one of them tells no zone
        return False


def _hours(plan: Plan, forecast: Forecast | None, corpus_tokens: float, epochs: float) -> Span:
    if forecast:
        return forecast.hours_of(corpus_tokens, epochs)
    share, hours = corpus_tokens * epochs / (plan.corpus_tokens * plan.epochs), plan.predicted.hours
    return Span(share * hours.low, share * hours.mid, share * hours.high)


def _maps(records: list[Record], limit_bytes: int | None, cliff_bytes: int | None, pick: Cell | None) -> list[SeriesMap]:
    """One map a series, the pick's first."""
    first = pick.series if pick else None
    return [SeriesMap.of(group, limit_bytes, cliff_bytes, pick)
            for series, group in sorted(series_of(records).items(), key=lambda item: item[0] != first)]


def _models(records: list[Record], plan: Plan, inputs: PlanInputs) -> list[ModelRow]:
    """The plan, and every other measured model at its corpus and limit, smallest first."""
    request = PlanRequest(corpus_tokens=plan.corpus_tokens, epochs=plan.epochs, limit_bytes=plan.limit_bytes)
    groups = {f"{model} {vocab}": of_model(records, model, vocab) for model, vocab in models_in(records)}
    rows = []
    for name, forecast in side_by_side(groups, request, inputs).items():
        model = groups[name][0].cell.config
        assert model is not None  # those of models_in are ours
        row = ModelRow(model.name, model.parameters, plan.corpus_tokens * plan.epochs / model.parameters)
        if model == plan.model:
            row = _with_plan(row, plan)
        else:
            row = replace(row, note=forecast) if isinstance(forecast, str) else _with_plan(row, forecast.plan)
        rows.append(row)
    return sorted(rows, key=lambda row: row.parameters)


def _with_plan(row: ModelRow, plan: Plan) -> ModelRow:
    return replace(row, step=plan.step, tok_s=plan.predicted.tok_s.mid, peak_bytes=plan.predicted.peak_bytes.mid,
                   hours=plan.predicted.hours)
