"""Measures one cell in this process, which must be a fresh one."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch._dynamo  # which the first optimizer step would import, 4 s on an H200's host: what stands ready has it

from probe.cell import Cell, shape
from probe.stats import is_settled, is_steady
from probe.tasks import custom_step
from probe.verdict import MIN_STEPS, Card, spill
from spillcliff.errors import UserError, is_out_of_memory
from spillcliff.hardware import device, nvml
from spillcliff.hardware.usage import Claim
from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig, clip_for
from trainer.data.tokens import Tokens, feed
from trainer.run.distributed import Team
from trainer.run.log import process_seconds
from trainer.run.step import TrainStep
from trainer.run.timing import Pace, StepTimes

ALONE = Team()
WARM_S = 0.5
"""Least warm-up: an H200 needs about as long to raise its clock from idle."""
MAX_STEPS = 200
SLOW_STEPS = 3
"""Steps that show a spill by their time alone."""
LOOK_S = 1.0
"""Time between looks at the counters while steps are timed: the driver is asked as seldom as a spill still shows in time."""


def look(name: str | None, folder: str, report) -> dict:
    """What the device is, and how fast `folder`'s disk takes a checkpoint; makes no context on a card."""
    import dataclasses

    where = device.resolve(name)
    return dataclasses.asdict(device.facts(where)) | {"disk_write_bytes_s": disk_rate(Path(folder))}


def started(report) -> dict:
    """{start_up_s}: seconds of starting Python and importing all this, for a process that was started anew."""
    return {"start_up_s": process_seconds()}


def copy_rate(name: str, report) -> dict:
    """How fast a card's tensors are copied to host memory, as a checkpoint begins, in bytes per second: first_copy_bytes_s
    into memory that is new to the process, as the first one of a run does, and copy_bytes_s into the same again."""
    tensors = torch.ones(16, 1 << 22, device=device.resolve(name)).unbind()
    host, rates = [torch.empty(t.shape) for t in tensors], []
    for _ in range(2):
        device.synchronize(tensors[0].device)
        begin = time.perf_counter()
        for there, tensor in zip(host, tensors, strict=True):
            there.copy_(tensor)
        rates.append(tensors[0].nbytes * len(tensors) / (time.perf_counter() - begin))
    return {"first_copy_bytes_s": rates[0], "copy_bytes_s": rates[1]}


def disk_rate(folder: Path, size: int = 1 << 28) -> float | None:
    """Bytes per second of writing a checkpoint of 256 MB in `folder`, as a run writes it; None where it can't be written. A
    plain file of 64 MB was written at 1.7 GB/s where a run's checkpoints of 1.8 GB then took 2.8 s each."""
    state = {"state": torch.ones(size // 4)}
    try:
        with tempfile.TemporaryDirectory(dir=folder) as run:
            begin = time.perf_counter()
            checkpoint.save(Path(run), 0, state, {})
            return size / (time.perf_counter() - begin)
    except (OSError, UserError):
        return None


def fed(cell: Cell, where: torch.device, share: StepConfig | None = None) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """(a batch to evaluate, each step's tokens) of random ids, for a process's `share` of the cell's step if it is not all,
    the way a run feeds its own: on an H200 the stream that copies them takes 73 MB of the card, which tokens made there
    would not show."""
    step = share or cell.step
    ids = np.random.default_rng(0).integers(cell.vocab, size=2 * step.batch * step.length + 1, dtype=np.uint32)
    tokens = Tokens(ids, cell.vocab, "random")
    return torch.from_numpy(tokens.fixed(step.batch, step.length, 1)[0]), feed(tokens, step, 0, where)


class _Spilled(Exception):
    """The cell has certainly spilled: no more of it need be run."""


def measure(cell: Cell, name: str, uuid: str, seconds: float, card: Card, slow_s: float | None, report,
            team: Team = ALONE) -> dict:
    """Runs the step that trains until its time is known, for about `seconds`; returns the measured fields of a record.

    `report` is told of each step, so that a process which dies leaves what it had measured. A cell that has certainly
    spilled is left at once: by its memory, or by three steps past `slow_s`. Exceptions of torch pass through. In a `team`
    that has joined, this process does its share of each step, and what it tells is its own.
    """
    start_up_s = process_seconds()
    claim = Claim()
    where = team.place(device.resolve(name))
    share = team.seat.equal(cell.step)
    free = nvml.free_bytes(uuid) if where.type == "cuda" else _available_bytes()
    report({"free_at_start_bytes": free, "setting_up": True})
    claim.begin(where, uuid)
    began = time.perf_counter()
    looked = began
    warmup: list[StepTimes] = []
    timed: list[StepTimes] = []
    found = {"free_at_start_bytes": free, "start_up_s": start_up_s}

    def note() -> dict:
        """What is known of the memory so far."""
        found.update(claim.peaks(where, uuid))
        found["non_local_growth_bytes"] = claim.non_local_growth()
        return found

    def is_excused() -> bool:
        """Whether slow steps have another cause than a spill: heat, or memory that was found to be fast."""
        return bool(nvml.readings(uuid).get("throttle", 0) & device.THROTTLED
                    or card.cliff and card.cliff.shows_fast(note()["device_peak_bytes"]))

    def run_until(times: list[StepTimes], enough) -> None:
        nonlocal looked
        begin = time.perf_counter()
        team.agree(False)  # a team's answer is that of the last question, which was another loop's
        while not team.agree(enough(time.perf_counter() - begin)):
            finished = pace.run(next(steps), 1e-5)
            if finished:
                times.append(finished)
                report({"warmup_s": [t.step_s for t in warmup], "step_s": [t.step_s for t in timed]})
                if len(warmup) < 3 or time.perf_counter() - looked > LOOK_S:
                    if spill(note(), cell, card):
                        raise _Spilled
                    looked = time.perf_counter()
            is_slow = slow_s and len(times) >= SLOW_STEPS and min(t.step_s for t in times[-SLOW_STEPS:]) > slow_s
            if is_slow and not is_excused():
                raise _Spilled
        times.append(pace.drain())

    setup = eval_s = None
    retries = 0
    try:
        if cell.is_foreign:
            step, window, steps = custom_step.AnyStep(cell, where), None, itertools.repeat(None)
        else:
            # the update's cost doesn't depend on the rate, and a tiny one keeps the loss finite on random tokens
            step = TrainStep(shape(cell), share, OptimizerConfig(1e-5, clip=clip_for(share)), where, team=team)
            window, steps = fed(cell, where, share)
        pace = Pace(step)
        device.synchronize(where)
        report({"setting_up": False})
        if window is not None:
            step.evaluate(window)  # as a run does before its first step: what it leaves in the allocator stays
        run_until(warmup, lambda s: len(warmup) >= 2 and (
            s >= seconds / 3 or s >= WARM_S and is_steady([t.step_s for t in warmup], 0.02)))
        setup = time.perf_counter() - began - sum(t.step_s for t in warmup[1:])
        if window is not None:
            device.synchronize(where)
            begin = time.perf_counter()
            step.evaluate(window)
            device.synchronize(where)
            eval_s = time.perf_counter() - begin
        claim.watch()
        retries = note()["alloc_retries"]
        run_until(timed, lambda s: len(timed) >= MIN_STEPS and (
            s >= seconds * 2 / 3 or len(timed) >= MAX_STEPS or is_settled([t.step_s for t in timed], 0.01)))
    except _Spilled:  # the step that is still running is not waited for: it may take minutes
        if not timed:  # the first step loads kernels, but it has to do where it is the only one
            warmup, timed = (warmup[:1], warmup[1:]) if len(warmup) > 1 else ([], warmup)
    except Exception as e:
        if is_out_of_memory(type(e).__name__, str(e)):  # how much it had taken by then tells a spill from a failure
            report(note() | {"readings": {"others": claim.others(uuid)}} if where.type == "cuda" else note())
        raise
    readings = nvml.readings(uuid) | {"others": claim.others(uuid)} if where.type == "cuda" else {}
    values = {"warmup_s": [t.step_s for t in warmup], "step_s": [t.step_s for t in timed], "eval_s": eval_s,
              "setup_s": setup, "readings": readings, **note()}
    values["timed_retries"] = values["alloc_retries"] - retries
    if timed and not cell.is_foreign:
        values |= {"micro_s": median(t.micro_s for t in timed), "optimizer_s": median(t.optimizer_s for t in timed)}
    return values


def _available_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available
