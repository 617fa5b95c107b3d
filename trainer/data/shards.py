"""The files that --data stands for: names, folders and patterns to a list in natural order."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from spillcliff.errors import UserError

HELD = re.compile(r"(?<![a-z])(val|valid|validation|test|dev|eval)(?![a-z])", re.I)
"""In the names of files to validate on."""
MADE = ".tokens.bin"
"""What is added to the name of a Parquet or Arrow file for its flat copy."""


def natural(path: Path) -> list:
    """A sort key by which shard 2 comes before shard 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part.lower()) for part in re.split(r"([0-9]+)", str(path))]


def expand(named: Sequence[Path | str], holds_ids) -> list[Path]:
    """The files that `named` stands for: a file, a folder's files of which `holds_ids(path)`, or a pattern's. UserError for
    one that is not there, one that is named twice, and a folder or pattern that mixes training and validation."""
    found: list[Path] = []
    for name in map(Path, named):
        if name.is_file():
            found.append(name)
            continue
        matches = [Path(p) for p in glob.glob(str(name), recursive=True)]
        inside = _folder(name, holds_ids) if name.is_dir() else _ours_left_out(matches)
        if not inside:
            raise UserError(f"token file {name}: no such file; `train tokenize TEXT --out {name}` makes one")
        held = [p for p in inside if HELD.search(p.name)]
        if 0 < len(held) < len(inside):
            other = next(p for p in inside if p not in held)
            raise UserError(f"{name} stands for files to train on and to validate on ({other.name}, {held[0].name}); "
                            f"name them apart, by --data and --val")
        found += inside
    twice = next((p for i, p in enumerate(found) if p.resolve() in {q.resolve() for q in found[:i]}), None)
    if twice:
        raise UserError(f"token file {twice} is named twice by --data; its tokens would be counted twice")
    return found


def _ours_left_out(paths) -> list[Path]:
    """Files among `paths` without what was written beside others of them."""
    paths = {p for p in paths if p.is_file()}
    names = {str(p) for p in paths}
    return sorted((p for p in paths if not p.name.endswith((".json", ".tmp", ".part", ".lock"))
                   and not p.name.startswith(".") and str(p).removesuffix(MADE) not in names - {str(p)}), key=natural)


def _folder(folder: Path, holds_ids) -> list[Path]:
    try:
        there = list(folder.iterdir())
    except OSError as e:
        raise UserError(f"folder {folder}: {e.strerror or e}") from None
    found = [p for p in _ours_left_out(there) if holds_ids(p)]
    if not found:
        inside = sorted(p.name for p in there if p.is_dir())
        more = f"; it has the folders {', '.join(inside[:4])}: name one of them" if inside else ""
        raise UserError(f"folder {folder} holds no token file{more or '; `train tokenize` makes one from texts'}")
    return found
