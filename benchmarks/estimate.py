"""The estimate of peak memory beside what the prober measures and beside other ways of estimating, on one card in one run.

    python3 -m benchmarks.estimate [--seconds 200] [--cell-seconds 1.0] [--out FILE.json] [--table FILE.md]
    python3 -m benchmarks.estimate --records FILE.json [--out FILE.json] [--table FILE.md]

The second way takes the measured peaks of a former --out and estimates again.

Peaks are in GB of 1e9 bytes: "alloc", "reserv" and "device" as estimated, "is" as measured; "off%" is how far the first is
above the second. The other ways are held against the allocated peak, the least that they could mean:

16N   16 bytes a parameter: weight, gradient and two moments in fp32.
K22   16N and the activations of Korthikanti et al. 2022, arXiv 2205.05198: per layer s b h (34 + 5 a s / h) bytes (eq. 2;
      2 s b h with everything recomputed, table 2), its dropout masks included, all doubled, since it counts 16 bits an
      activation; inputs of the last norm and of the head, 4 s b h, doubled as well, and fp32 logits, 4 s b v (section 4.3).
      Nothing in the paper corresponds to recompute elementwise.
K22-  the same without 5 a s / h (selective recomputation, table 2), as with an attention that holds no scores.
MemTracker  torch.distributed._tools.mem_tracker on the step that trains, twice, under FakeTensorMode; where that fails, on
      the card itself, which then is a measurement of its own. For a few cells, since it takes seconds.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from probe.cell import Cell
from probe.estimate.peak import CardMemory, estimate, model_of
from probe.grid.session import ask
from probe.tasks.table import DescribeDevice, MeasureCell, Task
from probe.tasks.worker import Workers
from probe.verdict import Card
from trainer.config import RECOMPUTES

if TYPE_CHECKING:
    import torch

OPTIONS = list(itertools.product(("eager", "graph"), RECOMPUTES, (1, 4)))
SHAPES = {
    "10M": "2x1024 2x128 8x1024 2x2048 32x128 2x256 8x2048 8x128 16x128 1x1024 1x2048 4x256 32x512 4x512 16x512 16x256",
    "50M": "8x512 2x1024 2x512 32x256 4x512 32x128 1x2048 16x256 1x1024 16x128 1x256 4x2048 1x512 8x1024 4x128 2x2048",
    "150M": "1x2048 8x128 2x1024 2x2048 2x512 1x512 8x2048 1x1024 4x2048 1x128 16x256 8x256 4x128 1x256 4x512 2x128",
    "300M": "1x256 1x2048 1x128 4x2048 4x256 2x512 8x128 1x1024 2x1024 4x128 4x256 2x2048 1x512 4x512 2x256 16x256",
}
"""Batch x length of each model's cells, in turn."""
COMPILED = [Cell.of("10M", 8, 512, engine="compile"), Cell.of("50M", 4, 512, 4, engine="compile", recompute="block"),
            Cell.of("150M", 4, 512, engine="compile"), Cell.of("300M", 1, 1024, 4, engine="compile")]

NEEDS_S, LIMIT_S = {"plain": 8, "tracked": 10, "compiled": 30}, 120
"""What must be left of --seconds for one more to be started, and when a cell is ended in any case."""

COLUMNS, PEERS = ("allocated", "reserved", "device"), ("16N", "K22", "K22-")
HEAD = ["size", "BxLxacc", "engine", "recom", "alloc", "is", "off%", "reserv", "is", "off%", "device", "is", "off%", *PEERS]
WIDTHS = (-4, -9, -7, -5, *(7, 7, 7) * 3, 5, 6, 6)


def plain_cells() -> list[Cell]:
    """64 cells, ordered so that any first few have all options evenly: 5 has no factor in common with 12."""
    cells = []
    for turn, row in enumerate(zip(*map(str.split, SHAPES.values()), strict=True)):
        for i, (model, text) in enumerate(zip(SHAPES, row, strict=True)):
            engine, recompute, accum = OPTIONS[(5 * turn + 3 * i) % len(OPTIONS)]
            batch, length = map(int, text.split("x"))
            cells.append(Cell.of(model, batch, length, accum, engine=engine, recompute=recompute))
    return cells


def jobs() -> list[tuple[str, Cell]]:
    """(kind, cell) of everything, in order; tracked is each model's first plain cell of the simplest options."""
    plain = plain_cells()
    tracked = [next(c for c in plain if c == Cell.of(model, c.batch, c.length)) for model in SHAPES]
    return [*(("plain", c) for c in plain), *(("tracked", c) for c in tracked), *(("compiled", c) for c in COMPILED)]


def korthikanti(cell: Cell, holds_scores: bool) -> int | None:
    """K22 or K22- of the module's docstring, in bytes; the paper's own letters."""
    model = model_of(cell)
    s, b, h, a, v = cell.length, cell.batch, model.d_model, model.heads, model.vocab
    if cell.step.recompute == "elementwise":
        return None
    scores = 5 * a * s * s * b if holds_scores else 0
    layer = 2 * s * b * h if cell.step.recompute == "block" else 34 * s * b * h + scores
    return 16 * model.parameters + 2 * (model.layers * layer + 4 * s * b * h) + 4 * s * b * v


def predict(cell: Cell, card: CardMemory) -> dict:
    """Bytes by each way, and the seconds that ours took."""
    begin = time.perf_counter()
    ours = estimate(cell, card)
    return {"seconds": time.perf_counter() - begin} | {c: getattr(ours, f"{c}_bytes") for c in COLUMNS} | {
            "16N": 16 * model_of(cell).parameters, "K22": korthikanti(cell, True), "K22-": korthikanti(cell, False)}


A = TypeVar("A")


def answer(workers: Workers, task: Task[A, Any], seconds: float) -> A | str:
    """The task's answer, or in words why there is none."""
    outcome = workers.run(task, seconds)
    if outcome.answer is not None:
        return outcome.answer
    last = outcome.printed.strip().splitlines()[-1:]
    why = outcome.killed or ": ".join(outcome.error or last or [f"exit code {outcome.exit_code}"])
    return " ".join(why.split())[:200]


@dataclass(frozen=True)
class Track(Task[dict[str, Any], None]):
    """MemTracker's peak in bytes for two steps of `cell`; how it was had, and why not otherwise."""

    cell: Cell
    device: str

    def run(self, send: Callable[[None], None]) -> dict[str, Any]:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        begin, why = time.perf_counter(), list[str]()
        for how, mode in (("FakeTensorMode", FakeTensorMode), ("on the device", contextlib.nullcontext)):
            try:
                with mode():
                    peak = tracked_peak(self.cell, torch.device(self.device))
                return {"bytes": peak, "how": how, "why": "; ".join(why), "seconds": time.perf_counter() - begin}
            except Exception as e:  # whatever another's tool stumbles over is its result here
                why.append(" ".join(f"{how}: {type(e).__name__}: {e}".split())[:200])
        return {"error": "; ".join(why)}


def tracked_peak(cell: Cell, device: "torch.device") -> int:
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from trainer.config import OptimizerConfig
    from trainer.run.step import TrainStep

    step = TrainStep(model_of(cell), cell.step, OptimizerConfig(1e-5), device)
    tokens = torch.zeros((cell.accum, cell.batch, cell.length + 1), dtype=torch.int32, device=device)
    tracker = MemTracker()
    tracker.track_external(step.model, tokens)
    with tracker:
        for _ in range(2):  # the optimizer's moments are there from the first update on
            step(tokens, 1e-5)
            tracker.reset_mod_stats()  # without which it refuses a second step
    return tracker.get_tracker_snapshot("peak")[device]["Total"]


def error(row: dict, name: str) -> float | None:
    """Percent by which a column's estimate, or a peer's of the allocated peak, is off; None where either is missing."""
    is_of = row["measured"].get(f"{name if name in COLUMNS else 'allocated'}_peak_bytes")
    said = row["predicted"][name]
    return 100 * (said / is_of - 1) if said and is_of else None


def names(cell: Cell) -> list[str]:
    return [cell.model, f"{cell.batch}x{cell.length}x{cell.accum}", cell.step.engine, cell.step.recompute[:5]]


def texts(row: dict) -> list[str]:
    """A row's fields as HEAD has them; a failed cell's end with the reason."""
    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    fields, measured = names(Cell.from_json(row["cell"])), row["measured"]
    if "error" in measured:
        return [*fields, measured["error"].replace("|", "/")]
    for column in COLUMNS:
        sizes = row["predicted"][column], measured.get(f"{column}_peak_bytes")
        fields += [*(text(size and size / 1e9, ".3f") for size in sizes), text(error(row, column), "+.2f")]
    return fields + [text(error(row, peer), "+.0f") for peer in PEERS]


def line(fields) -> str:
    """Fields in columns; 110 characters at most. What a failed cell's reason is too long for is in the JSON."""
    return "".join(f"{f:<{-w}} " if w < 0 else f"{f:>{w}}" for f, w in zip(fields, WIDTHS, strict=False)).rstrip()[:110]


def tracked_text(row: dict, rows: list[dict]) -> str:
    """A tracked cell beside what was measured of it."""
    got, off = row["tracked"], tracked_error(row, rows)
    says = f"failed: {got['error']}" if "error" in got else (
        f"{got['bytes'] / 1e9:.3f} GB, {'not measured' if off is None else f'off {off:+.2f}%'}, {got['how']}, "
        f"{got['seconds']:.1f} s" + (f" (not by {got['why']})" if got["why"] else ""))
    return textwrap.fill(f"MemTracker {' '.join(names(Cell.from_json(row['cell'])))}: {says}", 108, subsequent_indent="  ")


def tracked_error(row: dict, rows: list[dict]) -> float | None:
    """Percent by which MemTracker is off the measured allocated peak; None where either is missing."""
    got = row["tracked"].get("bytes")
    of = next((r["measured"].get("allocated_peak_bytes") for r in rows if r["cell"] == row["cell"]), None)
    return 100 * (got / of - 1) if got and of else None


def summary(rows: list[dict], tracked: list[dict]) -> list[dict]:
    """For each column and group of cells, and each peer: how many cells, the worst error and the median of its size, in
    percent, and which cell was worst."""
    plain, compiled = ([r for r in rows if (r["cell"]["engine"] == "compile") == is_it] for is_it in (False, True))
    wanted = [*((c, "eager and graph", plain) for c in COLUMNS), *((c, "compile", compiled) for c in COLUMNS),
              *((p, "allocated, eager and graph", plain) for p in PEERS)]
    wanted += [("MemTracker", f"allocated, {how}", [r for r in tracked if r["tracked"].get("how") == how])
               for how in sorted({r["tracked"].get("how", "") for r in tracked})]
    lines = []
    for name, of, members in wanted:
        errors = [(tracked_error(r, rows) if "tracked" in r else error(r, name), r) for r in members]
        if known := [(off, r) for off, r in errors if off is not None]:
            worst, row = max(known, key=lambda pair: abs(pair[0]))
            lines.append({"what": name, "of": of, "cells": len(known), "worst_percent": round(worst, 3),
                          "median_percent": round(median(abs(off) for off, _ in known), 3),
                          "worst_cell": " ".join(names(Cell.from_json(row["cell"])))})
    return lines


def summary_fields(s: dict) -> list[str]:
    return [s["what"], s["of"], str(s["cells"]), f"{s['worst_percent']:+.2f}", f"{s['median_percent']:.2f}", s["worst_cell"]]


def closing(result: dict) -> str:
    times, failed = zip(*((1000 * r["predicted"]["seconds"], "error" in r["measured"]) for r in result["rows"]), strict=True)
    return (f"{len(times)} cells, {sum(failed)} failed; an estimate took {median(times):.0f} ms, {max(times):.0f} at most; "
            f"measured in {result['took_s']:.0f} s")


def markdown(result: dict) -> str:
    def table(head, rows) -> list[str]:
        return [*(f"| {' | '.join(fields)} |" for fields in [head, ["---"] * len(head), *rows]), ""]

    return "\n".join([
        f"    {result['command']}", "",
        "{name}, torch {torch}, driver {driver}: ".format(**result["facts"]) + closing(result), "",
        *table(["what", "of", "cells", "worst %", "median %", "worst cell"], map(summary_fields, result["summary"])),
        *(f"- {tracked_text(r, result['rows'])}" for r in result["tracked"]), "",
        *table(HEAD, [[*texts(r), *[""] * len(HEAD)][:len(HEAD)] for r in result["rows"]]),
        "```", __doc__[__doc__.index("Peaks are"):].rstrip(), "```", ""])


def measure_all(options: argparse.Namespace, result: dict, keep) -> None:
    """Runs the jobs that --seconds has room for, telling each as it ends."""
    begin = time.monotonic()
    with Workers() as workers:
        facts = ask(workers, DescribeDevice(None, Path.cwd())).facts
        if facts.kind != "cuda":
            sys.exit("error: there is no CUDA card here; try --records FILE")
        result |= {"facts": dataclasses.asdict(facts), "took_s": time.monotonic() - begin}
        memory, card, device = CardMemory.of(result["facts"]), Card(facts.total_bytes, True), "cuda:0"
        for kind, cell in jobs():
            left = options.seconds - (time.monotonic() - begin)
            if left < NEEDS_S[kind]:
                continue
            row: dict[str, Any] = {"cell": cell.to_json()}
            limit_s = min(LIMIT_S, left)
            if kind == "tracked":
                tracked = answer(workers, Track(cell, device), limit_s)
                row["tracked"] = {"error": tracked} if isinstance(tracked, str) else tracked
                result["tracked"].append(row)
                print(tracked_text(row, result["rows"]), flush=True)
            else:
                got = answer(workers, MeasureCell(cell, device, facts.uuid, options.cell_seconds, card), limit_s)
                if got == "timeout" and limit_s < LIMIT_S:
                    continue  # --seconds ended it, which says nothing of the cell
                row["measured"] = {"error": got} if isinstance(got, str) else {
                    name: getattr(got, name) for name in (f"{c}_peak_bytes" for c in COLUMNS)}
                row |= {"cell_s": round(time.monotonic() - begin - result["took_s"], 2), "predicted": predict(cell, memory)}
                result["rows"].append(row)
                print(line(texts(row)), flush=True)
            result["took_s"] = time.monotonic() - begin
            keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="start nothing that would end later (default 200)")
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="the prober's time for a cell (default 1)")
    parser.add_argument("--records", type=Path, help="a former --out: measure nothing, estimate again")
    parser.add_argument("--out", type=Path, help="write the JSON line here too, after each cell")
    parser.add_argument("--table", type=Path, help="write the tables here as Markdown")
    options = parser.parse_args()
    command = shlex.join(["python3", "-m", "benchmarks.estimate", *sys.argv[1:]])
    result: dict[str, Any] = {"command": command, "facts": {}, "took_s": 0.0, "rows": [], "tracked": [], "summary": []}

    def keep() -> None:
        if options.out:
            options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")

    print(line(HEAD), flush=True)
    if options.records:
        result |= json.loads(options.records.read_text(encoding="utf-8"))
        result["command"] = f"{result['command'].split(' && ')[0]} && {command}"
        for row in result["rows"]:
            row["predicted"] = predict(Cell.from_json(row["cell"]), CardMemory.of(result["facts"]))
            print(line(texts(row)))
        for row in result["tracked"]:
            print(tracked_text(row, result["rows"]))
    else:
        measure_all(options, result, keep)
    if not result["rows"]:
        sys.exit("error: no cell was measured")
    result["summary"] = summary(result["rows"], result["tracked"])
    print(f"\n{'off, %':11}{'of':32}{'cells':>5}{'worst':>10}{'median':>9}  worst cell")
    for what, of, cells, worst, middle, cell in map(summary_fields, result["summary"]):
        print(f"{what:11}{of:32}{cells:>5}{worst:>10}{middle:>9}  {cell}")
    print(closing(result))
    keep()
    if options.table:
        options.table.write_text(markdown(result), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
