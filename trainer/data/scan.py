"""What reading a whole token file gave, kept beside it, so that the next start need not read all of it again."""

import os
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import read_json, write_json
from spillcliff.schema import Number

SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 4096
"""Of a file, spread evenly, its first and last bytes among them: 256 kB, read in about a millisecond. Size and time alone
are not believed: a file that is written in place within its time's resolution, or whose time is set back, has the same."""


def scan_file(path: Path | str) -> Path:
    """Where the scan of a token file is kept."""
    return Path(f"{path}.scan.json")


@dataclass(frozen=True)
class Scan:
    """A file as it was when it was read as ids of `dtype`, and what was in it: `max_id` the highest id (None if not all were
    checked), `crc32` checksums of runs of ids by `run_key`."""

    size: Annotated[int, Number()]
    mtime_ns: Annotated[int, Number(-2**63, 2**63)]
    sample_crc32: Annotated[int, Number()]
    dtype: str
    max_id: Annotated[int | None, Number()] = None
    crc32: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path | str, dtype: str) -> "Scan | None":
        """The scan that is kept of the file, if that was of this very file and type; an empty one if not; None if the file
        can't be read."""
        try:
            now = _empty_scan(path, dtype)
        except OSError:
            return None
        try:
            kept = schema.read(cls, read_json(scan_file(path), "scan"))
        except UserError:
            return now
        return kept if replace(kept, max_id=None, crc32={}) == now else now

    def keep(self, path: Path | str, **changes: Any) -> None:
        """Writes the scan with these fields changed. Nothing is written if the file has changed meanwhile, or if its folder
        can't be written to, which costs another reading, no more."""
        try:
            if replace(self, max_id=None, crc32={}) == _empty_scan(path, self.dtype):
                write_json(scan_file(path), vars(replace(self, **changes)))
        except (OSError, UserError):
            pass


def run_key(before_crc32: int, first: int, stop: int) -> str:
    """The name of the checksum that ids `first` to `stop` of a file give, continued from `before_crc32`."""
    return f"{before_crc32:08x}:{first}:{stop}"


def _empty_scan(path: Path | str, dtype: str) -> Scan:
    """What tells whether a file is still the same. OSError if it can't be read."""
    now = os.stat(path)
    crc = 0
    with open(path, "rb") as f:
        last = max(0, now.st_size - SAMPLE_BYTES)
        for i in range(SAMPLE_BLOCKS):
            f.seek(last * i // (SAMPLE_BLOCKS - 1))
            crc = zlib.crc32(f.read(SAMPLE_BYTES), crc)
    return Scan(now.st_size, now.st_mtime_ns, crc, dtype)
