"""Does what stands ready disturb the cell that is timed? Pairs of the same cell: in a process that waits on nothing else,
forked from the server that stands ready (Linux), and started anew while the next process imports (Windows, macOS).

    python3 -m benchmarks.isolation [--rounds 3] [--out FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from probe.cell import Cell
from probe.grid.session import ask
from probe.tasks.table import DescribeDevice, MeasureCell
from probe.tasks.worker import Workers
from probe.verdict import Card

CELLS = (Cell.of("10M", 1, 256), Cell.of("10M", 1, 256, engine="graph"), Cell.of("150M", 4, 512))
SECONDS = 4.0
ALONE = """
import json, sys
from benchmarks.isolation import task_of
from probe.cell import Cell
print(json.dumps(task_of(Cell.from_json(json.loads(sys.argv[1])), *sys.argv[2:]).run(lambda progress: None).step_s))
"""


def task_of(cell: Cell, device: str, uuid: str) -> MeasureCell:
    return MeasureCell(cell, device, uuid, SECONDS, Card(None, True))


def alone(cell: Cell, device: str, uuid: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", ALONE, json.dumps(cell.to_json()), device, uuid], check=True,
                          capture_output=True, text=True)
    return json.loads(done.stdout)


def by(workers: Workers, cell: Cell, device: str, uuid: str) -> tuple[tuple[float, ...], float, float]:
    """(step seconds, seconds that the cell took beside its own warm-up and steps, seconds of its first step, which loads
    the kernels)."""
    begin = time.monotonic()
    m = ask(workers, task_of(cell, device, uuid))
    took = time.monotonic() - begin
    return m.step_s, took - sum(m.warmup_s) - sum(m.step_s), m.warmup_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict] = []
    with Workers() as forked, Workers() as spare:
        facts = ask(forked, DescribeDevice(None, Path.cwd())).facts
        device = facts.kind if facts.kind == "cpu" else f"{facts.kind}:0"
        spare._fork = None
        by(spare, CELLS[0], device, facts.uuid)  # from here on one is always being started
        for cell in CELLS:
            times: dict[str, list[float]] = {}
            beside: dict[str, list[tuple[float, float]]] = {}
            for _ in range(options.rounds):
                times.setdefault("alone", []).append(statistics.median(alone(cell, device, facts.uuid)))
                for name, workers in (("forked", forked), ("next one starting", spare)):
                    if name == "forked" and forked._fork is None:
                        continue
                    steps, beside_s, first_s = by(workers, cell, device, facts.uuid)
                    times.setdefault(name, []).append(statistics.median(steps))
                    beside.setdefault(name, []).append((beside_s, first_s))
            for name, medians in times.items():
                ratios = [m / a for m, a in zip(medians, times["alone"], strict=True)]
                rows.append({"cell": f"{cell.model} {cell.batch} x {cell.length} {cell.step.engine}", "how": name,
                             "step_ms": [round(m * 1000, 3) for m in medians],
                             "ratio": round(statistics.median(ratios), 4),
                             "beside_s": [round(s, 2) for s, _ in beside.get(name, [])],
                             "first_step_s": [round(s, 2) for _, s in beside.get(name, [])]})
    print(f"{'cell':18} {'process':18} {'step, ms (each round)':26} {'ratio':>6}  s beside warm-up and steps + first step")
    for r in rows:
        pairs = zip(r["beside_s"], r["first_step_s"], strict=True)
        print(f"{r['cell']:18} {r['how']:18} {', '.join(f'{m:.2f}' for m in r['step_ms']):26} {r['ratio']:6.3f}  "
              f"{', '.join(f'{a:.2f} + {b:.2f}' for a, b in pairs)}")
    text = json.dumps({"device": facts.name, "rows": rows})
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
