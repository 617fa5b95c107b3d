"""From records to a plan."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from planner.decide import defaults, together
from planner.decide.alternatives import nearest
from planner.decide.choose import Candidate, Choice, choose
from planner.decide.hours import Overheads, Rates, cadence, hours, overheads, peak_span, step_span, steps_for
from planner.decide.inputs import Known
from probe.cliff import default_limit
from probe.records import Record, latest
from spillcliff.errors import NoPlan
from spillcliff.units import format_bytes, format_count
from trainer.plan import SCHEMA, PairCounts, Plan, Predicted, Span

TABLE = (50_000_000, 100_000_000, 300_000_000)
"""Corpora that every plan gives the hours for."""
ENOUGH = 20
"""Tokens per parameter that a compute-optimal run has (Hoffmann et al. 2022, arXiv 2203.15556)."""


@dataclass(frozen=True)
class Question:
    """What the user asked of a plan; None leaves it to the planner. One of `corpus_tokens` and `hours` is given; `pairs` if
    the corpus is a file of them, and `length` then is theirs."""

    corpus_tokens: int | None
    hours: float | None
    epochs: float
    length: int | None
    tokens_per_step: int | None
    limit_bytes: int | None
    pairs: PairCounts | None = None


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
        return _whole(self.pick, self.step_s, corpus_tokens, epochs, self.rates)[0]

    def table(self) -> dict[int, Span]:
        """Hours of a few corpora, the plan's among them, by tokens."""
        return {size: self.hours_of(size, self.plan.epochs) for size in sorted({*TABLE, self.plan.corpus_tokens})}


def build(records: list[Record], question: Question, known: Known) -> Forecast:
    """The plan for a question, from the records of one model on one device; NoPlan says why there is none, and what would
    fit by estimate."""
    records = list(latest(records).values())
    limit = (question.limit_bytes and (question.limit_bytes, "as asked")) or default_limit(records, known.cliff)
    if limit is None:
        raise NoPlan("no record says how much memory was free, so no limit is known; give one, such as --limit 5GB")
    limit_bytes, limit_from = limit
    asked = question.tokens_per_step is not None
    # the corpus that --hours asks for is known once a step is picked, so a first pick stands in for it
    corpus = question.corpus_tokens or 100_000_000
    for _ in range(3 if question.hours else 1):
        total = max(1, round(corpus * question.epochs))
        wanted, wanted_why = (question.tokens_per_step, "tokens per step as asked") if asked else (
            defaults.tokens_per_step(total))
        try:
            choice = choose(records, limit_bytes, wanted, asked, question.length, known.cliff)
        except NoPlan as e:
            raise NoPlan(f"{e}{nearest(records, question.length, limit_bytes, known.device)}") from None
        pick = choice.pick
        calibration = known.calibration(pick.record)
        step_s = step_span(pick, 1 / calibration.tok_s, calibration.sd)
        if question.hours:
            corpus = _tokens_in(question.hours, question.epochs, pick, step_s, calibration.rates)
    total = max(1, round(corpus * question.epochs))
    predicted, extra, steps, every = _whole(pick, step_s, corpus, question.epochs, calibration.rates)
    model, tokens = pick.record.model, pick.step.tokens
    optimizer, lr_why = defaults.optimizer(model, total, steps, pick.step)
    about = _of_pairs(question.pairs) if question.pairs else [_amount(total, model.parameters)]
    why = [*choice.why, f"limit {format_bytes(limit_bytes)}: {limit_from}", wanted_why, lr_why, *about, *calibration.lines()]
    if known.assumed_for:
        why.insert(0, together.reason(pick.record, known.assumed_for))
    if missing := extra.missing():
        why.append(f"the hours leave out {', '.join(missing)}: not measured")
    plan = Plan(
        schema=SCHEMA, at=datetime.now(UTC).isoformat(timespec="seconds"), device=pick.record.device, model=model,
        step=pick.step, corpus_tokens=corpus, epochs=question.epochs, steps=steps, optimizer=optimizer, eval=every,
        checkpoint=every, limit_bytes=limit_bytes,
        predicted=Predicted(tok_s=Span(tokens / step_s.high, tokens / step_s.mid, tokens / step_s.low),
                            peak_bytes=peak_span(pick), hours=predicted),
        why=why, runners_up=_with_hours(choice, predicted), rejected=choice.rejected, records_sha256=digest(records),
        calibration=calibration.to_json(), software=pick.record.software,
        pairs=question.pairs)
    return Forecast(plan, pick, step_s, calibration.rates, known.power_w(pick.record))


def _whole(pick: Candidate, step_s: Span, corpus_tokens: float, epochs: float,
           rates: Rates) -> tuple[Span, Overheads, int, int]:
    """(hours, what of them is not stepping, steps, steps between evaluations) of a corpus."""
    steps = steps_for(corpus_tokens * epochs, pick.step.tokens)
    every = cadence(steps, step_s.mid)
    extra = overheads(pick, corpus_tokens, steps, every, rates)
    return hours(step_s, steps, extra), extra, steps, every


def _with_hours(choice: Choice, predicted: Span) -> list[dict]:
    return [r | {"hours": predicted.mid * r["hours_ratio"]} for r in choice.runners_up]


def _of_pairs(counts: PairCounts) -> list[str]:
    return [f"{counts.words()}; steps and hours are of all of them, since padding is computed too",
            "the learning rate's law is for training from the start: a model that was trained already may want a lower lr"]


def _amount(tokens: int, parameters: int) -> str:
    share = tokens / parameters
    what = "few" if share < ENOUGH / 2 else "many" if share > ENOUGH * 2 else "about right"
    optimal = f"{format_count(ENOUGH * parameters)} tokens, {ENOUGH} a parameter, are compute-optimal (Hoffmann et al. 2022)"
    return f"{format_count(tokens)} tokens are {share:.2g} a parameter, {what}: {optimal}"


def _tokens_in(hours_wanted: float, epochs: float, pick: Candidate, step_s: Span, rates: Rates) -> int:
    """Corpus tokens that a run of so many hours gets through, overheads counted."""
    tokens = pick.step.tokens
    steps = max(1, int(hours_wanted * 3600 / step_s.mid))
    for _ in range(4):
        extra = overheads(pick, steps * tokens / epochs, steps, cadence(steps, step_s.mid), rates)
        spare = hours_wanted * 3600 - extra.total_s
        if spare < step_s.mid:
            raise NoPlan(f"{hours_wanted * 60:.1f} min is too short: start-up, evaluation and checkpoints alone take more")
        steps = max(1, int(spare / step_s.mid))
    return max(1, int(steps * tokens / epochs))


def side_by_side(records_of: dict[str, list[Record]], question: Question, known: Known) -> dict[str, Forecast | str]:
    """A forecast for each model, or why there is none."""
    found = {}
    for name, records in records_of.items():
        try:
            found[name] = build(records, question, known)
        except NoPlan as e:
            found[name] = str(e)
    return found


def digest(records: list[Record]) -> str:
    """Tells these records from others, whatever their order."""
    return hashlib.sha256("\n".join(sorted(map(repr, records))).encode()).hexdigest()
