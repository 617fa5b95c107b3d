"""Checkpoints: a folder each, safetensors and JSON, there whole or not at all."""

import os
import shutil
import threading
import time
from pathlib import Path

from trainer.errors import UserError
from trainer.files import read_json, write_json

KEEP = 2
"""Newest ones kept: one to go on from, one in case the newest is damaged."""


def save(run: Path, step: int, tensors: dict, facts: dict) -> Path:
    """Writes checkpoints/step-N and removes all but the newest KEEP; UserError if the disk doesn't take it."""
    from safetensors.torch import save_file

    folder = run / "checkpoints" / f"step-{step:08d}"
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / "state.safetensors")
        with open(temporary / "state.safetensors", "rb+") as f:
            os.fsync(f.fileno())
        write_json(temporary / "state.json", {"step": step, **facts})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except Exception as e:  # safetensors has an error type of its own for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"can't write checkpoint {folder}: {getattr(e, 'strerror', None) or e}") from None
    for old in _all(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


class Saver:
    """Writes the checkpoints of a run while it goes on: from a card the step waits for the copy to host memory alone. On a
    processor it waits for the disk too, since a copy there would take as much again of the memory that the plan counts.
    `write_s` are the seconds that the disk took so far, `held_s` those that `save` and `wait` took of the run."""

    def __init__(self, run: Path) -> None:
        self.write_s = self.held_s = 0.0
        self._run, self._host = run, {}
        self._thread: threading.Thread | None = None
        self._failure: UserError | None = None

    def save(self, step: int, tensors: dict, facts: dict) -> None:
        """UserError if the disk did not take this one, or the one before it."""
        import torch

        begin = time.perf_counter()
        self._finish()
        if all(tensor.device.type == "cpu" for tensor in tensors.values()):
            self._write(step, tensors, facts)
            self._finish()
        else:
            if not self._host:  # kept: into new memory an H200's host took 1.3 s for 1.8 GB, into this 0.3
                self._host = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
            for name, tensor in tensors.items():
                self._host[name].copy_(tensor)
            self._thread = threading.Thread(target=self._write, args=(step, self._host, facts))
            self._thread.start()
        self.held_s += time.perf_counter() - begin

    def wait(self) -> None:
        """Returns when the last one is on disk; UserError if it isn't."""
        begin = time.perf_counter()
        self._finish()
        self.held_s += time.perf_counter() - begin

    def _finish(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, step: int, tensors: dict, facts: dict) -> None:
        begin = time.perf_counter()
        try:
            save(self._run, step, tensors, facts)
        except UserError as e:
            self._failure = e
        self.write_s += time.perf_counter() - begin


def _all(run: Path) -> list[Path]:
    return sorted(p for p in (run / "checkpoints").glob("step-*") if p.suffix != ".tmp")


def load(run: Path, say=lambda line: None) -> tuple[dict, dict]:
    """(facts, tensors) of the newest readable checkpoint of a run, on the processor; `say` names each broken one passed
    over. UserError if there is none."""
    from safetensors.torch import load_file

    for folder in reversed(_all(run)):
        try:
            facts = read_json(folder / "state.json", "checkpoint")
            return facts, load_file(folder / "state.safetensors")
        except Exception as e:
            say(f"checkpoint {folder.name} is broken and passed over: {str(e).splitlines()[0]}")
    raise UserError(f"run {run} has no usable checkpoint")
