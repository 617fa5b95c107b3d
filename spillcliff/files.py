"""Files that are whole or not there: JSON, and JSON lines that survive a process killed while it writes."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from spillcliff.errors import UserError

T = TypeVar("T")
Say = Callable[[str], None]
"""Takes a line for a person."""

DEEPEST = 40
"""Levels of a JSON value: ours have 5. Code that goes through a value level by level, as to copy it, fails at some
hundreds."""


def ignore(line: str) -> None:
    """A `Say` that nobody listens to."""


def parse_json(text: bytes) -> object:
    """The value of a JSON text in UTF-8, also as an editor may have saved it, with a byte order mark. Half a surrogate pair,
    which could be written nowhere, becomes "?". ValueError if it is not JSON, or nested too deep to be anything of ours."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if text.count(b"[") + text.count(b"{") > DEEPEST and _depth(value) > DEEPEST:
        raise ValueError("it is nested too deep")
    return _encodable(value) if b"\\ud" in text.lower() else value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        containers = [v for v in level if isinstance(v, (dict, list))]
        level = [inner for c in containers for inner in (c.values() if isinstance(c, dict) else c)]
        depth += bool(containers)
    return depth


def _encodable(value: object) -> object:
    if isinstance(value, dict):
        return {_encodable(k): _encodable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_encodable(v) for v in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def read_json(path: Path | str, thing: str) -> dict:
    """The object in a JSON file; UserError naming `thing`, the file and what is wrong with it."""
    try:
        value = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{thing} {path}: no such file") from None
    except OSError as e:
        raise UserError(f"{thing} {path}: {e.strerror or e}") from None
    except ValueError as e:
        raise UserError(f"{thing} {path} is not JSON: {str(e).splitlines()[0]:.120}") from None
    if not isinstance(value, dict):
        raise UserError(f"{thing} {path} holds {type(value).__name__}; it must be a JSON object")
    return value


def write_json(path: Path | str, value: dict) -> None:
    """Writes `value` as `write_atomic` does."""
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())


def write_atomic(path: Path | str, data: bytes) -> None:
    """Writes `data` so that the file is the old one or the whole new one, whenever the machine stops; UserError if it can't
    be written."""
    path = Path(path)
    if not path.name or os.path.isdir(path):
        raise UserError(f"can't write {path}: it is a folder; name a file in it")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise UserError(f"can't write {path}: {e.strerror or e}") from None


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank: its number from 1, its bytes, and whether the file ends in it, torn maybe."""

    number: int
    text: bytes
    is_last: bool


def read_lines(path: Path | str, thing: str) -> list[Line]:
    """The lines of a file; UserError naming `thing` if it can't be read."""
    try:
        texts = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{thing} {path}: no such file") from None
    except OSError as e:
        raise UserError(f"{thing} {path}: {e.strerror or e}") from None
    return [Line(number, text, number == len(texts)) for number, text in enumerate(texts, 1) if text.strip()]


def parse_lines(path: Path | str, thing: str, lines: Iterable[Line], make: Callable[[object], T],
                say: Say = ignore) -> list[T]:
    """`make` of each line's JSON value. A torn last line is named by `say` and left out; any other damage is a UserError
    with file and line."""
    values = []
    for line in lines:
        try:
            values.append(make(parse_json(line.text)))
        except ValueError:
            if line.is_last:
                say(f"{thing} {path}: line {line.number} is torn and left out")
                continue
            raise UserError(f"{thing} {path}, line {line.number} is not JSON: "
                            f"{line.text[:40].decode(errors='replace')!r}") from None
        except UserError as e:
            raise UserError(f"{thing} {path}, line {line.number}: {e}") from None
    return values


def append_line(path: Path, value: dict) -> None:
    """Adds one line of JSON, on disk when this returns. A torn last line is set aside in <path>.torn first. UserError if it
    can't be written."""
    line = json.dumps(value).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as f:
            set_torn_line_aside(f, path)
            f.write(line)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"can't write {path}: {e.strerror or e}") from None


def set_torn_line_aside(f: IO[bytes], path: Path) -> None:
    """Moves a torn last line of an open file (binary, to read and append) to <path>.torn."""
    size = f.seek(0, os.SEEK_END)
    if not size:
        return
    f.seek(-1, os.SEEK_END)
    if f.read(1) == b"\n":
        return
    f.seek(0)
    start = f.read().rfind(b"\n") + 1
    f.seek(start)
    with open(path.with_name(path.name + ".torn"), "ab") as aside:
        aside.write(f.read() + b"\n")
    f.truncate(start)
