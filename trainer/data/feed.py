"""Each step's tokens on the device, the next ones staged while the current step runs."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainer.config import StepConfig
from trainer.ranks import ALONE, World

if TYPE_CHECKING:
    import torch


class Batches(Protocol):
    """What steps can be fed from: data.dataset.Dataset, or random tokens."""

    def batch(self, seed: int, step: int, config: StepConfig, world: World) -> np.ndarray: ...


def feed(data: Batches, config: StepConfig, seed: int, device: "torch.device", start: int = 0,
         world: World = ALONE) -> Iterator["torch.Tensor"]:
    """Each step's tokens on the device from step `start` on, int32 (accum, batch, length + 1); valid until the next
    but one is asked for. On a card the following step's are copied from pinned memory, on a stream of their own, while
    the current one runs. No worker processes: slices of a mapped file take microseconds, and under Windows one worker
    takes 3 s to start (pytorch #153594)."""
    import torch

    if device.type != "cuda":
        for step in itertools.count(start):
            yield torch.from_numpy(data.batch(seed, step, config, world)).to(device)
    size = (config.accum, config.batch, config.length + 1)
    copies = torch.cuda.Stream(device)
    host = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
    on_card = [torch.empty(size, dtype=torch.int32, device=device) for _ in range(2)]
    arrived, read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def stage(step: int) -> None:
        slot = step % 2
        arrived[slot].synchronize()  # until its last copy is through, the pinned memory is being read
        host[slot].copy_(torch.from_numpy(data.batch(seed, step, config, world)))
        copies.wait_event(read[slot])
        with torch.cuda.stream(copies):
            on_card[slot].copy_(host[slot], non_blocking=True)
            arrived[slot].record()

    stage(start)
    for step in itertools.count(start):
        slot = step % 2
        torch.cuda.current_stream(device).wait_event(arrived[slot])
        yield on_card[slot]
        read[slot].record(torch.cuda.current_stream(device))  # the step that reads it has been enqueued by now
        stage(step + 1)
