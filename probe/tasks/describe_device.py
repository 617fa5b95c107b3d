"""What a device is, and how fast a run's start, copies and checkpoints are on it: asked in a process of its own."""

import tempfile
import time
from pathlib import Path

import torch

from probe.tasks.table import CopyRates, Description
from spillcliff.errors import UserError
from spillcliff.hardware.device import device_facts, resolve_device, synchronize
from spillcliff.hardware.usage import process_seconds
from trainer import checkpoint
from trainer.run_folder import RunFolder

CHECKPOINT_BYTES = 1 << 28
COPIES, COPY_ELEMENTS = 16, 1 << 22


def describe(name: str | None, folder: Path) -> Description:
    """Makes no context on a card. UserError for a device that isn't there."""
    return Description(device_facts(resolve_device(name)), time_checkpoint(folder))


def start_up_s() -> float:
    """Seconds since this process was started, when it has imported about what a run does."""
    import probe.tasks.measure_cell  # noqa: F401

    return process_seconds()


def time_copies(name: str) -> CopyRates:
    """Of 256 MB on the card called `name`."""
    tensors = torch.ones(COPIES, COPY_ELEMENTS, device=resolve_device(name)).unbind()
    host, rates = [torch.empty(t.shape) for t in tensors], []
    for _ in range(2):
        synchronize(tensors[0].device)
        begin = time.perf_counter()
        for copy, tensor in zip(host, tensors, strict=True):
            copy.copy_(tensor)
        rates.append(tensors[0].nbytes * len(tensors) / (time.perf_counter() - begin))
    return CopyRates(*rates)


def time_checkpoint(folder: Path) -> float | None:
    """Bytes per second of writing a checkpoint of 256 MB in `folder`, as a run writes it; None where it can't be written. A
    plain file of 64 MB was written at 1.7 GB/s where a run's checkpoints of 1.8 GB then took 2.8 s each."""
    state = {"state": torch.ones(CHECKPOINT_BYTES // 4)}
    try:
        with tempfile.TemporaryDirectory(dir=folder) as run:
            begin = time.perf_counter()
            checkpoint.save(RunFolder(Path(run)), 0, state, {})
            return CHECKPOINT_BYTES / (time.perf_counter() - begin)
    except (OSError, UserError):
        return None
