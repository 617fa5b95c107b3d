"""What was planned beside what happened, and where the seconds went. Pure."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spillcliff.units import format_bytes, format_duration
from trainer.plan import Plan, times_due

if TYPE_CHECKING:  # it brings torch
    from trainer.run.timing import StepTimes

FIGURES = {"tok_s": "throughput", "peak_bytes": "peak memory", "hours": "whole time"}
"""What is planned and held against what happened, and its name for a person."""
SHOWN_SHARE = 0.005
"""Shares below it are left out of the line for a person."""
CAUSES = {"start_up_s": "start-up", "data_s": "waiting for data", "compute_s": "forward and backward",
          "optimizer_s": "clip and update", "log_s": "logging", "eval_s": "evaluation", "sample_s": "sampling",
          "checkpoint_s": "checkpoints", "away_s": "suspended"}


@dataclass
class Ledger:
    """Seconds by cause, summed over all processes of a run; `spent` may begin with what those before this one spent."""

    spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spent = {name: float(self.spent.get(name, 0.0)) for name in CAUSES}

    def add(self, cause: str, seconds: float) -> None:
        self.spent[cause] += seconds

    def add_step(self, times: "StepTimes", accum: int, is_away: bool) -> None:
        """The parts of a step's time; all of it as suspended if `is_away`."""
        if is_away:
            self.add("away_s", times.step_s)
            return
        self.add("compute_s", accum * times.micro_s)
        for cause in ("data_s", "log_s", "optimizer_s"):
            self.add(cause, getattr(times, cause))

    def of_total(self, total_s: float) -> dict[str, float]:
        """The causes of `total_s` seconds; "other_s" is what has no name: pauses between, the end of the run."""
        return self.spent | {"other_s": total_s - sum(self.spent.values())}


def pauses_left_s(plan: Plan, done: int, spent: dict[str, float]) -> float:
    """Seconds of the evaluations with their texts and of the checkpoints still to come, when step `done` has ended and
    what is due after it has not been done: each as long as those so far on average (`spent` is a ledger's), which were one
    evaluation at the start and one of both at every cadence. What there was none of yet is not counted."""
    evaluations, saves = 1 + (done - 1) // plan.eval, (done - 1) // plan.checkpoint
    left_s = (times_due(plan.steps, plan.eval) - evaluations) * (spent["eval_s"] + spent["sample_s"]) / evaluations
    if saves:
        left_s += (times_due(plan.steps, plan.checkpoint) - 1 - saves) * spent["checkpoint_s"] / saves
    return left_s


def ledger_line(ledger: dict[str, float]) -> str:
    """A receipt's ledger in one line, the largest share first."""
    total = sum(ledger.values())
    named = sorted(((value, (CAUSES | {"other_s": "other"})[name]) for name, value in ledger.items()), reverse=True)
    return ", ".join(f"{name} {value / total:.1%}" for value, name in named if value >= SHOWN_SHARE * total)


def make_receipt(plan: Plan, tok_s: float | None, peak_bytes: int | None, seconds: float, more: dict) -> dict:
    """Planned beside actual: {planned, actual, ratio} for tok_s, peak_bytes and hours, and `more`.

    A figure that can't be had (no steps after the warm-up, no peak on this device) is null, and so is its ratio.
    """
    planned = {name: getattr(plan.predicted, name).mid for name in FIGURES}
    actual = {"tok_s": tok_s, "peak_bytes": peak_bytes, "hours": seconds / 3600}
    ratio = {name: actual[name] / planned[name] if actual[name] and planned[name] else None for name in FIGURES}
    return {"schema": 1, "planned": planned, "actual": actual, "ratio": ratio, "device": plan.device,
            "model": plan.model.name, "steps": plan.steps, "tokens": plan.steps * plan.step.tokens, **more}


def receipt_rows(receipt: dict) -> list[tuple[str, str, str, str]]:
    """(what, planned, actual, difference) as text, for a table."""
    def text(name: str, value: float | None) -> str:
        if value is None:
            return "-"
        return {"tok_s": lambda v: f"{v:,.0f} tok/s", "peak_bytes": format_bytes,
                "hours": lambda v: format_duration(v * 3600)}[name](value)

    return [(label, text(name, receipt["planned"][name]), text(name, receipt["actual"][name]),
             f"{(receipt['ratio'][name] - 1) * 100:+.1f}%" if receipt["ratio"][name] else "-")
            for name, label in FIGURES.items()]
