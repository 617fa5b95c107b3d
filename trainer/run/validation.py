"""The validation losses of a run: its first, its lowest, and whether they have risen since."""

from dataclasses import dataclass
from typing import Any

from spillcliff.schema import is_number, is_whole


@dataclass
class ValidationLosses:
    """The first validation loss, the lowest so far and after which step that was; None before there is one."""

    first: float | None = None
    best: float | None = None
    best_step: int | None = None

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "ValidationLosses":
        """What `to_json` gave to a checkpoint's facts; those of 0.1.0 have the first alone. KeyError, TypeError or
        ValueError for other facts."""
        first, best, step = float(facts["first_val_loss"]), facts.get("best_val_loss"), facts.get("best_val_step")
        return cls(first, best, step) if is_number(best) and is_whole(step) else cls(first)

    def to_json(self) -> dict[str, Any]:
        return {"first_val_loss": self.first, "best_val_loss": self.best, "best_val_step": self.best_step}

    def note(self, step: int, loss: float) -> str:
        """Takes in the loss after `step`; what to say behind it, "" unless it is above the lowest."""
        if self.first is None:
            self.first = loss
        if self.best is None or loss <= self.best:
            self.best, self.best_step = loss, step
            return ""
        return f", risen from its {best_words(self.best, self.best_step)}"


def best_words(loss: float, step: int | None) -> str:
    return f"best {loss:.4f} at step {step}"
