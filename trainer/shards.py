"""The files that --data stands for: names, folders and patterns to a list in natural order."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError

SIDES = (re.compile(r"(?<![a-z])train", re.I), re.compile(r"(?<![a-z])(val|test|dev|eval)", re.I))
MADE = ".tokens.bin"
"""What is added to the name of a Parquet or Arrow file for its flat copy."""


def natural(path: Path) -> list:
    """A sort key by which shard 2 comes before shard 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part.lower()) for part in re.split(r"([0-9]+)", str(path))]


def expand(named: Sequence[Path | str], holds_ids) -> list[Path]:
    """The files that `named` stands for: a file, a folder's files of which `holds_ids(path)`, or a pattern's. UserError for
    one that is not there, one that is named twice, and a folder that mixes training and validation."""
    found: list[Path] = []
    for name in map(Path, named):
        if name.is_dir():
            found += _folder(name, holds_ids)
        elif name.is_file():
            found.append(name)
        else:
            matches = _ours_left_out(Path(p) for p in glob.glob(str(name), recursive=True))
            if not matches:
                raise UserError(f"token file {name}: no such file; `train tokenize TEXT --out {name}` makes one")
            found += matches
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
    found = [p for p in _ours_left_out(folder.iterdir()) if holds_ids(p)]
    if not found:
        inside = sorted(p.name for p in folder.iterdir() if p.is_dir())
        more = f"; it has the folders {', '.join(inside[:4])}: name one of them" if inside else ""
        raise UserError(f"folder {folder} holds no token file{more or '; `train tokenize` makes one from texts'}")
    train, other = ([p.name for p in found if side.search(p.name)] for side in SIDES)
    if train and other:
        raise UserError(f"folder {folder} holds files to train on and to validate on ({train[0]}, {other[0]}); name them "
                        f"apart, such as --data \"{folder / '*train*'}\" --val \"{folder / '*val*'}\"")
    return found
