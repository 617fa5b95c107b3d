"""What the page and the pictures are drawn from, gathered from records as `plan` would."""

import dataclasses
import math
from pathlib import Path

from planner.decide.build import PlanRequest, build
from planner.decide.calibration import PastRun
from planner.decide.inputs import PlanInputs
from planner.report.heatmap import Estimate, SeriesMap
from planner.report.page_data import ModelRow, PageData, page_data
from probe.records import Record
from probe.soak import Soak, Window
from spillcliff.errors import NoPlan
from trainer.config import ModelConfig, StepConfig
from trainer.plan import Plan, Span

from helpers.made import make_plan, make_record

EMPTY = PageData(title="A plan", at="2026-01-01T00:00:00+00:00", device="gtx", failure="no cell fits")
PLANNED = {"tok_s": 2269.0, "peak_bytes": 4.04e9, "hours": 12.2}


def with_series(*groups: list[Record], page: PageData = EMPTY, pick: Record | None = None, limit_bytes: int | None = None,
                estimates: dict | None = None) -> PageData:
    """A page with a map of each group of records, and with `estimates` in place of the cost model's if there are any."""
    maps = [SeriesMap.of(group, limit_bytes, None, pick and pick.cell) for group in groups]
    if estimates is not None:
        maps = [dataclasses.replace(each, estimates=estimates) for each in maps]
    return dataclasses.replace(page, maps=maps, limit_bytes=limit_bytes)


def estimate(batch: int, length: int = 512, tok_s: float = 1000.0, peak_bytes: float | None = 4e9) -> Estimate:
    return Estimate(make_record(batch, length).cell, Span(tok_s, tok_s, tok_s), peak_bytes, "")


def gathered(records: list[Record], limit_bytes: int, corpus: int = 100_000_000, inputs: PlanInputs | None = None,
             **other) -> PageData:
    """The data of one model's records on one device, with a limit of its own."""
    request, inputs = PlanRequest(corpus_tokens=corpus, limit_bytes=limit_bytes), inputs or PlanInputs()
    try:
        data = page_data(build(records, request, inputs).plan, records, inputs, [])
    except NoPlan as e:
        data = dataclasses.replace(page_data(None, records, inputs, []), failure=str(e), limit_bytes=limit_bytes,
                                   maps=[SeriesMap.of(records, limit_bytes, None)])
    return dataclasses.replace(data, **other)


def make_soak(n: int = 60, settled: bool = True, step_s=lambda i: 0.9 + 0.06 * (1 - math.exp(-i / 12)) + 0.004 * math.sin(
        i * 2.4), temperature_c=lambda i: None if i == 7 else 48 + 34 * (1 - math.exp(-i / 9))) -> Soak:
    """A card that heats up and throttles, settled by the end."""
    windows = tuple(Window(at_s=30.0 * i, steps=30, step_s=step_s(i), clock_mhz=1700 - 3 * i, temperature_c=temperature_c(i),
                           power_w=120.0) for i in range(n))
    return Soak(schema=1, at="2026-01-01T00:00:00+00:00", device="gtx", software={}, cell=make_record().cell, minutes=30,
                seconds=30.0 * n, windows=windows, settled=settled)


def model_row(model: str, parameters: int, tok_s: float | None, peak_bytes: float | None, note: str = "") -> ModelRow:
    hours = 1e8 / tok_s / 3600 if tok_s else 0.0
    return ModelRow(model, parameters, 1e8 / parameters, StepConfig(4, 512) if tok_s else None, tok_s, peak_bytes,
                    Span(hours * 0.98, hours, hours * 1.03) if tok_s else None, note)


def past_run(run: str, plan: Plan | None = None, **ratio: float | None) -> PastRun:
    """A finished run whose figures came out `ratio` times as planned."""
    plan = plan or make_plan("gtx", model=ModelConfig.named("150M"), step=StepConfig(4, 512))
    actual = {k: PLANNED[k] * v if (v := ratio.get(k)) else None for k in PLANNED}
    return PastRun(run, plan, {"ran_on": plan.device, "planned": PLANNED, "actual": actual,
                               "ratio": {k: ratio.get(k) for k in PLANNED}})


def written(folder: Path, text: str, name: str = "page.html") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
