"""Writes a run's checkpoints while it goes on."""

import threading
import time
from typing import TYPE_CHECKING, Any

from spillcliff.failures import failure, is_out_of_memory
from spillcliff.files import Say
from spillcliff.units import format_bytes
from trainer import checkpoint
from trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor


class Saver:
    """Writes the checkpoints of a run while it goes on: from a card the step waits for the copy to host memory alone. On a
    processor it waits for the disk too, since a copy there would take as much again of the memory that the plan counts.
    `write_s` are the seconds that the disk took so far, `blocked_s` those that `save` and `wait` took of the run; `failures`
    are told by `say` and counted, and the run goes on; `last_failure` is why the last one failed, None if it did not."""

    def __init__(self, run: RunFolder, say: Say) -> None:
        self.write_s = self.blocked_s = 0.0
        self.failures = 0
        self.last_failure: str | None = None
        self._run, self._say = run, say
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None

    def save(self, step: int, tensors: dict[str, "Tensor"], facts: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._join()
        if all(tensor.device.type == "cpu" for tensor in tensors.values()):
            self._write(step, tensors, facts)
        elif self._copy(tensors):
            self._thread = threading.Thread(target=self._write, args=(step, self._host, facts))
            self._thread.start()
        self.blocked_s += time.perf_counter() - begin

    def wait(self) -> None:
        """Returns when the last one is on disk, or has failed."""
        begin = time.perf_counter()
        self._join()
        self.blocked_s += time.perf_counter() - begin

    def _copy(self, tensors: dict[str, "Tensor"]) -> bool:
        """Whether the host has taken a copy; where it has no memory for one that is a failure like a full disk's."""
        import torch

        try:
            if not self._host:  # kept: into new memory an H200's host took 1.3 s for 1.8 GB, into this 0.3
                self._host = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        except Exception as e:
            if not is_out_of_memory(*failure(e)):
                raise
            size = format_bytes(sum(t.nbytes for t in tensors.values()))
            self._fail(f"no checkpoint: the host has no {size} of memory to copy it to")
            return False
        for name, tensor in tensors.items():
            self._host[name].copy_(tensor)
        return True

    def _fail(self, why: str) -> None:
        self.failures, self.last_failure = self.failures + 1, why
        self._say(f"{why}; the run goes on, and the checkpoints before it are still there")

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, tensors: dict[str, "Tensor"], facts: dict[str, Any]) -> None:
        begin = time.perf_counter()
        try:
            checkpoint.save(self._run, step, tensors, facts, self._say)
            self.last_failure = None
        except Exception as e:  # whatever it was, a thread must not take it with it
            self._fail(str(e))
        self.write_s += time.perf_counter() - begin
