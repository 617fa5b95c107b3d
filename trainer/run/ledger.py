"""Where the seconds of a run go: the ledger of its receipt."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.run.timing import StepTimes

SHOWN = 0.005
"""Shares below it are left out of the line for a person."""
NAMES = {"start_up_s": "start-up", "data_s": "waiting for data", "compute_s": "forward and backward",
         "optimizer_s": "clip and update", "log_s": "logging", "eval_s": "evaluation", "sample_s": "sampling",
         "checkpoint_s": "checkpoints", "away_s": "suspended"}


class Ledger:
    """Seconds by cause, summed over all processes of a run: `before` is what those before this one spent."""

    def __init__(self, before: dict) -> None:
        self.spent = {name: float(before.get(name, 0.0)) for name in NAMES}

    def add(self, name: str, seconds: float) -> None:
        self.spent[name] += seconds

    def step(self, times: "StepTimes", accum: int, is_away: bool) -> None:
        if is_away:
            self.add("away_s", times.step_s)
            return
        self.add("compute_s", accum * times.micro_s)
        for name in ("data_s", "log_s", "optimizer_s"):
            self.add(name, getattr(times, name))

    def paper(self, total_s: float) -> dict:
        """The ledger of `total_s` seconds; "other_s" is what has no name: pauses between, the end of the run."""
        return self.spent | {"other_s": total_s - sum(self.spent.values())}


def words(paper: dict) -> str:
    """A ledger in one line, the largest share first."""
    total = sum(paper.values())
    named = sorted(((value, (NAMES | {"other_s": "other"})[name]) for name, value in paper.items()), reverse=True)
    return ", ".join(f"{name} {value / total:.1%}" for value, name in named if value >= SHOWN * total)
