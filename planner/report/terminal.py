"""The plan in words and tables."""

from collections.abc import Callable, Sequence

from planner.decide.build import Forecast
from planner.decide.calibration import PastRun
from spillcliff.hardware.fingerprints import device_count
from spillcliff.units import format_bytes, format_count, format_duration
from trainer.plan import RunnerUp, Span

RUNNER_HEAD = ("runner-up", "tok/s", "time", "peak", "saves")
CORPUS_HEAD = ("corpus", "low", "hours", "high")
SIZE_HEAD = ("model", "pick", "tok/s", "peak", "time", "tok/par")
PAST_HEAD = ("past run", "tok/s", "peak", "time")
SHOWN_RUNS = 5


def span_text(span: Span, text: Callable[[float], str]) -> str:
    """The middle, and the ends where they differ from it as shown."""
    low, mid, high = text(span.low), text(span.mid), text(span.high)
    return mid if low == mid == high else f"{mid} ({low} to {high})"


def hours_text(hours: float) -> str:
    return format_duration(hours * 3600)


def lines(forecast: Forecast) -> list[str]:
    """The pick, its reasons, and the rejected."""
    plan = forecast.plan
    s, p = plan.step, plan.predicted
    out = [f"{plan.model.name} ({format_count(plan.model.parameters)} parameters) on {plan.device}",
           f"pick: B={s.batch} L={s.length} accum={s.accum}, engine {s.engine}, recompute {s.recompute}",
           f"  {span_text(p.tok_s, lambda v: f'{v:,.0f} tok/s')}, peak {format_bytes(p.peak_bytes.mid)}, "
           f"{plan.steps:,} steps of {s.tokens:,} tokens",
           f"  {format_count(plan.corpus_tokens)} tokens{'' if plan.epochs == 1 else f' x {plan.epochs:g}'} in "
           f"{span_text(p.hours, hours_text)}, evaluation and checkpoint every {plan.eval:,} steps"]
    if forecast.energy_kwh:
        cards = "card" if device_count(plan.device) == 1 else "cards"
        out.append(f"  {forecast.energy_kwh:.2g} kWh for the {cards} alone, at {forecast.power_w:.0f} W")
    out.append("why:")
    out += [f"  {line}" for line in plan.why]
    if plan.rejected:
        out.append("rejected:")
        out += [f"  {r.step}: {'; '.join(r.why)}" for r in plan.rejected]
    return out


def runner_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """Of the runners-up: cell, tok/s, time, peak, and the memory that it would save (or cost, with a minus)."""
    return [_runner_row(runner) for runner in forecast.plan.runners_up]


def _runner_row(runner: RunnerUp) -> tuple[str, ...]:
    return (str(runner.step), f"{runner.tok_s or 0:,.0f}",
            f"{hours_text(runner.hours or 0)} ({((runner.hours_ratio or 1) - 1) * 100:+.0f}%)",
            format_bytes(runner.peak_bytes), _signed_bytes(runner.saves_bytes or 0))


def _signed_bytes(size: float) -> str:
    return "-" * (size < 0) + format_bytes(abs(size))


def hour_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """(tokens, low, mid, high) of each corpus."""
    return [(format_count(size), hours_text(span.low), hours_text(span.mid), hours_text(span.high))
            for size, span in forecast.table().items()]


def size_rows(forecasts: dict[str, Forecast | str]) -> list[tuple[str, ...]]:
    """A row for each model; those without a plan say so."""
    rows: list[tuple[str, ...]] = []
    for name, forecast in forecasts.items():
        if isinstance(forecast, str):
            rows.append((name, "no plan", "-", "-", "-", "-"))
            continue
        plan = forecast.plan
        share = plan.corpus_tokens * plan.epochs / plan.model.parameters
        rows.append((name, str(plan.step), f"{plan.predicted.tok_s.mid:,.0f}",
                     format_bytes(plan.predicted.peak_bytes.mid), hours_text(plan.predicted.hours.mid), f"{share:.2g}"))
    return rows


def past_rows(forecast: Forecast, past: Sequence[PastRun]) -> list[tuple[str, ...]]:
    """How the latest runs on this device came out against their plans, as differences."""
    of_device = [run for run in past if run.device == forecast.plan.device]
    return [(run.run, *(_difference(run.receipt["ratio"].get(k)) for k in ("tok_s", "peak_bytes", "hours")))
            for run in of_device[-SHOWN_RUNS:]]


def _difference(ratio: float | None) -> str:
    return f"{(ratio - 1) * 100:+.1f}%" if ratio else "-"
