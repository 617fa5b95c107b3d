"""results/<device>/: device.json, records.jsonl and the pictures of one device."""

import dataclasses
from pathlib import Path

from trainer.device import DeviceFacts
from trainer.errors import UserError
from trainer.files import read_json, write_json


class Store:
    """The folder of one device; UserError if another device of the same name has it."""

    def __init__(self, results: Path, facts: DeviceFacts, extra: dict) -> None:
        self.folder = results / facts.fingerprint
        self.records = self.folder / "records.jsonl"
        path = self.folder / "device.json"
        if path.exists():
            old = read_json(path, "device file").get("total_bytes")
            if isinstance(old, (int, float)) and abs(old / facts.total_bytes - 1) > 0.02:
                raise UserError(f"{self.folder} was measured on a {facts.name} with {old / 1e9:.1f} GB, and this one has "
                                f"{facts.total_bytes / 1e9:.1f} GB; keep them apart with --results DIR")
        write_json(path, {"schema": 1, **dataclasses.asdict(facts), **extra})
