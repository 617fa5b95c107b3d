"""Measures one cell by several processes, started by torchrun as their training is.

    python -m torch.distributed.run ... -m probe.tasks.measure_distributed FOLDER

is what each of them runs: the task lies in FOLDER, where the main one leaves what was measured.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from probe.outcome import CellProgress
from probe.records import Measurement
from probe.tasks.table import MeasureCell, MeasureDistributed
from probe.tasks.worker import child_environment
from probe.verdict import Card
from spillcliff.failures import FailedElsewhere, Failure, failure, is_out_of_memory, is_peer_lost
from spillcliff.hardware.fingerprints import device_count, is_sharded

TASK, ANSWER = "task.pickle", "answer.pickle"
_SIGNAL = re.compile(r"Signal \d+ \((SIG\w+)\)")
"""As torchrun names what ended a process."""
PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes")


def measure_distributed(task: MeasureDistributed, send: Callable[[CellProgress], None]) -> Measurement:
    """As measure_cell.measure_cell, by the task's group: times of the main process, peaks of the largest. Nothing is told
    meanwhile. FailedElsewhere with what made it fail."""
    send(CellProgress())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TASK).write_bytes(pickle.dumps(task))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(device_count(task.group)), "--", "-m", __name__, name]
        done = subprocess.run(command, stdin=_pipe_that_ends_with_us(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=os.environ | child_environment())
        if (folder / ANSWER).exists():
            return pickle.loads((folder / ANSWER).read_bytes())
        in_order = sorted(folder.glob("failed-*.json"), key=lambda p: p.stat().st_mtime_ns)
        failures = [json.loads(p.read_text()) for p in in_order]
    raise FailedElsewhere(*cause([Failure(*f) for f in failures], done.stdout.decode(errors="replace")))


def cause(failures: Sequence[Failure], printed: str) -> Failure:
    """What made a group fail, of what its processes told, the first first, and torchrun `printed`: memory that ran out in
    any of them, a process that a signal ended, which tells nothing itself, else the first failure that isn't the loss
    of another process."""
    if of_memory := next((f for f in failures if is_out_of_memory(*f)), None):
        return of_memory
    if ended := _SIGNAL.search(printed):
        return Failure("Killed" if ended[1] == "SIGKILL" else "Ended", f"a process of the group ended by {ended[0]}")
    other = next((f for f in failures if not is_peer_lost(f.text)), None)
    return other or (failures[0] if failures else Failure("Ended", printed.strip()[-300:]))


def _pipe_that_ends_with_us() -> int:
    """The reading end of a pipe that is closed when this process ends, however it does, which ends those that it started."""
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, False)
    return ours


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main(folder: Path) -> None:
    """One process of several."""
    from probe.tasks.measure_cell import measure_cell
    from spillcliff.hardware.device import device_facts, resolve_device
    from trainer.ranks import World
    from trainer.run.distributed import ProcessGroup

    threading.Thread(target=_end_with_parent, daemon=True).start()
    task: MeasureDistributed = pickle.loads((folder / TASK).read_bytes())
    world = World.of_environment(os.environ)
    group = ProcessGroup(world, is_sharded(task.group))
    try:
        device = group.own_device(resolve_device(task.device))
        group.join(device)
        nothing_spills = Card(None, is_card=False)  # one that left early would leave the others waiting
        own = MeasureCell(task.cell, task.device, device_facts(device).uuid, task.seconds, nothing_spills)
        measured = measure_cell(own, lambda progress: None, group)
        peaks: dict[str, Any] = {name: group.largest(getattr(measured, name)) for name in PEAKS}
        measured = replace(measured, **peaks)
        group.leave()
    except Exception as e:  # whatever it was, the one that measures must hear of it
        (folder / f"failed-{world.rank}.json").write_text(json.dumps(failure(e)))
        raise
    if world.is_main:
        (folder / ANSWER).write_bytes(pickle.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
