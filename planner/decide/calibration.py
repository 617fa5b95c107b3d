"""What past runs on a device say about its forecasts: the receipts, read back. Pure but for the files that are read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from planner.decide.hours import Rates
from probe.soak import Soak
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import Say, read_json
from spillcliff.hardware.software import same_version
from spillcliff.schema import Number, is_number
from trainer.checkpoint import STATE_BYTES
from trainer.plan import Plan, times_due
from trainer.run_folder import RunFolder

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


LEAST = 1e-9
"""A figure of a receipt is above zero."""
Figure = Annotated[float | None, Number(LEAST)]


@dataclass(frozen=True)
class Figures:
    """What is planned, what happened, or their ratio."""

    tok_s: Figure = None
    peak_bytes: Figure = None
    hours: Figure = None


@dataclass(frozen=True)
class Receipt:
    """What a receipt must hold. UserError for a throughput so far off that it says nothing of the next run."""

    planned: Figures
    actual: Figures
    ratio: Figures
    software: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 / FARTHEST < (self.ratio.tok_s or 1) < FARTHEST:
            raise UserError(f"tok/s came out {self.ratio.tok_s:.3g} times as planned, which says nothing of the next run")


@dataclass(frozen=True)
class PastRun:
    """A finished run: its folder's name, its plan, and its receipt."""

    run: str
    plan: Plan
    receipt: dict[str, Any]

    @property
    def device(self) -> str | None:
        """The device that it was planned for and ran on; None if those differ."""
        return self.plan.device if self.receipt.get("ran_on") == self.plan.device else None

    @property
    def log_ratio(self) -> float | None:
        """The logarithm of actual tok/s over what was measured for it, earlier corrections taken out."""
        ratio, corrected = self.receipt["ratio"].get("tok_s"), self.plan.calibration.get("tok_s")
        return math.log(ratio * (corrected if is_number(corrected, LEAST) else 1.0)) if ratio else None

    @property
    def libraries_s(self) -> float | None:
        """Seconds before the run made its model, which the probe measures as a part of setting up: what receipts of 0.1.0
        call start_up_s, where those since have the whole."""
        seconds = self.receipt.get("libraries_s", self.receipt.get("start_up_s"))
        return seconds if is_number(seconds, LEAST) else None


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

    def to_json(self) -> dict[str, Any]:
        return {"tok_s": self.tok_s, "sd": self.sd, "receipts": self.receipts, "soak": self.soak,
                "start_up_s": self.rates.start_up_s, "disk_write_bytes_s": self.rates.disk_write_bytes_s}

    def lines(self) -> list[str]:
        """What it changed, for a person."""
        lines = []
        if self.soak:
            change = f"{abs(self.soak - 1):.1%} {'slower' if self.soak >= 1 else 'faster'}"
            lines.append(f"warm, this device was {change} in a soak"
                        f"{'' if self.soak_settled else ' that had not settled'}: counted in the hours")
        if self.receipts:
            lines.append(f"{self.receipts} past run{'s' * (self.receipts > 1)} on this device: tok/s as measured times "
                        f"{self.tok_s:.3f}, give or take {self.sd:.1%}; start-up and disk as they were seen there")
        return lines


def read(runs: Path, say: Say) -> list[PastRun]:
    """The finished runs under results/runs/, oldest first; `say` names each that can't be read."""
    past = []
    for path in runs.glob("*/receipt.json"):
        folder = RunFolder(path.parent)
        try:
            receipt = read_json(folder.receipt, "receipt")
            schema.read(Receipt, receipt, f"receipt {folder.receipt}")
            past.append(PastRun(folder.path.name, Plan.load(folder.plan), receipt))
        except UserError as e:
            say(f"left out: {e}")
    return sorted(past, key=lambda run: run.plan.at)


def calibrate(past: Sequence[PastRun], soaks: Sequence[Soak], device: str, torch: str | None, rates: Rates) -> Calibration:
    """What the runs and the newest soak of `device` under the same torch change; `rates` are device.json's.

    Runs are off by a part they have in common and by one of their own, both normal: the common part starts at the soak's
    factor (else at 1) with BIAS_SD and is moved by each receipt (Gelman et al., Bayesian Data Analysis, 2.5).
    """
    past = [p for p in past if p.device == device and _is_of(torch, p.receipt.get("software", {}))]
    soaks = [s for s in soaks if s.device == device and _is_of(torch, s.software) and not s.on_battery]
    telling = [s for s in soaks if s.settled] or soaks  # one that was broken off tells less than an older one that wasn't
    soak = telling[-1].factor if telling else None
    logs = [p.log_ratio for p in past if p.log_ratio is not None]
    prior = -math.log(soak or 1)
    run_sd = RUN_SD["cpu" if device.startswith("cpu-") else "card"]
    if len(logs) > 1:
        mean = sum(logs) / len(logs)
        run_sd = math.sqrt((RUN_WEIGHT * run_sd**2 + sum((x - mean)**2 for x in logs)) / (RUN_WEIGHT + len(logs) - 1))
    precision = 1 / BIAS_SD**2 + len(logs) / run_sd**2
    bias = (prior / BIAS_SD**2 + sum(logs) / run_sd**2) / precision
    start_ups = [p.libraries_s for p in past if p.libraries_s is not None and not p.receipt.get("resumed_from")]
    writes = [STATE_BYTES * p.plan.model.parameters * (times_due(p.plan.steps, p.plan.checkpoint) - 1)
              / p.receipt["checkpoint_write_s"] for p in past if is_number(p.receipt.get("checkpoint_write_s"), LEAST)]
    rates = Rates(start_up_s=median(start_ups) if start_ups else rates.start_up_s,
                  disk_write_bytes_s=median(writes) if writes else rates.disk_write_bytes_s,
                  first_copy_bytes_s=rates.first_copy_bytes_s, copy_bytes_s=rates.copy_bytes_s)
    return Calibration(tok_s=math.exp(bias), sd=math.sqrt(1 / precision + run_sd**2), rates=rates, receipts=len(logs),
                       soak=soak, soak_settled=not telling or telling[-1].settled)


def _is_of(torch: str | None, software: dict[str, str | None]) -> bool:
    """Whether `software` has this torch; so has all where it is not known which."""
    return torch is None or same_version(torch, software.get("torch"))
