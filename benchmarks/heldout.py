"""How well few cells tell the others of a grid, and how often the stated 90% bands hold: `python3 -m benchmarks.heldout`.

Of every option with 12 or more cells that fit under results/, CELLS are given to the cost model and the rest is compared
with its predictions. Plans beside a receipt are held against it.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.decide.costmodel import CostModel, Prediction
from probe.records import Record, latest, load
from trainer.plan import Plan

CELLS = 8


def spread(records: Sequence[Record], count: int) -> list[Record]:
    """The smallest and the largest cell, and then whichever is furthest from those taken, in doublings of tokens and of
    length: chosen without looking at what was measured."""
    at = np.log2([[r.cell.step.micro_tokens, r.cell.length] for r in records])
    at = (at - at.min(0)) / np.maximum(np.ptp(at, axis=0), 1e-9)
    taken = [int(at.sum(1).argmin()), int(at.sum(1).argmax())]
    while len(taken) < min(count, len(records)):
        apart = ((at[:, None] - at[taken][None])**2).sum(-1).min(1)
        taken.append(int(apart.argmax()))
    return [records[i] for i in taken]


def held_out(records: Sequence[Record], count: int = CELLS) -> list[tuple[Record, Prediction]]:
    """The cells of one option that were not given to the model, and what it predicted for them."""
    known = spread(records, count)
    rest = [r for r in records if r not in known]
    predictions = CostModel(known).predict([r.cell for r in rest])
    return [(record, prediction) for record, prediction in zip(rest, predictions, strict=True) if prediction]


def grids(results: Path) -> dict[str, list[Record]]:
    """The options of every device with 12 or more cells that fit."""
    options: dict[str, list[Record]] = {}
    for path in sorted(results.glob("*/records.jsonl")):
        for r in latest(load(path)).values():
            if r.fits and not r.cell.is_custom:
                step = r.cell.step
                name = f"{r.device} {r.cell.model} {step.engine}/{step.recompute} accum {step.accum}"
                options.setdefault(name + f" {step.update}" * (step.update != "after"), []).append(r)
    return {name: records for name, records in options.items() if len(records) >= 12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    results = parser.parse_args().results
    within, total = 0, 0
    print(f"{'from ' + str(CELLS) + ' cells, spread evenly':44} {'others':>6} {'mean':>6} {'worst':>14} {'in band':>8}")
    for name, records in grids(results).items():
        predicted = held_out(records)
        errors = [p.step_s.mid / (r.median_step_s or math.nan) - 1 for r, p in predicted]
        inside = sum(p.step_s.low <= (r.median_step_s or 0) <= p.step_s.high for r, p in predicted)
        worst = max(range(len(errors)), key=lambda i: abs(errors[i]))
        cell = predicted[worst][0].cell
        print(f"{name:44} {len(predicted):6} {np.mean(np.abs(errors)):6.1%} {errors[worst]:+6.1%} "
              f"{cell.batch}x{cell.length:<5} {inside:4} of {len(predicted)}")
        within, total = within + inside, total + len(predicted)
    print(f"\n{'runs':44} {'tok/s':>6} {'peak':>6} {'hours':>6}  in band")
    for path in sorted(results.rglob("receipt.json")):
        receipt, plan = json.loads(path.read_text()), Plan.load(path.parent / "plan.json")
        bands = []
        for what in ("tok_s", "peak_bytes", "hours"):
            span, actual = getattr(plan.predicted, what), receipt["actual"][what]
            if actual is not None:
                bands.append(span.low <= actual <= span.high)
        ratios = [receipt["ratio"][what] for what in ("tok_s", "peak_bytes", "hours")]
        print(f"{path.parent!s:44} " + " ".join(f"{(x or math.nan) - 1:+6.1%}" for x in ratios)
              + f"  {sum(bands)} of {len(bands)}")
        within, total = within + sum(bands), total + len(bands)
    print(f"\nall bands: {within} of {total}, {within / max(total, 1):.1%} (stated: 90%)")


if __name__ == "__main__":
    main()
