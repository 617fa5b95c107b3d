"""How far a job of `train tokenize` is: kept beside its output, so that one that was stopped goes on, and shown."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.files import Say, read_json, write_json
from spillcliff.units import format_bytes, format_duration
from trainer.data.tokens import sidecar

SCHEMA = 1
"""Of the progress file and of how texts are cut: what another version began is begun again."""


@dataclass
class Progress:
    """The job by its `job_id`, how many of its files and of the next one's pieces are written, and how much that came to;
    `sizes` (bytes of ids) and `documents` are those for training and for validation."""

    job: str
    schema: int = SCHEMA
    file: int = 0
    pieces: int = 0
    sizes: list[int] = field(default_factory=lambda: [0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: int = 0
    through: bool = False


@dataclass(frozen=True)
class JobFiles:
    """The files of a job by name, `outs` being what it writes: for training and, if wanted, for validation."""

    outs: list[Path]

    @property
    def parts(self) -> list[Path]:
        """What is written of each of `outs` until all of it is there."""
        return [path.with_name(f"{path.name}.part") for path in self.outs]

    @property
    def progress(self) -> Path:
        return self.outs[0].with_name(f"{self.outs[0].name}.part.json")

    @property
    def tokenizer_part(self) -> Path:
        """The tokenizer until the job is through."""
        return self.outs[0].with_name(f"{self.outs[0].name}.part.tokenizer.json")

    @property
    def tokenizer(self) -> Path:
        return self.outs[0].with_name(f"{self.outs[0].name}.tokenizer.json")

    @property
    def lock(self) -> Path:
        return self.outs[0].with_name(f"{self.outs[0].name}.lock")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from the job; UserError if one is at it."""
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.lock).acquire(timeout=0):
                yield
        except Timeout:
            raise UserError(f"another process is writing {self.outs[0]}; wait for it, or name another --out") from None
        finally:
            with contextlib.suppress(OSError):  # under Windows the other one's can't be
                self.lock.unlink(missing_ok=True)

    def finished_result(self, job: str) -> dict | None:
        """What this very job returned when it was through, if it was; UserError if something else has the name of one of its
        outputs."""
        for path in self.outs:
            facts = {}
            if path.exists():
                with contextlib.suppress(UserError):
                    facts = read_json(sidecar(path), "token sidecar")
                if facts.get("job") != job:
                    raise UserError(f"{path} exists already; name another --out, or remove it first")
        return read_json(sidecar(self.outs[0]), "token sidecar").get("result") if self.outs[0].exists() else None

    def load(self, job: str) -> Progress | None:
        """How far this very job was when it was stopped; None if what is kept is another one's, or damaged."""
        try:
            progress = schema.read(Progress, read_json(self.progress, "progress"))
        except UserError:
            return None
        if (progress.job, progress.schema) != (job, SCHEMA) or not self.tokenizer_part.is_file():
            return None
        is_whole = progress.through or all(part.is_file() and part.stat().st_size >= size
                                           for part, size in zip(self.parts, progress.sizes, strict=False))
        return progress if is_whole else None

    def save(self, progress: Progress) -> None:
        """Writes how far the job is; UserError if it can't be written."""
        write_json(self.progress, asdict(progress))

    def remove_notes(self) -> None:
        """Removes what a job that is through needs no more."""
        self.progress.unlink(missing_ok=True)
        self.tokenizer_part.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Removes what the job has written, as far as that is possible."""
        for path in (*self.parts, self.progress, self.tokenizer_part):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class ProgressLine:
    """The line that shows how far a job is: of `total_bytes` of files, and beyond the `text_bytes` that were written before
    it was stopped."""

    def __init__(self, total_bytes: int, text_bytes: int, update: Say) -> None:
        self._total_bytes, self._text_bytes, self._update = total_bytes, text_bytes, update
        self._begin_s = time.monotonic()
        self._first_bytes: int | None = None

    def show(self, read_bytes: int, text_bytes: int) -> None:
        """`read_bytes` of the files are read, `text_bytes` of text are written. The time left follows from what was read
        since the first call."""
        seconds = time.monotonic() - self._begin_s
        if self._first_bytes is None:
            self._first_bytes = read_bytes
        ahead = ""
        if read_bytes > self._first_bytes:
            left = seconds * (self._total_bytes - read_bytes) / (read_bytes - self._first_bytes)
            ahead = f", {format_duration(max(0.0, left))} left"
        share = min(1.0, read_bytes / self._total_bytes)
        self._update(f"[{'#' * round(20 * share):20}] {share:4.0%} of {format_bytes(self._total_bytes)}, "
                     f"{(text_bytes - self._text_bytes) / 1e6 / max(seconds, 1e-9):.1f} MB/s{ahead}")
