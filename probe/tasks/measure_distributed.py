"""Measures one cell by several processes, started by torchrun as their training is.

    python -m torch.distributed.run ... -m probe.tasks.measure_distributed FOLDER DEVICE SECONDS TEAM CELL

is what each of them runs; the first leaves what was measured in FOLDER.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from probe.cell import Cell
from spillcliff.hardware.device import is_sharded, team_size

PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes")


def measure(cell: Cell, device: str, seconds: float, name: str, report) -> dict:
    """As measure_cell.measure, by the team called `name`: times of the first, peaks of the largest. Nothing is told
    meanwhile."""
    report({"setting_up": True})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(team_size(name)),
                   "--", "-m", __name__, folder, device, str(seconds), name, json.dumps(dataclasses.asdict(cell))]
        done = subprocess.run(command, stdin=_held_open(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        answer = Path(folder) / "measured.json"
        if answer.exists():
            return json.loads(answer.read_text())
        first_first = sorted(Path(folder).glob("failed-*.json"), key=lambda p: p.stat().st_mtime_ns)
        failures = [json.loads(p.read_text()) for p in first_first]
    kind, text = failures[0] if failures else ("ended", done.stdout.decode(errors="replace").strip()[-300:])
    raise RuntimeError(f"{kind}: {text}")


def _held_open() -> int:
    """The reading end of a pipe that is closed when this process ends, however it does, which ends those that it started."""
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, False)
    return ours


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main(folder: str, device: str, seconds: str, name: str, cell: str) -> None:
    """One process of several."""
    from probe.tasks.measure_cell import measure as alone
    from probe.verdict import Card
    from spillcliff.hardware.device import facts, resolve
    from trainer.run.distributed import Seat, Team

    threading.Thread(target=_end_with_parent, daemon=True).start()
    seat = Seat.of(os.environ)
    team = Team(seat, is_sharded(name))
    try:
        where = team.place(resolve(device))
        team.join(where)
        nothing_spills = Card(None, is_card=False)  # one that left early would leave the others waiting
        values = alone(Cell(**json.loads(cell)), device, facts(where).uuid, float(seconds), nothing_spills, None,
                       lambda progress: None, team)
        values |= {name: team.largest(values[name]) for name in PEAKS}
        team.leave()
    except Exception as e:  # whatever it was, the one that measures must hear of it
        (Path(folder) / f"failed-{seat.rank}.json").write_text(json.dumps([type(e).__name__, str(e)]))
        raise
    if seat.leads:
        (Path(folder) / "measured.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])
