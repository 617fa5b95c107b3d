"""The plan in words and tables."""

from planner.build import Forecast
from trainer.plan import Span
from trainer.units import format_bytes, format_count, format_duration


def span_text(span: Span, text) -> str:
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
           f"{span_text(p.hours, hours_text)}, evaluation and checkpoint every {plan.eval:,} steps",
           "why:"]
    out += [f"  {line}" for line in plan.why]
    if plan.rejected:
        out.append("rejected:")
        for r in plan.rejected:
            c = r["cell"]
            extra = "" if c["accum"] == 1 else f" accum={c['accum']}"
            kind = "" if (c["engine"], c["recompute"]) == ("eager", "none") else f" {c['engine']}/{c['recompute']}"
            out.append(f"  B={c['batch']} L={c['length']}{extra}{kind}: {'; '.join(r['why'])}")
    return out


def runner_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """(cell, tok/s, peak, time against the pick's) of the runners-up."""
    rows = []
    for r in forecast.plan.runners_up:
        c = r["cell"]
        rows.append((f"B={c['batch']} L={c['length']} accum={c['accum']} {c['engine']}/{c['recompute']}",
                     f"{r['tok_s']:,.0f}", format_bytes(r["peak_bytes"]), f"{(r['hours_ratio'] - 1) * 100:+.0f}%"))
    return rows


def hour_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """(tokens, low, mid, high) of each corpus."""
    return [(format_count(size), hours_text(span.low), hours_text(span.mid), hours_text(span.high))
            for size, span in forecast.table.items()]
