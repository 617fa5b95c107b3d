"""What is on disk of one device, for `probe show`, `plot` and `estimate`."""

from dataclasses import dataclass
from pathlib import Path

from probe.cliff import Cliff, default_limit
from probe.estimate.peak import CardMemory
from probe.records import Record, latest, load
from probe.store import DeviceFolder, known_devices, measured_devices
from spillcliff.errors import UserError
from spillcliff.files import Say
from spillcliff.hardware.fingerprints import choose_device
from trainer.huggingface.config_json import model_name


@dataclass(frozen=True)
class Measured:
    """The newest record of each cell of one device, its cliff, and the limit in bytes."""

    folder: DeviceFolder
    records: list[Record]
    cliff: Cliff | None
    limit_bytes: int | None

    @classmethod
    def read(cls, results: Path, device: str | None, model: str | None, limit_bytes: int | None, say: Say) -> "Measured":
        """`device` as in fingerprints.choose_device, records of `model` alone if one is named; UserError if there are
        none."""
        folders = measured_devices(results)
        folder = folders[choose_device(list(folders), device, True)]
        records = list(latest(load(folder.records, say)).values())
        if model is not None:
            name = model_name(model)
            records = [r for r in records if r.cell.model == name]
        if not records:
            raise UserError(f"--model {model}: {folder.name} has no record of it; `probe show` lists what there is")
        cliff = folder.load_cliff()
        return cls(folder, records, cliff, limit_bytes or (default_limit(records, cliff) or (None,))[0])

    def error_line(self) -> str | None:
        """How far the predicted peaks were off, of cells that fit; None where none was predicted."""
        errors = sorted(abs(r.predicted_bytes / r.peak_bytes - 1) for r in self.records
                        if r.fits and r.predicted_bytes and r.peak_bytes)
        if not errors:
            return None
        return (f"peaks predicted for {len(errors)} cells: off by {errors[len(errors) // 2]:.1%} in the median, "
                f"{errors[-1]:.1%} at most")


def memory_of(results: Path, device: str | None) -> tuple[CardMemory, str]:
    """(what a device takes beside a step's tensors, its name) of one that was looked at before; an H200's where there is
    none."""
    folders = known_devices(results)
    if not folders and device is None:
        return CardMemory(), "an H200's context"
    name = choose_device(list(folders), device, True)
    return CardMemory.of(folders[name].load_device()), name
