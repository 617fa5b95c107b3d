"""results/<device>/: the one place that knows what the files of a measured device are called; and who may measure on it."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from probe.cliff import Cliff
from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.hardware.device import DeviceFacts
from spillcliff.hardware.software import same_version
from spillcliff.schema import Number

RATES = ("start_up_s", "disk_write_bytes_s", "first_copy_bytes_s", "copy_bytes_s")
"""What a device does beside stepping, in device.json: seconds, and bytes per second."""
MEASURED = ("memory", "start_up_s", "first_copy_bytes_s", "copy_bytes_s")
"""What of it was measured with the torch and driver of that time."""

Rate = Annotated[float | None, Number(1e-9)]


@dataclass(frozen=True)
class DeviceNotes:
    """What device.json must hold where it holds it; the rest of it is for people."""

    kind: str = "cuda"
    capability: tuple[int, int] | None = None
    memory: dict[str, Annotated[float, Number()]] | None = field(default_factory=dict)
    total_bytes: Rate = None
    start_up_s: Rate = None
    disk_write_bytes_s: Rate = None
    first_copy_bytes_s: Rate = None
    copy_bytes_s: Rate = None


@dataclass(frozen=True)
class DeviceFolder:
    """The files of one measured device by name; making one touches nothing."""

    path: Path

    @property
    def name(self) -> str:
        """The device's own."""
        return self.path.name

    @property
    def device(self) -> Path:
        """What the device is, and what it takes for itself."""
        return self.path / "device.json"

    @property
    def cliff(self) -> Path:
        """Where its memory stops being fast."""
        return self.path / "cliff.json"

    @property
    def records(self) -> Path:
        """A line for each measured cell."""
        return self.path / "records.jsonl"

    @property
    def soaks(self) -> Path:
        """A line for each soak."""
        return self.path / "soak.jsonl"

    def picture(self, series: str) -> Path:
        """The maps of one series of cells."""
        return self.path / f"grid-{series}.png"

    def load_device(self) -> dict[str, Any]:
        """device.json, checked; {} if there is no such file, UserError if it is none."""
        if not self.device.exists():
            return {}
        values = read_json(self.device, "device file")
        try:
            schema.read(DeviceNotes, values)
        except UserError as e:
            raise UserError(f"device file {self.device}: {e}; `probe card` makes it again") from None
        return values

    def load_cliff(self) -> Cliff | None:
        """None if it was not measured; UserError for a file that holds none."""
        return Cliff.load(self.cliff)


def measured_devices(results: Path) -> dict[str, DeviceFolder]:
    """The devices that have records under `results`, by name. UserError if there is none."""
    folders = {p.parent.name: DeviceFolder(p.parent) for p in sorted(results.glob("*/records.jsonl"))}
    if not folders:
        raise UserError(f"no records in {results}/*/records.jsonl; `probe grid --model 150M` measures some")
    return folders


def known_devices(results: Path) -> dict[str, DeviceFolder]:
    """The devices under `results` that were looked at, by name."""
    return {p.parent.name: DeviceFolder(p.parent) for p in sorted(results.glob("*/device.json"))}


class Store:
    """The folder of the device at hand, made; UserError if another device of the same name has it."""

    def __init__(self, results: Path, facts: DeviceFacts, extra: dict[str, Any]) -> None:
        self.folder = DeviceFolder(results / facts.fingerprint)
        self.device: dict[str, Any] = {"schema": 1, **dataclasses.asdict(facts), **extra}
        if old := self.folder.load_device():
            size = old.get("total_bytes")
            if facts.kind != "cpu" and size and abs(size / facts.total_bytes - 1) > 0.02:  # a container's varies
                raise UserError(f"{self.folder.path} was measured on a {facts.name} with {size / 1e9:.1f} GB, and this one "
                                f"has {facts.total_bytes / 1e9:.1f} GB; keep them apart with --results DIR")
            if all(same_version(old.get(name), getattr(facts, name)) for name in ("torch", "cuda", "driver")):
                self.device |= {k: old[k] for k in MEASURED if k in old}  # another build's must be measured again
        write_json(self.folder.device, self.device)

    def keep(self, values: dict[str, Any]) -> None:
        """Notes what a run takes beside its step: see probe.grid.session.measure_overheads."""
        self.device |= values
        write_json(self.folder.device, self.device)


@contextlib.contextmanager
def only_probe_on(facts: DeviceFacts) -> Iterator[None]:
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
