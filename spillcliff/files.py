"""Files that are whole or not there: JSON read with an error in one line, written through a temporary name."""

import json
import os
from pathlib import Path

from spillcliff.errors import UserError

DEEPEST = 40
"""Levels of a JSON value: ours have 5. What goes through a value level by level, as to copy it, ends at some hundreds."""


def parse_json(text: bytes) -> object:
    """The value of a JSON text in UTF-8, also as an editor may have saved it, with a byte order mark. Half a surrogate pair,
    which could be written nowhere, becomes "?". ValueError if it is none, or nested too deep to be anything of ours."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if text.count(b"[") + text.count(b"{") > DEEPEST and _depth(value) > DEEPEST:
        raise ValueError("it is nested too deep")
    return _writable(value) if b"\\ud" in text.lower() else value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        held = [v for v in level if isinstance(v, (dict, list))]
        level = [inner for v in held for inner in (v.values() if isinstance(v, dict) else v)]
        depth += bool(held)
    return depth


def _writable(value: object) -> object:
    if isinstance(value, dict):
        return {_writable(k): _writable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_writable(v) for v in value]
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
    """Writes `value` as write_whole does."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def write_whole(path: Path | str, data: bytes) -> None:
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
