"""From records to a plan."""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from planner import defaults
from planner.choose import Choice, choose
from planner.hours import Overheads, cadence, hours, overheads, step_span, steps_for
from probe.cliff import Cliff, default_limit
from probe.records import Record, latest, load
from trainer.config import ModelConfig
from trainer.device import choose as choose_device
from trainer.errors import NoPlan, UserError
from trainer.files import read_json
from trainer.plan import SCHEMA, Plan, Predicted, Span
from trainer.units import format_bytes, parse_count

TABLE = (50_000_000, 100_000_000, 300_000_000)
"""Corpora that every plan gives the hours for."""


@dataclass(frozen=True)
class Question:
    """What the user asked of a plan; None leaves it to the planner. One of `corpus_tokens` and `hours` is given."""

    corpus_tokens: int | None
    hours: float | None
    epochs: float
    model: str | None
    vocab: int | None
    length: int | None
    tokens_per_step: int | None
    limit_bytes: int | None


@dataclass(frozen=True)
class Forecast:
    """A plan, the choice behind it, and the whole hours of each corpus in a table (tokens -> Span)."""

    plan: Plan
    choice: Choice
    extra: Overheads
    table: dict[int, Span]


def read_records(results: Path, files: tuple[Path, ...], say) -> list[Record]:
    """The records of `files`, or of every device under `results`; UserError if there are none."""
    paths = list(files) or sorted(results.glob("*/records.jsonl"))
    found = [r for path in paths for r in load(path, say)]
    if not found:
        where = ", ".join(map(str, files)) or f"{results}/*/records.jsonl"
        raise UserError(f"no records in {where}; `probe grid --model 150M` measures some")
    return found


def of_device(records: list[Record], name: str | None, only_one_will_do: bool) -> list[Record]:
    """The records of one device: see trainer.device.choose."""
    chosen = choose_device(list(dict.fromkeys(r.device for r in records)), name, only_one_will_do)
    return [r for r in records if r.device == chosen]


def of_model(records: list[Record], model: str | None, vocab: int | None) -> list[Record]:
    """The records of one model at one vocabulary; UserError lists what there is."""
    records = [r for r in records if not r.cell.is_foreign]
    if not records:
        raise NoPlan("all records are of somebody's own step (--step), which `train` can't run; `probe grid --model 150M` "
                     "measures ours")
    kinds = list(dict.fromkeys((r.cell.model, r.cell.vocab) for r in records))
    all_kinds = kinds
    if model is not None:
        wanted = parse_count(model, "--model")
        kinds = [k for k in kinds if _count(k[0]) == wanted or k[0] == model]
    if vocab is not None:
        kinds = [k for k in kinds if k[1] == vocab]
    if not kinds:
        raise UserError(f"no records of that model; there are {_listed(all_kinds)}; `probe grid` measures others")
    if len(kinds) > 1:
        raise UserError(f"records of several models: choose one, of {_listed(kinds)}")
    return [r for r in records if (r.cell.model, r.cell.vocab) == kinds[0]]


def _listed(kinds: list[tuple[str, int]]) -> str:
    return ", ".join(f"--model {model} --vocab {vocab}" for model, vocab in kinds)


def _count(name: str) -> int | None:
    try:
        return parse_count(name)
    except UserError:
        return None


def device_file(results: Path, device: str) -> dict:
    """What `probe` noted of a device beside its records; {} if nothing."""
    path = results / device / "device.json"
    values = read_json(path, "device file") if path.exists() else {}
    for name in ("disk_write_bytes_s", "start_up_s"):
        value = values.get(name)
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise UserError(f"device file {path}: {name} is {value!r:.40}; it must be a number above 0, or null")
    return values


def build(records: list[Record], question: Question, device: dict, cliff: Cliff | None = None) -> Forecast:
    """The plan for a question, from the records of one model on one device; `device` is device.json's content."""
    records = list(latest(records).values())
    known = question.limit_bytes and (question.limit_bytes, "as asked") or default_limit(records, cliff)
    if known is None:
        raise NoPlan("no record says how much memory was free, so no limit is known; give one, such as --limit 5GB")
    limit_bytes, limit_from = known
    asked = question.tokens_per_step is not None
    # the corpus that --hours asks for is known once a step is picked, so a first pick stands in for it
    corpus = question.corpus_tokens or 100_000_000
    for _ in range(3 if question.hours else 1):
        total = max(1, round(corpus * question.epochs))
        wanted, wanted_why = (question.tokens_per_step, "tokens per step as asked") if asked else (
            defaults.tokens_per_step(total))
        choice = choose(records, limit_bytes, wanted, asked, question.length)
        pick, step_s = choice.pick, step_span(choice.pick)
        if question.hours:
            corpus = _tokens_in(question.hours, question.epochs, choice, device)
    model: ModelConfig = pick.record.model
    steps = steps_for(corpus * question.epochs, pick.step.tokens)
    every = cadence(steps, step_s.mid)
    extra = _overheads(choice, corpus, steps, every, device)
    optimizer, lr_why = defaults.optimizer(model, max(1, round(corpus * question.epochs)), steps, pick.step)
    tokens = pick.step.tokens
    peak = pick.record.peak_bytes or 0
    missing = extra.missing()
    why = [*choice.why, f"limit {format_bytes(limit_bytes)}: {limit_from}", wanted_why, lr_why]
    if missing:
        why.append(f"the hours leave out {', '.join(missing)}: not measured")
    plan = Plan(
        schema=SCHEMA, at=datetime.now(timezone.utc).isoformat(timespec="seconds"), device=pick.record.device, model=model,
        step=pick.step, corpus_tokens=corpus, epochs=question.epochs, steps=steps, optimizer=optimizer, eval=every,
        checkpoint=every, limit_bytes=limit_bytes,
        predicted=Predicted(tok_s=Span(tokens / step_s.high, tokens / step_s.mid, tokens / step_s.low),
                            peak_bytes=Span(peak, peak, peak), hours=hours(step_s, steps, extra)),
        why=why, runners_up=choice.runners_up, rejected=choice.rejected, records_sha256=_digest(records), calibration={})
    table = {}
    for size in sorted({*TABLE, corpus}):
        its_steps = steps_for(size * question.epochs, tokens)
        table[size] = hours(step_s, its_steps, _overheads(choice, size, its_steps, cadence(its_steps, step_s.mid), device))
    return Forecast(plan, choice, extra, table)


def _overheads(choice: Choice, corpus: float, steps: int, every: int, device: dict) -> Overheads:
    return overheads(choice.pick, corpus, steps, every, device.get("disk_write_bytes_s"), device.get("start_up_s"))


def _tokens_in(hours_wanted: float, epochs: float, choice: Choice, device: dict) -> int:
    """Corpus tokens that a run of so many hours gets through, overheads counted."""
    step_s, tokens = step_span(choice.pick).mid, choice.pick.step.tokens
    steps = max(1, int(hours_wanted * 3600 / step_s))
    for _ in range(4):
        extra = _overheads(choice, steps * tokens / epochs, steps, cadence(steps, step_s), device)
        spare = hours_wanted * 3600 - sum(v or 0 for v in (extra.eval_s, extra.checkpoint_s, extra.start_up_s))
        if spare < step_s:
            raise NoPlan(f"{hours_wanted * 60:.1f} min is too short: start-up, evaluation and checkpoints alone take more")
        steps = max(1, int(spare / step_s))
    return max(1, int(steps * tokens / epochs))


def _digest(records: list[Record]) -> str:
    text = "\n".join(sorted(json.dumps(r.to_json(), sort_keys=True) for r in records))
    return hashlib.sha256(text.encode()).hexdigest()
