"""Texts as a stream of pieces: plain UTF-8 or one field of JSONL, also compressed by gzip or zstd, told by their content."""

import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spillcliff.errors import UserError
from trainer.data.shards import natural

PIECE = 1 << 14
"""Characters encoded together: 2,000 to 16,000 are encoded at one rate, 65,536 a third slower (tokenizers 0.23)."""
LONGEST = 1 << 16
"""Characters without a line's end after which a piece ends all the same."""
FIRST_LINE = 1 << 26
"""Bytes within which the first line of a JSONL file must end."""
FIELDS = ("text", "content")
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
RATIO = 4
"""Text bytes per byte of a compressed file, where only a guess is needed; assumed."""
BLOCK = 1 << 20
"""Bytes of each of the places that a sample is taken from."""


@dataclass(frozen=True)
class Piece:
    """Part of a document: whether it begins one and whether it ends one."""

    text: str
    starts: bool
    ends: bool


def files(named: Sequence[Path], besides: Sequence[Path]) -> list[Path]:
    """The files that names, folders (with all in them) and patterns stand for, in natural order, without what is written
    beside `besides`; UserError for what is not there or empty."""
    def theirs(paths) -> list[Path]:
        return sorted((p for p in paths if p.is_file() and not any(
            p.absolute().parent == out.absolute().parent and p.name.startswith(out.name) for out in besides)), key=natural)

    def shown(folder: Path) -> list[Path]:
        return [p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts)]

    found: list[Path] = []
    for name in map(Path, named):
        inside = theirs(shown(name)) if name.is_dir() else [name] if name.is_file() else (
            theirs(map(Path, glob.glob(str(name), recursive=True))))
        if not inside:
            raise UserError(f"text {name}: {'no file in it' if name.is_dir() else 'no such file'}")
        found += inside
    if not sum(p.stat().st_size for p in found):
        raise UserError(f"text {found[0]} is empty; give a file with text in it")
    return found


class _Zstd(io.RawIOBase):
    """What is in a zstd file. The libraries' own readers take a file that was cut off for one that has ended."""

    def __init__(self, file, make: Callable) -> None:
        self._file, self._make, self._one, self._rest = file, make, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            chunk = self._one.unused_data if self._one and self._one.eof else b""
            chunk = chunk or self._file.read(PIECE)
            if not chunk:
                if self._one and not self._one.eof:
                    raise EOFError("it was cut off")
                return 0
            if self._one is None or self._one.eof:
                self._one = self._make()
            self._rest = self._one.decompress(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _zstd(path: Path) -> Callable:
    try:
        from compression.zstd import ZstdDecompressor  # of Python 3.14

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
    """One text file, opened: `raw` is the file itself, `stream` the bytes of its text, whatever it is compressed by."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.raw = open(path, "rb")  # noqa: SIM115
        except OSError as e:
            raise UserError(f"text {path}: {e.strerror or e}") from None
        head = self.raw.read(4)
        self.raw.seek(0)
        self.how = "gzip" if head.startswith(GZIP) else "zstd" if head == ZSTD else ""
        if self.how == "gzip":
            self.stream = gzip.GzipFile(fileobj=self.raw)
        else:
            self.stream = io.BufferedReader(_Zstd(self.raw, _zstd(path)), BLOCK) if self.how else self.raw

    def text(self) -> io.TextIOWrapper:
        """The stream as text; kept, since one that nobody keeps closes the file."""
        self._text = io.TextIOWrapper(self.stream, encoding="utf-8-sig", newline="")
        return self._text

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, kind, failure, trace) -> None:
        """Closes the file; what it could not be read for is told in one line."""
        self.raw.close()
        if isinstance(failure, UnicodeDecodeError):
            raise UserError(f"text {self.path} is not UTF-8 ({failure.reason}); convert it, or leave it out") from None
        if isinstance(failure, (gzip.BadGzipFile, EOFError, zlib.error)) or (kind and kind.__name__ == "ZstdError"):
            raise UserError(f"text {self.path} is compressed by {self.how} and damaged ({failure}); copy it again") from None
        if isinstance(failure, OSError):
            raise UserError(f"text {self.path}: {failure.strerror or failure}") from None

    def skip(self, count: int) -> int:
        """Goes on by up to `count` bytes of text; returns by how many."""
        if not self.how:
            here = self.raw.tell()
            return self.raw.seek(min(here + count, self.path.stat().st_size)) - here
        left = count
        while left and (read := len(self.stream.read(min(left, BLOCK)))):
            left -= read
        return count - left


def field_of(path: Path, asked: str | None) -> str | None:
    """The field of a JSONL file that holds its texts: `asked`, "text" or "content"; None for a plain text."""
    with Source(path) as source:
        first = source.stream.readline(FIRST_LINE)
        while first and not first.strip():
            first = source.stream.readline(FIRST_LINE)
    first = first.removeprefix(b"\xef\xbb\xbf").strip()
    try:
        value = json.loads(first) if first.startswith((b"{", b"[")) else None
    except (ValueError, RecursionError):
        value = None
    if first == b"[" or (isinstance(value, list) and value and isinstance(value[0], dict)):
        raise UserError(f"text {path} is one JSON list; write one object a line (JSONL)")
    if not isinstance(value, dict):
        if asked is not None:
            raise UserError(f"text {path} is plain, not JSONL; leave --field {asked} away")
        return None
    name = asked if asked is not None else next((name for name in FIELDS if name in value), None)
    if name not in value:
        wanted, there = asked or " or ".join(FIELDS), ", ".join(list(value)[:8])
        raise UserError(f"text {path} is JSONL without a field {wanted}; name one with --field: {there}")
    return name


def pieces(source: Source, field: str | None, end: str | None) -> Iterator[Piece]:
    """The text in pieces. A line of JSONL is a document; a plain text is one, or several with lines between them that hold
    `end` alone. UserError for a line that is not what the first one is."""
    found = _plain(source, end) if field is None else _jsonl(source, field)
    before = next(found, None)
    for after in found:
        yield Piece(*before, after[1])
        before = after
    if before:
        yield Piece(*before, True)


def _plain(source: Source, end: str | None) -> Iterator[tuple[str, bool]]:
    between = re.compile(rf"^{re.escape(end)}[ \t]*\r?(?:\n|\Z)", re.M) if end else None
    starts = True
    for piece in cut(source.text().read):
        for i, part in enumerate(between.split(piece) if end and end in piece else (piece,)):
            starts = starts or i > 0
            if part:
                yield part, starts
                starts = False


def _jsonl(source: Source, field: str) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(source.stream, 1):
        if line.isspace():
            continue
        text = _text_in(line, field)
        if text is None:
            raise UserError(f"text {source.path}: line {number} is no JSON object with text in its field {field!r}; mend "
                            f"it, or leave it out")
        starts = True
        for piece in cut(io.StringIO(text).read):
            yield piece, starts
            starts = False


def _text_in(line: bytes, field: str) -> str | None:
    try:
        text = json.loads(line).get(field)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(text, str):
        return None
    try:
        text.encode()
        return text
    except UnicodeEncodeError:  # half of a pair, written as an escape, is no character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut(read: Callable[[int], str]) -> Iterator[str]:
    """Pieces of about PIECE characters, each up to a line's end before a line that begins with no space: there no
    byte-level BPE's pattern (GPT-2's, GPT-4's) has a word across, so the ids are those of the uncut text."""
    rest = ""
    while more := read(PIECE):
        rest += more
        at = rest.rfind("\n", 0, len(rest) - 1)
        while at >= 0 and rest[at + 1].isspace():
            at = rest.rfind("\n", 0, at)
        at += 1
        if not at and len(rest) >= LONGEST:
            at = max(rest.rfind(" "), 0) or len(rest)
        if at:
            yield rest[:at]
            rest = rest[at:]
    if rest:
        yield rest


def text_bytes(path: Path) -> int:
    """Bytes of text in a file; of a compressed one a guess."""
    with Source(path) as source:
        return path.stat().st_size * (RATIO if source.how else 1)


def sample(paths: Sequence[Path], fields: Sequence[str | None], most: int) -> Iterator[str]:
    """Pieces of about `most` bytes of the texts, in places spread evenly over all of them, or all if they have no more."""
    gap = max(0, -(-sum(map(text_bytes, paths)) // most) - 1)
    skip = taken = 0
    for path, field in zip(paths, fields, strict=True):
        with Source(path) as source:
            while taken < 2 * most:  # compressed texts may have more than was guessed
                within_line = skip > 0
                skip -= source.skip(skip)
                block = b"" if skip else source.stream.read(BLOCK)
                if not block:
                    break
                taken += len(block)
                skip = gap * len(block)
                block += source.stream.readline(BLOCK)
                if within_line:
                    block = block[block.find(b"\n") + 1:]
                if field is None:
                    yield from cut(io.StringIO(block.decode(errors="ignore")).read)
                else:
                    for line in block.splitlines():
                        yield from cut(io.StringIO(_text_in(line, field) or "").read)
