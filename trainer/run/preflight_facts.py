"""Gathers what an audit decides on: from the device, the driver, the system and the files. Makes no context on a card."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from spillcliff.errors import NoKernels, UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.device import facts, lock_fp32, on_battery, refuse_engine, resolve
from trainer.checkpoint import KEEP
from trainer.data.dataset import open_data
from trainer.plan import Plan
from trainer.run.log import RunFolder
from trainer.run.preflight import Situation

LOAD_S = 0.3
"""Seconds over which the load of a processor is taken."""


def look(plan: Plan, where, run: Path, resume: bool = False, allow_battery: bool = False, **known) -> Situation:
    """What `plan` would meet on the torch device `where` (None: there is none that can run it) and in the folder `run`;
    `known` are fields of the Situation that the caller has."""
    seen = (_on(plan, where) if where is not None else {}) | known
    return Situation(
        plan=plan, on_battery=on_battery(), allow_battery=allow_battery, tf32=_tf32(), disk_free_bytes=_disk_free(run),
        checkpoints_there=min(KEEP, len(list((run / "checkpoints").glob("step-????????")))) if resume else 0,
        run_problem=None if resume else RunFolder.problem(run), held=RunFolder.held(run), **seen)


def examine(plan: Plan, data: Sequence[Path], val: Sequence[Path], run: Path, name: str | None, allow_battery: bool,
            **how) -> Situation:
    """What a start of `plan` on the device called `name` would meet: data that don't suit and a build that lacks the
    card's kernels are part of it; `how` are open_data's options. UserError for a device that isn't there."""
    known, where = {}, None
    try:
        where = resolve(name)
    except NoKernels as e:
        known["build"] = str(e)
    if data:
        try:
            known["tokens"] = len(open_data(plan, data, val, **how)[0])
        except UserError as e:
            known["data_problem"] = str(e)
    return look(plan, where, run, allow_battery=allow_battery, **known)


def _on(plan: Plan, where) -> dict:
    """The fields of a Situation that are the device's."""
    import psutil

    here = facts(where)
    seen = {"kind": here.kind, "fingerprint": here.fingerprint, "software": here.software, "total_bytes": here.total_bytes,
            "engine": refuse_engine(plan.step.engine, here.kind, here.capability)}
    if here.kind in ("cpu", "mps"):  # what this process holds already is part of the peak that was planned
        seen["free_bytes"] = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    if here.kind == "cpu":
        seen["busy_share"] = psutil.cpu_percent(LOAD_S) / 100
    if here.kind == "cuda":
        now = nvml.readings(here.uuid)
        seen["free_bytes"] = nvml.free_bytes(here.uuid)
        seen["power_source"] = nvml.power_source(here.uuid)
        seen["busy_percent"], seen["temperature_c"] = now.get("utilization"), now.get("temperature_c")
        seen["throttle"] = now.get("throttle")
        if seen["free_bytes"] is not None:
            seen["others"] = {pid: held for pid, held in nvml.processes(here.uuid).items() if pid != os.getpid()}
    return seen


def _tf32() -> str | None:
    """Why products would be TF32 even after the trainer's own lock; None if they would not."""
    import torch

    try:
        lock_fp32()
    except UserError as e:
        return str(e)
    on = [name for name, flags in (("cuda.matmul", torch.backends.cuda.matmul), ("cudnn", torch.backends.cudnn))
          if flags.allow_tf32]
    if on:
        return f"allow_tf32 of torch.backends' {' and '.join(on)} stays on: products would be TF32; unset what sets it"
    return None


def _disk_free(path: Path) -> int | None:
    """Bytes free where `path` is or would be made."""
    try:
        there = next((p for p in (path.absolute(), *path.absolute().parents) if p.exists()), None)
        return there and shutil.disk_usage(there).free
    except OSError:
        return None
