"""Checkpoints: a folder each, safetensors and JSON, there whole or not at all."""

import os
import shutil
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
