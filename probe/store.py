"""results/<device>/: device.json, cliff.json, records.jsonl and the pictures of one device; and who may measure on it."""

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path

from probe.cliff import Cliff
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.hardware.device import DeviceFacts
from spillcliff.units import is_figure

RATES = ("start_up_s", "disk_write_bytes_s", "first_copy_bytes_s", "copy_bytes_s")
TAKEN = ("memory", "start_up_s", "first_copy_bytes_s", "copy_bytes_s")


def device_file(path: Path) -> dict:
    """What was noted of a device, checked; {} if there is no such file, UserError if it is none."""
    if not path.exists():
        return {}
    values = read_json(path, "device file")
    memory, capability = values.get("memory") or {}, values.get("capability") or (0, 0)
    if not isinstance(memory, dict) or not all(map(is_figure, memory.values())):
        raise UserError(f"device file {path}: memory must be an object of bytes; `probe card` makes it again")
    if not isinstance(capability, (list, tuple)) or [type(part) for part in capability] != [int, int]:
        raise UserError(f"device file {path}: capability is {capability!r:.40}; it must be two whole numbers, or null")
    for name in (*RATES, "total_bytes"):
        value = values.get(name)
        if value is not None and not is_figure(value, 1e-9):
            raise UserError(f"device file {path}: {name} is {value!r:.40}; it must be a number above 0, or null")
    if not isinstance(values.get("kind", "cuda"), str):
        raise UserError(f"device file {path}: kind must be text")
    return values


class Store:
    """The folder of one device; UserError if another device of the same name has it."""

    def __init__(self, results: Path, facts: DeviceFacts, extra: dict) -> None:
        self.folder = results / facts.fingerprint
        self.records = self.folder / "records.jsonl"
        self.cliff_file = self.folder / "cliff.json"
        self.soaks = self.folder / "soak.jsonl"
        self._path = self.folder / "device.json"
        self.device = {"schema": 1, **dataclasses.asdict(facts), **extra}
        if old := device_file(self._path):
            size = old.get("total_bytes")
            if size and abs(size / facts.total_bytes - 1) > 0.02:
                raise UserError(f"{self.folder} was measured on a {facts.name} with {size / 1e9:.1f} GB, and this one has "
                                f"{facts.total_bytes / 1e9:.1f} GB; keep them apart with --results DIR")
            if all(old.get(name) == getattr(facts, name) for name in ("torch", "cuda", "driver")):
                self.device |= {k: old[k] for k in TAKEN if k in old}  # another build's must be measured again
        write_json(self._path, self.device)

    def keep(self, taken: dict) -> None:
        """Notes what a run takes beside its step: see probe.grid.bench.takes."""
        self.device |= taken
        write_json(self._path, self.device)

    def cliff(self) -> Cliff | None:
        return Cliff.load(self.cliff_file)


@contextlib.contextmanager
def alone(facts: DeviceFacts):
    """Holds the device against other probes of this user, as long as this process lives; UserError if one has it."""
    from filelock import FileLock, Timeout

    # one file per user, since a file of another one's can't be opened; the system lets go of it however a process ends
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    lock = FileLock(Path(tempfile.gettempdir()) / f"spillcliff-{user}-{facts.uuid or facts.fingerprint}.lock")
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        raise UserError(f"another probe is measuring on {facts.name}: two at once would time each other; wait for it, or "
                        f"end it") from None
