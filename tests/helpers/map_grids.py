"""Records of grids as a card leaves them, and as no card does: what every map must bear."""

import dataclasses
import random

from helpers.made import ROOT, make_record
from probe.cell import Cell
from probe.records import Status, load

LIMIT = 5_000_000_000
FAILURES = [status for status in Status if status is not Status.FITS]
H200 = load(ROOT / "results" / "nvidia-h200" / "records.jsonl")


def failed(batch, length, status, **other):
    return make_record(batch, length, status=status, step_s=(), **other)


def rising(batches, lengths, skip=True):
    """A card of 6 GB whose peak rises with batch x length: cells over that spill or run out of memory, and with `skip` the
    larger ones are never run."""
    records, ends = [], list[tuple[int, int]]()
    for batch in batches:
        for length in lengths:
            if skip and any(batch >= b and length >= n for b, n in ends):
                continue
            tokens = batch * length
            peak = 2.4e9 + tokens * 8e5
            if peak > 6e9:
                ends.append((batch, length))
                records.append(failed(batch, length, ("spills", "oom")[len(ends) % 2], peak=peak))
            else:
                records.append(make_record(batch, length, tok_s=40_000 * tokens / (tokens + 1500), peak=peak))
    return records


def scattered(seed, batches, lengths):
    """Any status at any place, a fifth never run, some without a peak: what no card does and every map must bear."""
    rng = random.Random(seed)
    records = [make_record(b, n, tok_s=10 ** rng.uniform(-1, 7), peak=10 ** rng.uniform(8, 10.5)) if rng.random() < 0.5
               else failed(b, n, rng.choice(FAILURES)) for b in batches for n in lengths if rng.random() < 0.8]
    records = records or [make_record(batches[0], lengths[0])]
    return [dataclasses.replace(r, device_peak_bytes=None) if rng.random() < 0.1 else r for r in records]


GRIDS = {
    "one": [make_record()], "one that failed": [failed(4, 512, "oom")], "2x2": rising((1, 2), (256, 512)),
    "10x3": rising((1, 2, 4, 6, 8, 12, 16, 24, 32, 64), (256, 512, 1024)),
    "3x10": rising((1, 2, 4), [128 * 2**i for i in range(10)]),
    "12x6": rising((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), (128, 256, 512, 1024, 2048, 4096), skip=False),
    "all failed": [failed(b, n, s) for (b, n), s in zip(((b, n) for b in (1, 2) for n in (256, 512, 1024)), FAILURES,
                                                      strict=True)],
    "no peaks": [make_record(b, 512, tok_s=b * 1000, device_peak_bytes=None) for b in (1, 2, 4)],
    "h200": H200,
    "a long name": [dataclasses.replace(make_record(), cell=Cell.of("m\u00f6del\n" * 40, 2**31 - 1, 2**31 - 1))],
    "huge figures": [make_record(tok_s=1e250, peak=1e250)],
    **{f"scattered {i}": scattered(i, range(1, i + 2), [64 * n for n in range(1, 14 - i)]) for i in range(10)}}
