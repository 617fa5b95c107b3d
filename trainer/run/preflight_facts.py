"""Gathers what the checklist before a run decides on: from the device, the driver, the system and the files. Makes no
context on a card."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from spillcliff.errors import NoKernels, UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.device import device_facts, engine_refusal, lock_fp32, on_battery, resolve_device
from spillcliff.hardware.host_memory import own_bytes
from spillcliff.hardware.usage import free_bytes
from trainer.checkpoint import KEEP
from trainer.data.dataset import open_data
from trainer.plan import Plan
from trainer.run.preflight import PreflightFacts
from trainer.run_folder import RunFolder

LOAD_S = 0.3
"""Seconds over which the load of a processor is taken."""


def gather(plan: Plan, device: torch.device | None, run: RunFolder, resume: bool = False, allow_battery: bool = False,
           **known: Any) -> PreflightFacts:
    """What `plan` would meet on `device` (None: there is none that can run it) and in the folder of `run`; `known` are
    fields of the facts that the caller has."""
    values = (_of_device(plan, device) if device is not None else {}) | known
    return PreflightFacts(
        plan=plan, on_battery=on_battery(), allow_battery=allow_battery, tf32_problem=_tf32_problem(),
        disk_free_bytes=_disk_free(run), checkpoints=min(KEEP + 1, len(run.checkpoint_steps())) if resume else 0,
        folder_problem=None if resume else run.why_not_free(), is_locked=run.is_locked(), **values)


def gather_for_audit(plan: Plan, data: Sequence[Path], val: Sequence[Path], run: RunFolder, device_name: str | None,
                     allow_battery: bool, **how: Any) -> PreflightFacts:
    """What a start of `plan` on the device called `device_name` would meet: data that don't suit and a build that lacks the
    card's kernels are part of it; `how` are open_data's options. UserError for a device that isn't there."""
    known: dict[str, Any] = {}
    device = None
    try:
        device = resolve_device(device_name)
    except NoKernels as e:
        known["build_problem"] = str(e)
    if data:
        try:
            training = open_data(plan, data, val, **how)[0]
            known |= {"tokens": len(training), "sequences": training.windows(plan.step.length)}
        except UserError as e:
            known["data_problem"] = str(e)
    return gather(plan, device, run, allow_battery=allow_battery, **known)


def _of_device(plan: Plan, device: torch.device) -> dict[str, Any]:
    """The fields of the facts that are the device's."""
    facts = device_facts(device)
    values: dict[str, Any] = {
        "kind": facts.kind, "fingerprint": facts.fingerprint, "software": facts.software, "total_bytes": facts.total_bytes,
        "engine_problem": engine_refusal(plan.step.engine, facts.kind, facts.capability)}
    values["free_bytes"] = free_bytes(device, facts.uuid)
    if facts.kind in ("cpu", "mps"):  # what this process holds already is part of the peak that was planned
        values["free_bytes"] = min(facts.total_bytes, values["free_bytes"] + own_bytes())
    if facts.kind == "cpu":
        values["busy_share"] = psutil.cpu_percent(LOAD_S) / 100
    if facts.kind == "cuda":
        now = nvml.readings(facts.uuid)
        values["power_source"] = nvml.power_source(facts.uuid)
        values["busy_percent"], values["temperature_c"] = now.get("utilization"), now.get("temperature_c")
        values["throttle"] = now.get("throttle")
        if values["free_bytes"] is not None:
            values["others_bytes"] = {pid: size for pid, size in nvml.processes(facts.uuid).items() if pid != os.getpid()}
    return values


def _tf32_problem() -> str | None:
    """Why products would be TF32 even after the trainer's own lock; None if they would not."""
    try:
        lock_fp32()
    except UserError as e:
        return str(e)
    on = [name for name, flags in (("cuda.matmul", torch.backends.cuda.matmul), ("cudnn", torch.backends.cudnn))
          if flags.allow_tf32]
    if on:
        return f"allow_tf32 of torch.backends' {' and '.join(on)} stays on: products would be TF32; unset what sets it"
    return None


def _disk_free(run: RunFolder) -> int | None:
    """Bytes free where the run's folder is or would be made, with those of a checkpoint that was never finished, which goes
    before the next is written."""
    path = run.path.absolute()
    try:
        existing = next((p for p in (path, *path.parents) if p.exists()), None)
        left = sum(f.stat().st_size for folder in run.unfinished_checkpoints() for f in folder.iterdir())
        return shutil.disk_usage(existing).free + left if existing else None
    except OSError:
        return None
