"""results/<device>/: device.json, cliff.json, records.jsonl and the pictures of one device; and who may measure on it."""

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path

from probe.cliff import Cliff
from trainer.device import DeviceFacts
from trainer.errors import UserError
from trainer.files import read_json, write_json


class Store:
    """The folder of one device; UserError if another device of the same name has it."""

    def __init__(self, results: Path, facts: DeviceFacts, extra: dict) -> None:
        self.folder = results / facts.fingerprint
        self.records = self.folder / "records.jsonl"
        self.cliff_file = self.folder / "cliff.json"
        path = self.folder / "device.json"
        if path.exists():
            old = read_json(path, "device file").get("total_bytes")
            if isinstance(old, (int, float)) and abs(old / facts.total_bytes - 1) > 0.02:
                raise UserError(f"{self.folder} was measured on a {facts.name} with {old / 1e9:.1f} GB, and this one has "
                                f"{facts.total_bytes / 1e9:.1f} GB; keep them apart with --results DIR")
        write_json(path, {"schema": 1, **dataclasses.asdict(facts), **extra})

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
