"""From records to a plan."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from planner.decide import defaults
from planner.decide.alternatives import alternatives, smaller_steps
from planner.decide.calibration import Calibration
from planner.decide.choose import Candidate, Choice, TooLittleData, Wish, choose
from planner.decide.hours import Overheads, Rates, cadence, peak_span, run_hours, run_overheads, step_span, steps_for
from planner.decide.inputs import PlanInputs
from planner.decide.scaling import assumption
from probe.cliff import asked_limit, default_limit
from probe.records import Record, digest, latest
from spillcliff.errors import NoPlan
from spillcliff.units import format_bytes, format_count
from trainer.plan import SCHEMA, PairCounts, Plan, Predicted, Span

TABLE = (50_000_000, 100_000_000, 300_000_000)
"""Corpora that every plan gives the hours for."""
ENOUGH = 20
"""Tokens per parameter that a compute-optimal run has (Hoffmann et al. 2022, arXiv 2203.15556)."""
FIRST_CORPUS = 100_000_000
"""Stands for the corpus that --hours asks for until a step is picked, by which it then is known."""
ROUNDS = 3
"""Picks after which the corpus that --hours asks for has settled."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked of a plan; None leaves it to the planner. One of `corpus_tokens` and `hours` is there; `pairs` if
    the corpus is a file of them, and `length` then is theirs."""

    corpus_tokens: int | None = None
    hours: float | None = None
    epochs: float = 1.0
    length: int | None = None
    tokens_per_step: int | None = None
    limit_bytes: int | None = None
    pairs: PairCounts | None = None


@dataclass(frozen=True)
class RunForecast:
    """A whole run of a corpus: `hours`, what of them is not stepping, optimizer `steps`, and steps between evaluations."""

    hours: Span
    overheads: Overheads
    steps: int
    every: int


@dataclass(frozen=True)
class Forecast:
    """A plan and what it was made from: `step_s` of its step, `rates` of what it does beside, and `power_w` of the card
    (None if unknown)."""

    plan: Plan
    pick: Candidate
    step_s: Span
    rates: Rates
    power_w: float | None

    @property
    def energy_kwh(self) -> float | None:
        """What the card alone takes."""
        return self.power_w and self.power_w * self.plan.predicted.hours.mid / 1000

    def hours_of(self, corpus_tokens: float, epochs: float) -> Span:
        """Hours of another corpus with the same step."""
        return _run(self.pick, self.step_s, corpus_tokens, epochs, self.rates).hours

    def table(self) -> dict[int, Span]:
        """Hours of a few corpora, the plan's among them, by tokens."""
        return {size: self.hours_of(size, self.plan.epochs) for size in sorted({*TABLE, self.plan.corpus_tokens})}


@dataclass(frozen=True)
class _Picked:
    """The choice for a corpus, and how fast its pick will be."""

    corpus_tokens: int
    choice: Choice
    tokens_why: str
    calibration: Calibration
    step_s: Span


def build(records: list[Record], request: PlanRequest, inputs: PlanInputs) -> Forecast:
    """The plan for a request, from the records of one model on one device; NoPlan says why there is none, and what would
    fit by estimate."""
    records = list(latest(records).values())
    limit = asked_limit(request.limit_bytes, records, inputs.cliff) if request.limit_bytes else (
        default_limit(records, inputs.cliff))
    if limit is None:
        raise NoPlan("no record says how much memory was free, so no limit is known; give one, such as --limit 5GB")
    picked = _pick(records, request, inputs, limit[0])
    pick, calibration = picked.choice.pick, picked.calibration
    run = _run(pick, picked.step_s, picked.corpus_tokens, request.epochs, calibration.rates)
    optimizer, lr_why = defaults.optimizer(pick.model, _total(picked.corpus_tokens, request), run.steps, pick.step)
    tokens, step_s = pick.step.tokens, picked.step_s
    plan = Plan(
        schema=SCHEMA, at=datetime.now(UTC).isoformat(timespec="seconds"), device=pick.record.device, model=pick.model,
        step=pick.step, corpus_tokens=picked.corpus_tokens, epochs=request.epochs, steps=run.steps, optimizer=optimizer,
        eval=run.every, checkpoint=run.every, limit_bytes=limit[0],
        predicted=Predicted(tok_s=Span(tokens / step_s.high, tokens / step_s.mid, tokens / step_s.low),
                            peak_bytes=peak_span(pick), hours=run.hours),
        why=_why(picked, request, inputs, limit, [lr_why, f"schedule: {optimizer.describe(run.steps)}"], run.overheads),
        runners_up=[replace(r, hours=run.hours.mid * (r.hours_ratio or 1.0)) for r in picked.choice.runners_up],
        rejected=picked.choice.rejected, records_sha256=digest(records), calibration=calibration.to_json(),
        software=pick.record.software, pairs=request.pairs,
        smaller_steps=smaller_steps(pick.record, pick.step, records, inputs.device))
    return Forecast(plan, pick, step_s, calibration.rates, inputs.power_w(pick.record))


def _total(corpus_tokens: int, request: PlanRequest) -> int:
    """Tokens that are seen in all."""
    return max(1, round(corpus_tokens * request.epochs))


def _pick(records: list[Record], request: PlanRequest, inputs: PlanInputs, limit_bytes: int) -> _Picked:
    """For the corpus of the request, or for as many tokens as its hours take."""
    corpus = request.corpus_tokens or FIRST_CORPUS
    picked = _pick_for(corpus, records, request, inputs, limit_bytes)
    if request.hours:
        for _ in range(ROUNDS - 1):
            corpus = _tokens_in(request.hours, request.epochs, picked)
            picked = _pick_for(corpus, records, request, inputs, limit_bytes)
        picked = replace(picked, corpus_tokens=_tokens_in(request.hours, request.epochs, picked))
    return picked


def _pick_for(corpus: int, records: list[Record], request: PlanRequest, inputs: PlanInputs, limit_bytes: int) -> _Picked:
    is_asked = request.tokens_per_step is not None
    tokens, tokens_why = (request.tokens_per_step, "tokens per step as asked") if request.tokens_per_step else (
        defaults.tokens_per_step(_total(corpus, request)))
    try:
        choice = choose(records, limit_bytes, Wish(
            tokens, is_asked, request.length, request.corpus_tokens, request.pairs is not None), inputs.cliff)
    except TooLittleData:
        raise
    except NoPlan as e:
        raise NoPlan(f"{e}{alternatives(records, request.length, limit_bytes, inputs.device)}") from None
    calibration = inputs.calibration(choice.pick.record)
    return _Picked(corpus, choice, tokens_why, calibration, step_span(choice.pick, 1 / calibration.tok_s, calibration.sd))


def _why(picked: _Picked, request: PlanRequest, inputs: PlanInputs, limit: tuple[int, str], lr_why: list[str],
         overheads: Overheads) -> list[str]:
    pick = picked.choice.pick
    amount = _of_pairs(request.pairs) if request.pairs else [
        _amount(_total(picked.corpus_tokens, request), pick.model.parameters)]
    why = [*picked.choice.why, f"limit {format_bytes(limit[0])}: {limit[1]}", picked.tokens_why, *lr_why, *amount,
           *picked.calibration.lines()]
    if inputs.assumed_for:
        why.insert(0, assumption(pick.record, inputs.assumed_for))
    if missing := overheads.missing():
        why.append(f"the hours leave out {', '.join(missing)}: not measured")
    return why


def _run(pick: Candidate, step_s: Span, corpus_tokens: float, epochs: float, rates: Rates) -> RunForecast:
    steps = steps_for(corpus_tokens * epochs, pick.step.tokens)
    every = cadence(steps, step_s.mid)
    overheads = run_overheads(pick, corpus_tokens, steps, every, rates)
    return RunForecast(run_hours(step_s, steps, overheads), overheads, steps, every)


def _of_pairs(counts: PairCounts) -> list[str]:
    return [f"{counts.words()}; steps and hours are of all of them, since padding is computed too",
            "the learning rate's law is for training from the start: a model that was trained already may want a lower lr"]


def _amount(tokens: int, parameters: int) -> str:
    share = tokens / parameters
    what = "few" if share < ENOUGH / 2 else "many" if share > ENOUGH * 2 else "about right"
    optimal = f"{format_count(ENOUGH * parameters)} tokens, {ENOUGH} a parameter, are compute-optimal (Hoffmann et al. 2022)"
    return f"{format_count(tokens)} tokens are {share:.2g} a parameter, {what}: {optimal}"


def _tokens_in(hours: float, epochs: float, picked: _Picked) -> int:
    """Corpus tokens that a run of so many hours gets through, overheads counted."""
    pick, step_s, rates = picked.choice.pick, picked.step_s.mid, picked.calibration.rates
    tokens = pick.step.tokens
    steps = max(1, int(hours * 3600 / step_s))
    for _ in range(4):
        overheads = run_overheads(pick, steps * tokens / epochs, steps, cadence(steps, step_s), rates)
        spare_s = hours * 3600 - overheads.total_s
        if spare_s < step_s:
            raise NoPlan(f"{hours * 60:.1f} min is too short: start-up, evaluation and checkpoints alone take more")
        steps = max(1, int(spare_s / step_s))
    return max(1, int(steps * tokens / epochs))


def side_by_side(records_of: dict[str, list[Record]], request: PlanRequest,
                 inputs: PlanInputs) -> dict[str, Forecast | str]:
    """A forecast for each model, or why there is none."""
    forecasts: dict[str, Forecast | str] = {}
    for name, records in records_of.items():
        try:
            forecasts[name] = build(records, request, inputs)
        except NoPlan as e:
            forecasts[name] = str(e)
    return forecasts
