"""Complete grids of cards that never were, and a search replayed on a complete grid."""

import math
import random
from typing import Any

from probe.cell import Cell
from probe.grid.search import best, left_out, next_cell
from probe.records import Record, Status
from trainer.config import ModelConfig

BATCHES, LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (256, 512, 1024)
MODEL = ModelConfig.named("150M")


def cost_s(record: Record) -> float:
    """Seconds that a cell takes of a grid."""
    if record.status is Status.TIMEOUT:
        return 150.0
    return record.cell_s or (record.setup_s or 0) + sum(record.warmup_s[1:]) + sum(record.step_s) + 1.0


def replay(full: dict[Cell, Record], limit_bytes, known=(), **options) -> tuple[list[Cell], float, float]:
    """(cells in the order in which the search asks for them, their share of all cells' seconds, tok/s lost in shares)."""
    known, order = {c: full[c] for c in known}, []
    while (cell := next_cell(list(full), known, limit_bytes, **options)) is not None:
        assert cell not in known
        known[cell] = full[cell]
        order.append(cell)
    left = left_out(list(full), known, limit_bytes, **options)
    assert set(left) == set(full) - set(known)
    assert all("\n" not in why for why in left.values())
    top, pick = best(full.values(), limit_bytes), best(known.values(), limit_bytes)
    share = sum(cost_s(full[c]) for c in order) / sum(map(cost_s, full.values()))
    return order, share, 0.0 if top is None else 1 - (pick.tok_s / top.tok_s if pick else 0)


def made_up(seed: int, waves: str, bump: str) -> tuple[dict[Cell, Record], int | None, dict[Cell, int]]:
    """(a complete grid, the limit in bytes, the peaks that an estimator would predict, 2% low and blind to bumps) of a card
    that never was: launch floor, rate, share of attention, memory and cap at random. `waves` quantise the batch (its time
    is that of the next multiple of 3 to 16, up to 30% more); `bump` adds 5 to 15% to the peak of some batches or cells, so
    that a smaller one may fail where a larger fits."""
    r = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(r.uniform(math.log(low), math.log(high)))
    per_token, floor_s, fixed_s = between(1.2e-5, 8e-4), between(0.005, 0.06), between(0.002, 0.06)
    attention, static, per_token_bytes = r.uniform(0, 0.7) / 1024, between(0.4e9, 5e9), between(0.1e6, 1.5e6)
    width, most, setup_s = r.randint(3, 16), r.uniform(0.05, 0.3), r.uniform(0.5, 5)
    bumped, size = {b for b in BATCHES if r.random() < 0.35}, r.uniform(0.05, 0.15)
    cells = [Cell.of("150M", b, n) for b in BATCHES for n in LENGTHS]
    peaks = {}
    for c in cells:
        peak = static + per_token_bytes * c.step.tokens
        if (bump == "batch" and c.batch in bumped) or (bump == "cell" and r.random() < 0.35):
            peak *= 1 + size
        peaks[c] = peak * (1 + abs(r.gauss(0, 0.004)))
    ordered = sorted(peaks.values())
    cap = max(r.choice([math.inf, 6e9, ordered[r.randint(1, 6)] * 1.03, ordered[r.randint(6, 29)] * 1.03]),
              1.03 * peaks[cells[0]])
    limit = None if r.random() < 0.4 else int(min(cap, 141e9))
    fails = r.choice([Status.OOM, Status.SPILLS])
    full = {}
    for c in cells:
        up = math.ceil(c.batch / width) * width
        wave = {"none": 1.0, "wave": min(up / c.batch, 1 + most), "even": 1 + most * (up - c.batch) / width}[waves]
        step_s = max(floor_s, fixed_s + per_token * c.step.tokens * (1 + attention * c.length) * wave)
        step_s *= 1 + r.gauss(0, 0.005)
        known: dict[str, Any] = {"at": "", "cell": c, "model": MODEL, "device": "made-up", "setup_s": setup_s}
        if peaks[c] > cap:
            slow = (3 * step_s,) * 3 if fails is Status.SPILLS else ()
            full[c] = Record(status=fails, warmup_s=slow, step_s=slow, **known)
        else:
            warm, timed = max(2, min(40, int(0.5 / step_s) + 7, int(3.3 / step_s))), max(5, min(r.choice([6, 7, 10, 30]),
                                                                                             int(6.7 / step_s)))
            full[c] = Record(status=Status.FITS, warmup_s=(setup_s,) + (step_s,) * warm, device_peak_bytes=int(peaks[c]),
                             step_s=tuple(step_s * (1 + r.gauss(0, 0.005)) for _ in range(timed)), **known)
    return full, limit, {c: int(0.98 * (static + per_token_bytes * c.step.tokens)) for c in cells}
