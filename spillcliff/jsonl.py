"""Files of JSON lines that survive a process killed while it writes: appended to and read."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from spillcliff.errors import UserError
from spillcliff.files import parse_json


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank: its number from 1, its bytes, and whether the file ends in it, torn maybe."""

    number: int
    text: bytes
    is_last: bool


def lines(path: Path | str, thing: str) -> list[Line]:
    """Those of a file; UserError naming `thing` if it can't be read."""
    try:
        found = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{thing} {path}: no such file") from None
    except OSError as e:
        raise UserError(f"{thing} {path}: {e.strerror or e}") from None
    return [Line(number, text, number == len(found)) for number, text in enumerate(found, 1) if text.strip()]


def parse(path: Path | str, thing: str, found: Iterable[Line], make: Callable, say=lambda line: None) -> list:
    """`make` of each line's value. A torn last line is named by `say` and left out; any other damage is a UserError with
    file and line."""
    values = []
    for line in found:
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


def append(path: Path, value: dict) -> None:
    """Adds one line, on disk when this returns. A torn last line is set aside in <path>.torn first."""
    line = json.dumps(value).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as f:
            set_torn_aside(f, path)
            f.write(line)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"can't write {path}: {e.strerror or e}") from None


def set_torn_aside(f, path: Path) -> None:
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
