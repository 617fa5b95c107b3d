"""Files of JSON lines that survive a process killed while it writes: appended to and read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from trainer.errors import UserError


def read(path: Path | str, thing: str) -> bytes:
    """The whole file; UserError naming `thing` if it can't be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{thing} {path}: no such file; `probe` makes one") from None
    except OSError as e:
        raise UserError(f"{thing} {path}: {e.strerror or e}") from None


def load(path: Path | str, thing: str, parse: Callable, say=lambda line: None, skip=lambda line: False) -> list:
    """`parse` of each line's value, but for lines (bytes) to `skip`. A torn last line is named by `say` and left out; any
    other damage is a UserError with file and line."""
    lines = read(path, thing).split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or skip(line):
            continue
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, RecursionError):
            if number == len(lines):
                say(f"{thing} {path}: line {number} is torn and left out")
                continue
            raise UserError(f"{thing} {path}, line {number} is not JSON: {line[:40].decode(errors='replace')!r}") from None
        except UserError as e:
            raise UserError(f"{thing} {path}, line {number}: {e}") from None
    return found


def append(path: Path, value: dict) -> None:
    """Adds one line, on disk when this returns. A torn last line is set aside in <path>.torn first."""
    line = json.dumps(value).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as f:
            _set_torn_aside(f, path)
            f.write(line)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"can't write {path}: {e.strerror or e}") from None


def _set_torn_aside(f, path: Path) -> None:
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
