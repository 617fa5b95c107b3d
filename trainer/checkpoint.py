"""Checkpoints: a folder each, safetensors and JSON, there whole or not at all, every byte under a checksum."""

import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, read_json, write_json
from spillcliff.schema import is_number, is_whole
from spillcliff.units import format_bytes
from trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 2
"""Newest ones kept, beside the best: one to go on from, one in case the newest is damaged."""
STATE_BYTES = 12
"""Of each parameter: its weight and two moments in fp32; gradients are not kept."""
STATE, FACTS = "state.safetensors", "state.json"
CHUNK = 1 << 22
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, 112, 122}
"""The system's numbers for a disk or a quota that is full: 112 is Windows', 122 Linux's for a quota."""


def save(run: RunFolder, step: int, tensors: dict[str, "Tensor"], facts: dict, say: Say = ignore) -> Path:
    """Writes the checkpoint of `step` and removes all but the newest KEEP and the one of the lowest `val_loss`. Where the
    disk has no room for one more, older ones go first, down to the newest: `say` is told if the best is among them.
    UserError if the disk doesn't take it even so, and then those that are left are as they were."""
    for left in run.unfinished_checkpoints():
        shutil.rmtree(left, ignore_errors=True)
    while True:
        try:
            folder = _write(run, step, tensors, facts)
            break
        except Exception as e:  # safetensors has an error type of its own for a full disk
            if not (_is_disk_full(e) and _make_room(run, step, say)):
                why = getattr(e, "strerror", None) or e
                raise UserError(f"can't write checkpoint {run.checkpoint(step)}: {why}") from None
    _prune(run, step)
    return folder


def _write(run: RunFolder, step: int, tensors: dict[str, "Tensor"], facts: dict) -> Path:
    """Whatever fails is raised as it is, and leaves nothing behind."""
    from safetensors.torch import save_file

    folder = run.checkpoint(step)
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        temporary.mkdir(parents=True)
        size, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(temporary).free
        if size > free:
            raise OSError(errno.ENOSPC, f"it takes {format_bytes(size)} and {format_bytes(free)} are free")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / STATE)
        with open(temporary / STATE, "rb+") as f:
            os.fsync(f.fileno())
        write_json(temporary / FACTS, _sealed({"step": step, **facts, "files": {STATE: _sha256(temporary / STATE)}}))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        _flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _is_disk_full(e: Exception) -> bool:
    """Whether a write failed for want of room; safetensors has the system's number in its text alone."""
    cause = e.__context__ if isinstance(e, UserError) else e
    in_text = re.search(r"\(os error (\d+)\)", str(e))
    return (int(in_text[1]) if in_text else getattr(cause, "errno", None)) in DISK_FULL


def _make_room(run: RunFolder, written: int, say: Say) -> bool:
    """Removes one checkpoint that can be spared; False if there is none."""
    facts = _facts(run)
    best = _best(facts)
    step = next_to_go(list(facts), best, written)
    if step is None:
        return False
    folder = run.checkpoint(step)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        return False
    if step == best:
        say(f"the disk has no room to keep {folder.name}, the best so far: it went before that of step {written} is written")
    return True


def next_to_go(steps: list[int], best: int | None, written: int) -> int | None:
    """Which of the checkpoints of `steps` (lowest first) goes first where there is no room for that of `written`: one past
    it, which a resume passed over as broken; then the oldest, the best last; never the newest, so that None is left."""
    before = [step for step in steps if step <= written]
    if before != steps:
        return steps[-1]
    return min(before[:-1], key=lambda step: (step == best, step), default=None)


def _sealed(values: dict) -> dict:
    """The values with a checksum over them."""
    return values | {"sha256": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _flush_folder(folder: Path) -> None:
    """Puts the new name on disk too, where a folder can be opened (not under Windows)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _prune(run: RunFolder, written: int) -> None:
    """Keeps the newest KEEP up to the step just `written`: later ones were broken and passed over by a resume."""
    facts = _facts(run)
    kept = {*[step for step in facts if step <= written][-KEEP:], _best(facts)}
    for step in facts:
        if step not in kept:
            shutil.rmtree(run.checkpoint(step), ignore_errors=True)


def _facts(run: RunFolder) -> dict[int, dict]:
    """The facts of each checkpoint by step, lowest first, those that can't be read as {}. A copy of another step's, which
    somebody put there under a name like ours, is left out: it isn't ours to remove."""
    facts = {}
    for step in run.checkpoint_steps():
        try:
            facts[step] = read_json(run.checkpoint(step) / FACTS, "checkpoint")
        except UserError:
            facts[step] = {}
    return {step: values for step, values in facts.items() if values.get("step", step) == step}


def _losses(facts: dict[int, dict]) -> dict[int, float]:
    """The validation loss of each checkpoint that has one, by step."""
    return {step: values["val_loss"] for step, values in facts.items() if is_number(values.get("val_loss"))}


def _best(facts: dict[int, dict]) -> int | None:
    """The step of the lowest validation loss, of several the latest; None where there is none."""
    losses = _losses(facts)
    return min(losses, key=lambda step: (losses[step], -step), default=None)


def check(folder: Path) -> dict:
    """The facts of a checkpoint, every byte of it checked; UserError says what is wrong with it."""
    values = read_json(folder / FACTS, "checkpoint")
    seal = values.pop("sha256", None)
    if _sealed(values)["sha256"] != seal:
        raise UserError(f"{FACTS} is not what was written")
    files = values.get("files")
    if not isinstance(files, dict) or STATE not in files or not is_whole(values.get("step")):
        raise UserError(f"{FACTS} is of something else: it lacks a step, or the checksum of {STATE}")
    for name, expected in files.items():
        try:
            digest = _sha256(folder / name)
        except OSError as e:
            raise UserError(f"{name}: {e.strerror or e}") from None
        if digest != expected:
            raise UserError(f"{name} is not what was written")
    return values


def _first_whole(run: RunFolder, steps: list[int], say: Say) -> tuple[dict, Path] | None:
    """(facts, folder) of the first of `steps` whose checkpoint is whole; `say` names each broken one before it."""
    for step in steps:
        folder = run.checkpoint(step)
        try:
            facts = check(folder)
        except UserError as e:
            say(f"checkpoint {folder.name} is broken and passed over: {e}")
            continue
        if facts["step"] == step:
            return facts, folder
        say(f"checkpoint {folder.name} is a copy of that of step {facts['step']} and passed over")
    return None


def facts_if_whole(run: RunFolder, step: int) -> dict | None:
    """The facts of the checkpoint of `step`; None if it is broken, or a copy of another's."""
    whole = _first_whole(run, [step], ignore)
    return whole and whole[0]


class NoCheckpoint(UserError):
    """A run has none that is whole."""


def newest(run: RunFolder, say: Say = ignore) -> tuple[dict, Path]:
    """(facts, folder) of the newest checkpoint of a run that is whole; `say` names each broken one that was passed over.
    NoCheckpoint if there is none."""
    steps = run.checkpoint_steps()
    if whole := _first_whole(run, steps[::-1], say):
        return whole
    raise NoCheckpoint(f"run {run.path} has no usable checkpoint" + f" among its {len(steps)}" * bool(steps))


def last_good(run: RunFolder) -> str:
    """The newest whole checkpoint in words."""
    try:
        return str(newest(run)[1])
    except NoCheckpoint:
        return "the start, since there is no checkpoint yet,"


def set_aside(run: RunFolder, step: int) -> Path:
    """Renames a checkpoint so that no resume takes it and nothing removes it; returns its new name. UserError if it can't
    be renamed."""
    folder = run.checkpoint(step)
    aside, n = folder.with_name(f"{folder.name}.aside"), 1
    while aside.exists():
        n += 1
        aside = folder.with_name(f"{folder.name}.aside-{n}")
    try:
        os.replace(folder, aside)
    except OSError as e:
        raise UserError(f"can't rename checkpoint {folder}: {e.strerror or e}") from None
    return aside


def select(run: RunFolder, which: str, say: Say = ignore) -> tuple[dict, Path]:
    """(facts, folder) of a run's "newest", "best" (by validation loss) or "step-N" checkpoint, N alone being the same;
    broken ones are passed over as by `newest`. UserError if there is none such."""
    if which == "newest":
        return newest(run, say)
    if which == "best":
        losses = _losses(_facts(run))
        return _first_whole(run, sorted(losses, key=lambda step: (losses[step], -step)), say) or newest(run, say)
    steps, number = run.checkpoint_steps(), which.removeprefix("step-")
    if not (number.isascii() and number.isdigit()):
        raise UserError(f"--checkpoint {which!r} must be best, newest or step-N, such as step-{max(steps, default=100)}")
    if int(number) not in steps:
        have = ", ".join(f"step-{step}" for step in steps) or "no checkpoint"
        raise UserError(f"run {run.path} has no checkpoint of step {number.lstrip('0') or 0}; there is {have}")
    folder = run.checkpoint(int(number))
    try:
        facts = check(folder)
    except UserError as e:
        raise UserError(f"checkpoint {folder} is broken: {e}") from None
    if facts["step"] != int(number):
        raise UserError(f"checkpoint {folder} is a copy of that of step {facts['step']}; name that one")
    return facts, folder


class Tensors:
    """A checkpoint's tensors by name, read one at a time, so that a resume takes no more memory than a start."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(folder / STATE, "pt")
        self.names = list(self._file.keys())

    def __getitem__(self, name: str) -> "Tensor":
        """KeyError if there is no such tensor."""
        if name not in self.names:
            raise KeyError(name)
        return self._file.get_tensor(name)
