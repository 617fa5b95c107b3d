"""What the page and the pictures are drawn from, gathered from records as `plan` would."""

import dataclasses
import math
from itertools import product
from pathlib import Path

from helpers.made import make_cliff, make_plan, make_record
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

EMPTY = PageData(title="A plan", at="2026-01-01T00:00:00+00:00", device="gtx", failure="no cell fits")
PLANNED = {"tok_s": 2269.0, "peak_bytes": 4.04e9, "hours": 12.2}
HOSTILE = ("</script><script>alert(1)</script>", "<!-- <script>", "'\"><img src=x onerror=alert(1)>", "{{data}} {{body}}",
           "{% if %} {# {{ 7 * 7 }}", "&lt; C:\\Users\\" + "x" * 400, "a\u2028b\u2029c\u0000d\ud800e",
           "\\1 \\g<0> $& %s {0}", "")
LONG = HOSTILE[5]
GRID = list(product((1, 2, 3, 4, 6, 8), (256, 512, 1024)))


def with_series(*groups: list[Record], page: PageData = EMPTY, pick: Record | None = None, limit_bytes: int | None = None,
                estimates: dict | None = None) -> PageData:
    """A page with a map of each group of records, and with `estimates` in place of the cost model's if there are any."""
    maps = [SeriesMap.of(group, limit_bytes, None, pick.cell if pick else None) for group in groups]
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


def plan_of(records: list[Record], limit_bytes: int = 5_000_000_000) -> Plan:
    return build(records, PlanRequest(corpus_tokens=100_000_000, limit_bytes=limit_bytes), PlanInputs()).plan


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


def spilling(why: str = "moved 340 MB to the system") -> PageData:
    """A GTX 1060's grid: fits, spills past 5.3 GB, fails past 7.5 GB, with a gap; and everything else that a page can
    hold."""
    records = []
    for batch, length in GRID:
        tokens = batch * length
        peak = 2.6e9 + tokens * 0.72e6
        status = "fits" if peak < 5.3e9 else "spills" if peak < 7.5e9 else "oom"
        speed = 2600 * tokens / (tokens + 280) * (1 if status == "fits" else 0.4)
        if (batch, length) != (2, 512):
            records.append(make_record(batch, length, speed, peak, status, why="" if status == "fits" else why))
    inputs = PlanInputs(cliff=make_cliff("collapse", 5.0e9, 5.1e9), soaks=(make_soak(),))
    return gathered(records, 5_000_000_000, inputs=inputs, notes=["planned with another driver"],
                    models=[model_row("60M", 62_000_000, 4900, 2.1e9), model_row("1B", 10**9, None, None, "nothing fits")],
                    past=[past_run("runs/first", tok_s=0.97, peak_bytes=1.01, hours=1.04), past_run("runs/second")])
