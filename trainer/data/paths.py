"""The files that --data stands for: names, folders and patterns to a list in natural order."""

import glob
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from spillcliff.errors import UserError

VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation|test|dev|eval)(?![a-z])", re.I)
"""In the names of files to validate on."""
COPY_SUFFIX = ".tokens.bin"
"""What is added to the name of a Parquet or Arrow file for its flat copy."""


def natural(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key by which shard 2 comes before shard 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part.lower()) for part in re.split(r"([0-9]+)", str(path))]


def expand(named: Sequence[Path | str], holds_ids: Callable[[Path], bool]) -> list[Path]:
    """The files that `named` stands for: a file itself, those files of a folder for which `holds_ids(path)`, or all that
    match a pattern, each in natural order. UserError for a name that nothing matches, a file that is named twice, and a
    folder or pattern that mixes training and validation."""
    paths: list[Path] = []
    for name in map(Path, named):
        if name.is_file():
            paths.append(name)
            continue
        matches = [Path(p) for p in glob.glob(str(name), recursive=True)]
        inside = _token_files(name, holds_ids) if name.is_dir() else _without_companions(matches)
        if not inside:
            raise UserError(f"token file {name}: no such file; `train tokenize TEXT --out {name}` makes one")
        validation = [p for p in inside if VALIDATION.search(p.name)]
        if 0 < len(validation) < len(inside):
            training = next(p for p in inside if p not in validation)
            raise UserError(f"{name} stands for files to train on and to validate on ({training.name}, "
                            f"{validation[0].name}); name them apart, by --data and --val")
        paths += inside
    resolved = [p.resolve() for p in paths]
    if twice := next((p for i, p in enumerate(paths) if resolved[i] in resolved[:i]), None):
        raise UserError(f"token file {twice} is named twice by --data; its tokens would be counted twice")
    return paths


def _without_companions(paths: Iterable[Path]) -> list[Path]:
    """The files among `paths` without what we wrote beside others of them: sidecars, scans, copies, locks."""
    files = {p for p in paths if p.is_file()}
    names = {str(p) for p in files}
    return sorted((p for p in files if not p.name.endswith((".json", ".tmp", ".part", ".lock"))
                   and not p.name.startswith(".") and str(p).removesuffix(COPY_SUFFIX) not in names - {str(p)}), key=natural)


def _token_files(folder: Path, holds_ids: Callable[[Path], bool]) -> list[Path]:
    try:
        entries = list(folder.iterdir())
    except OSError as e:
        raise UserError(f"folder {folder}: {e.strerror or e}") from None
    paths = [p for p in _without_companions(entries) if holds_ids(p)]
    if not paths:
        folders = sorted(p.name for p in entries if p.is_dir())
        advice = f"it has the folders {', '.join(folders[:4])}: name one of them" if folders else (
            "`train tokenize` makes one from texts")
        raise UserError(f"folder {folder} holds no token file; {advice}")
    return paths
