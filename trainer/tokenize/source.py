"""Text files: which ones names stand for, and each one opened, compressed by gzip or zstd or not, told by its content."""

import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from spillcliff.errors import UserError
from trainer.data.paths import natural

READ_BYTES = 1 << 14
"""Of a zstd file, read together."""
BUFFER_BYTES = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
TEXT_PER_COMPRESSED = 4
"""Text bytes per byte of a compressed file, where only a guess is needed; assumed."""


def text_files(named: Sequence[Path], outs: Sequence[Path]) -> list[Path]:
    """The files that names, folders (with all in them) and patterns stand for, in natural order, without `outs` and what is
    written beside them; UserError for a name that nothing matches, and where all files are empty."""
    def is_output(path: Path) -> bool:
        return any(path.absolute().parent == out.absolute().parent and path.name.startswith(out.name) for out in outs)

    def texts_of(paths: Iterable[Path]) -> list[Path]:
        return sorted((p for p in paths if p.is_file() and not is_output(p)), key=natural)

    def not_hidden(folder: Path) -> list[Path]:
        return [p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts)]

    paths: list[Path] = []
    for name in map(Path, named):
        if name.is_dir():
            inside = texts_of(not_hidden(name))
        else:
            inside = [name] if name.is_file() else texts_of(map(Path, glob.glob(str(name), recursive=True)))
        if not inside:
            raise UserError(f"text {name}: {'no file in it' if name.is_dir() else 'no such file'}")
        paths += inside
    if not sum(p.stat().st_size for p in paths):
        raise UserError(f"text {paths[0]} is empty; name a file with text in it")
    return paths


class _ZstdReader(io.RawIOBase):
    """The content of a zstd file of one frame or several. The libraries' own readers take a file that was cut off for one
    that has ended; this one raises EOFError. `new_decompressor` makes one for a frame."""

    def __init__(self, file: IO[bytes], new_decompressor: Callable[[], Any]) -> None:
        self._file, self._new_decompressor = file, new_decompressor
        self._decompressor: Any = None
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            is_between_frames = self._decompressor is None or self._decompressor.eof
            chunk = self._decompressor.unused_data if self._decompressor and is_between_frames else b""
            chunk = chunk or self._file.read(READ_BYTES)
            if not chunk:
                if not is_between_frames:
                    raise EOFError("it was cut off")
                return 0
            if is_between_frames:
                self._decompressor = self._new_decompressor()
            self._rest = self._decompressor.decompress(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _zstd_decompressor(path: Path) -> Callable[[], Any]:
    """What makes a decompressor of one frame; UserError where no library for it is installed."""
    try:
        from compression.zstd import ZstdDecompressor  # type: ignore[import-not-found]  # of Python 3.14

        return ZstdDecompressor
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise UserError(f'text {path} is compressed by zstd, which zstandard reads: pip install "spillcliff[zstd]"'
                        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


class Source:
    """One text file, opened: `raw` is the file itself, `stream` the bytes of its text, `compression` "gzip", "zstd" or "".
    UserError for a file that can't be opened; as a context it turns failures to read into a UserError too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.raw: IO[bytes] = open(path, "rb")  # noqa: SIM115
        except OSError as e:
            raise UserError(f"text {path}: {e.strerror or e}") from None
        head = self.raw.read(4)
        self.raw.seek(0)
        self.compression = "gzip" if head.startswith(GZIP) else "zstd" if head == ZSTD else ""
        self.stream: Any = self.raw
        if self.compression == "gzip":
            self.stream = gzip.GzipFile(fileobj=self.raw)
        elif self.compression == "zstd":
            self.stream = io.BufferedReader(_ZstdReader(self.raw, _zstd_decompressor(path)), BUFFER_BYTES)

    def text(self) -> io.TextIOWrapper:
        """The stream as text. It is kept: a wrapper that nobody refers to closes the file."""
        self._text = io.TextIOWrapper(self.stream, encoding="utf-8-sig", newline="")
        return self._text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.raw.close()
        if isinstance(failure, UnicodeDecodeError):
            raise UserError(f"text {self.path} is not UTF-8 ({failure.reason}); convert it, or leave it out") from None
        if isinstance(failure, (gzip.BadGzipFile, EOFError, zlib.error)) or (kind and kind.__name__ == "ZstdError"):
            raise UserError(f"text {self.path} is compressed by {self.compression} and damaged ({failure}); copy it "
                            f"again") from None
        if isinstance(failure, OSError):
            raise UserError(f"text {self.path}: {failure.strerror or failure}") from None

    def skip(self, count: int) -> int:
        """Moves `count` bytes of text ahead, or to the end if that is nearer; returns by how many."""
        if not self.compression:
            here = self.raw.tell()
            return self.raw.seek(min(here + count, self.path.stat().st_size)) - here
        left = count
        while left and (read := len(self.stream.read(min(left, BUFFER_BYTES)))):
            left -= read
        return count - left


def text_bytes(path: Path) -> int:
    """Bytes of text in a file; a guess for a compressed one."""
    with Source(path) as source:
        return path.stat().st_size * (TEXT_PER_COMPRESSED if source.compression else 1)
