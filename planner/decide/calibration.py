"""What past runs on a device say about its forecasts: the receipts, read back. Pure but for the files that are read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from planner.decide.hours import Rates
from probe.soak import Soak
from spillcliff.errors import UserError
from spillcliff.files import read_json
from spillcliff.schema import is_number
from trainer.checkpoint import STATE_BYTES
from trainer.config import refuse_software
from trainer.plan import Plan, times_due

BIAS_SD = 0.02
"""By how much a device's runs may all be off their forecasts in one direction, in shares: an assumption. With it and
RUN_SD one receipt is believed by 80% on a card and by 14% on a processor."""
RUN_SD = {"card": 0.01, "cpu": 0.05}
"""How far single runs differ beside that. An assumption on a card; on a shared processor five forecasts of one run, made
within the hour, were off by 1 to 13%."""
FARTHEST = 20
"""Times faster or slower than planned beyond which a run says nothing of the next one: an assumption."""
RUN_WEIGHT = 4
"""Receipts' worth of trust in RUN_SD."""


@dataclass(frozen=True)
class Past:
    """A finished run: its folder's name, its plan, and its receipt."""

    run: str
    plan: Plan
    receipt: dict

    @property
    def device(self) -> str | None:
        """The device that it was planned for and ran on; None if those differ."""
        return self.plan.device if self.receipt.get("ran_on") == self.plan.device else None

    @property
    def log_ratio(self) -> float | None:
        """The logarithm of actual tok/s over what was measured for it, earlier corrections taken out."""
        ratio, corrected = self.receipt["ratio"].get("tok_s"), self.plan.calibration.get("tok_s")
        return ratio and math.log(ratio * (corrected if is_usable(corrected) else 1.0))


@dataclass(frozen=True)
class Calibration:
    """What is changed about a device's forecasts: `tok_s` multiplies what was measured, `sd` is how far a run may be off
    after that (the standard deviation, in shares), `rates` are the past runs' own where they have any."""

    tok_s: float
    sd: float
    rates: Rates
    receipts: int
    soak: float | None
    soak_settled: bool = True

    def to_json(self) -> dict:
        return {"tok_s": self.tok_s, "sd": self.sd, "receipts": self.receipts, "soak": self.soak,
                "start_up_s": self.rates.start_up_s, "disk_write_bytes_s": self.rates.disk_write_bytes_s}

    def lines(self) -> list[str]:
        """What it changed, for a person."""
        said = []
        if self.soak:
            change = f"{abs(self.soak - 1):.1%} {'slower' if self.soak >= 1 else 'faster'}"
            said.append(f"warm, this device was {change} in a soak"
                        f"{'' if self.soak_settled else ' that had not settled'}: counted in the hours")
        if self.receipts:
            said.append(f"{self.receipts} past run{'s' * (self.receipts > 1)} on this device: tok/s as measured times "
                        f"{self.tok_s:.3f}, give or take {self.sd:.1%}; start-up and disk as they were seen there")
        return said


def is_usable(value: object) -> bool:
    """Whether a figure that was read is a number above 0 and of a size that exists."""
    return is_number(value, 1e-9)


def read(runs: Path, say) -> list[Past]:
    """The finished runs under results/runs/, oldest first; `say` names each that can't be read."""
    found = []
    for path in runs.glob("*/receipt.json"):
        try:
            receipt = read_json(path, "receipt")
            plan = Plan.load(path.parent / "plan.json")
            for name in ("planned", "actual", "ratio"):
                values = receipt.get(name)
                if not isinstance(values, dict) or not all(
                        values.get(k) is None or is_usable(values[k]) for k in ("tok_s", "peak_bytes", "hours")):
                    raise UserError(f"receipt {path}: {name} must be an object of numbers above 0")
            if not 1 / FARTHEST < (receipt["ratio"].get("tok_s") or 1) < FARTHEST:
                raise UserError(f"receipt {path}: tok/s came out {receipt['ratio']['tok_s']:.3g} times as planned, which "
                                f"says nothing of the next run")
            try:
                refuse_software(receipt.get("software", {}))
            except UserError as e:
                raise UserError(f"receipt {path}: {e}") from None
            found.append(Past(path.parent.name, plan, receipt))
        except UserError as e:
            say(f"left out: {e}")
    return sorted(found, key=lambda past: past.plan.at)


def calibrate(past: Sequence[Past], soaks: Sequence[Soak], device: str, torch: str | None, rates: Rates) -> Calibration:
    """What the runs and the newest soak of `device` under the same torch change; `rates` are device.json's.

    Runs are off by a part they have in common and by one of their own, both normal: the common part starts at the soak's
    factor (else at 1) with BIAS_SD and is moved by each receipt (Gelman et al., Bayesian Data Analysis, 2.5).
    """
    past = [p for p in past if p.device == device and torch in (None, p.receipt.get("software", {}).get("torch"))]
    soaks = [s for s in soaks if s.device == device and torch in (None, s.software.get("torch")) and not s.on_battery]
    held = [s for s in soaks if s.settled] or soaks  # one that was broken off tells less than an older one that wasn't
    soak = held[-1].factor if held else None
    logs = [p.log_ratio for p in past if p.log_ratio is not None]
    prior = -math.log(soak or 1)
    run_sd = RUN_SD["cpu" if device.startswith("cpu-") else "card"]
    if len(logs) > 1:
        mean = sum(logs) / len(logs)
        run_sd = math.sqrt((RUN_WEIGHT * run_sd**2 + sum((x - mean)**2 for x in logs)) / (RUN_WEIGHT + len(logs) - 1))
    precision = 1 / BIAS_SD**2 + len(logs) / run_sd**2
    bias = (prior / BIAS_SD**2 + sum(logs) / run_sd**2) / precision
    start_ups = [p.receipt["start_up_s"] for p in past
                 if is_usable(p.receipt.get("start_up_s")) and not p.receipt.get("resumed_from")]
    writes = [STATE_BYTES * p.plan.model.parameters * (times_due(p.plan.steps, p.plan.checkpoint) - 1)
              / p.receipt["checkpoint_write_s"] for p in past if is_usable(p.receipt.get("checkpoint_write_s"))]
    return Calibration(
        math.exp(bias), math.sqrt(1 / precision + run_sd**2),
        Rates(median(start_ups) if start_ups else rates.start_up_s, median(writes) if writes else rates.disk_write_bytes_s,
              rates.first_copy_bytes_s, rates.copy_bytes_s), len(logs), soak, not held or held[-1].settled)
