"""Files that are whole or not there: JSON read with an error in one line, written through a temporary name."""

import json
import os
from pathlib import Path

from trainer.errors import UserError


def read_json(path: Path | str, thing: str) -> dict:
    """The object in a JSON file; UserError naming `thing`, the file and what is wrong with it."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{thing} {path}: no such file") from None
    except OSError as e:
        raise UserError(f"{thing} {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
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
