"""The texts in files as a stream of pieces: plain UTF-8, or one field of JSONL. source.py opens the files."""

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spillcliff.errors import UserError
from trainer.tokenize.source import Source, text_bytes

PIECE = 1 << 14
"""Characters encoded together: 2,000 to 16,000 are encoded at one rate, 65,536 a third slower (tokenizers 0.23)."""
LONGEST = 1 << 16
"""Characters without a line's end after which a piece ends all the same."""
FIRST_LINE = 1 << 26
"""Bytes within which the first line of a JSONL file must end."""
FIELDS = ("text", "content")
BLOCK = 1 << 20
"""Bytes of each of the places that a sample is taken from."""


@dataclass(frozen=True)
class Piece:
    """Part of a document: whether it begins one and whether it ends one."""

    text: str
    starts: bool
    ends: bool


def field_of(path: Path, asked: str | None) -> str | None:
    """The field of a JSONL file that holds its texts: `asked`, "text" or "content"; None for a plain text. UserError where
    there is no such field, or the file is neither."""
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
            raise UserError(f"text {path} is plain, not JSONL; leave out --field {asked}")
        return None
    name = asked if asked is not None else next((name for name in FIELDS if name in value), None)
    if name not in value:
        raise UserError(f"text {path} is JSONL without a field {asked or ' or '.join(FIELDS)}; name one with --field: "
                        f"{', '.join(list(value)[:8])}")
    return name


def pieces(source: Source, field: str | None, end: str | None) -> Iterator[Piece]:
    """The text in pieces. A line of JSONL is a document; a plain text is one, or several with lines between them that hold
    `end` alone. UserError for a line that is not what the first one is."""
    parts = _plain(source, end) if field is None else _jsonl(source, field)
    before = next(parts, None)
    if before is None:
        return
    for part in parts:
        (text, starts), (_, next_starts) = before, part
        yield Piece(text, starts, next_starts)
        before = part
    text, starts = before
    yield Piece(text, starts, True)


def _plain(source: Source, end: str | None) -> Iterator[tuple[str, bool]]:
    """(text, whether it begins a document) of a plain text."""
    between = re.compile(rf"^{re.escape(end)}[ \t]*\r?(?:\n|\Z)", re.M) if end else None
    starts = True
    for piece in cut(source.text().read):
        for i, part in enumerate(between.split(piece) if between and end and end in piece else (piece,)):
            starts = starts or i > 0
            if part:
                yield part, starts
                starts = False


def _jsonl(source: Source, field: str) -> Iterator[tuple[str, bool]]:
    """(text, whether it begins a document) of JSONL."""
    for number, line in enumerate(source.stream, 1):
        if line.isspace():
            continue
        text = _text_in(line, field)
        if text is None:
            raise UserError(f"text {source.path}: line {number} is not a JSON object with text in its field "
                            f"{field!r}; correct it, or leave it out")
        starts = True
        for piece in cut(io.StringIO(text).read):
            yield piece, starts
            starts = False


def _text_in(line: bytes, field: str) -> str | None:
    """The text of a line of JSONL; None if it has none. UnicodeDecodeError for one that is not UTF-8."""
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


def sample(paths: Sequence[Path], fields: Sequence[str | None], most_bytes: int) -> Iterator[str]:
    """Pieces of about `most_bytes` of the texts, from places spread evenly over all of them, or all text if there is no
    more. `fields` is each file's field_of."""
    gap = max(0, -(-sum(map(text_bytes, paths)) // most_bytes) - 1)
    skip = taken = 0
    for path, field in zip(paths, fields, strict=True):
        with Source(path) as source:
            while taken < 2 * most_bytes:  # compressed texts may have more than was guessed
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
