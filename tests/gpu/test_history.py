"""On a card: the script is the allocator's own history, event by event; the model of the allocator makes its choices."""

import json
import subprocess
import sys

import pytest
import torch
from helpers.made import ROOT

from probe.cell import Cell
from probe.estimate import step_script
from probe.estimate.allocator import Allocator, Block
from probe.estimate.peak import CardMemory, estimate, model_of

pytestmark = pytest.mark.gpu

CHILD = """
import json, sys
import torch
torch.cuda.init()
torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
from probe.cell import Cell
from probe.tasks.measure_cell import LR, random_feed
from spillcliff.hardware.device import synchronize
from trainer.config import OptimizerConfig, clip_for
from trainer.run.step import TrainStep
from trainer.run.timing import StepTimer

cell, device = Cell.from_json(json.loads(sys.argv[1])), torch.device("cuda", 0)
step = TrainStep(cell.config, cell.step, OptimizerConfig(LR, clip=clip_for(cell.step)), device)
evaluated, batches = random_feed(cell, device)
timer = StepTimer(step)
step.evaluate(evaluated)
synchronize(device)
for _ in range(3):
    timer.run(next(batches), LR)
timer.drain()
step.evaluate(evaluated)
synchronize(device)
timer.run(next(batches), LR)
timer.drain()
streams, rows = {}, []
for e in torch.cuda.memory._snapshot()["device_traces"][0]:
    if e["action"] != "free_requested":
        rows.append([e["action"], e["addr"], e["size"], streams.setdefault(e["stream"], len(streams))])
s = torch.cuda.memory_stats()
print(json.dumps([rows, s["allocated_bytes.all.peak"], s["reserved_bytes.all.peak"]]))
"""
CELLS = [Cell.of("1M", 2, 100, vocab=500), Cell.of("10M", 3, 256), Cell.of("10M", 3, 600, 2, recompute="elementwise"),
         Cell.of("10M", 2, 256, 2, recompute="block"), Cell.of("10M", 2, 256, update="backward"),
         Cell.of("10M", 3, 256, 2, engine="graph"), Cell.of("10M", 2, 200, 2, engine="graph", recompute="block")]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_history_is_the_script_and_the_model_chooses_alike(cell: Cell) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(cell.to_json())], capture_output=True, text=True,
                          cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    history, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    card = CardMemory.of({"kind": "cuda", "capability": torch.cuda.get_device_capability(0)})
    script = step_script.script(model_of(cell), cell.step, card.workspace_bytes)
    phases = [*script.start, *script.evaluation, *script.record, *script.step * 3, *script.evaluation, *script.step]

    segments = iter([row for row in history if row[0] == "segment_alloc"])

    def place(size: int) -> int:
        _, address, true_size, _ = next(segments)
        assert size == true_size
        return address

    model, peak = Allocator(place), 0
    alive: dict[int, Block] = {}
    real = iter([row for row in history if row[0] in ("alloc", "free_completed")])
    for phase in phases:
        if phase.empties:
            model.empty_cache()
        for name, size, _ in phase.events:
            if size and name in alive:
                continue
            action, address, true_size, stream = next(real)
            if size:
                assert (action, true_size, stream) == ("alloc", size, phase.stream)
                alive[name] = model.allocate(size, phase.stream, phase.recording)
                assert alive[name].address == address
                peak = max(peak, model.allocated)
            else:
                assert (action, address) == ("free_completed", alive[name].address)
                model.free(alive.pop(name))
    assert next(real, None) is None
    assert next(segments, None) is None
    assert (peak, model.reserved_peak) == (allocated, reserved)
    got = estimate(cell, card)
    assert got.allocated_bytes == pytest.approx(allocated, rel=0.005)
    assert got.reserved_bytes == pytest.approx(reserved, rel=0.03)
