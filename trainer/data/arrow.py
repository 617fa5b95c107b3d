"""Token columns of Parquet and Arrow files, copied once to a flat file beside them that can be mapped."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import read_json
from spillcliff.units import format_bytes
from trainer.data.shards import MADE
from trainer.data.tokens import Tokens, sidecar, write_sidecar

NAMES = ("input_ids", "tokens", "ids", "token_ids")
DTYPE = np.dtype("<u4")
"""Of the copy: its widest id is known only when it has been read to the end."""
ROWS = 4096
"""Rows read together: 33 MB of int64 at 1,024 ids a row."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def converted(path: Path, kind: str, column: str | None, say) -> Tokens:
    """The ids of a "parquet" or "arrow" file, row after row, from its flat copy, which is made if it is not there or the
    file has changed since. UserError if pyarrow is missing, the file damaged, or no column holds ids."""
    from filelock import FileLock

    copy, lock = Path(str(path) + MADE), Path(str(path) + MADE + ".lock")
    now = path.stat()
    source = {"name": path.name, "size": now.st_size, "mtime_ns": now.st_mtime_ns, "column": column}
    if _is_of(copy, source):
        return _opened(copy)
    try:
        with FileLock(lock):
            if not _is_of(copy, source):
                _write(path, copy, _read(path, kind, column), source, say)
    except OSError as e:
        raise UserError(f"can't write {copy}, the flat copy of {path.name}: {e.strerror or e}; make room, or move "
                        f"{path.name} to a folder that can be written to") from None
    finally:
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
    return _opened(copy)


def _is_of(copy: Path, source: dict) -> bool:
    """Whether `copy` is there and of this very source; UserError if something else is there."""
    if not copy.exists() and not sidecar(copy).exists():
        return False
    kept = read_json(sidecar(copy), "token sidecar").get("source") if sidecar(copy).is_file() else None
    if not isinstance(kept, dict) or kept.get("name") != source["name"]:
        raise UserError(f"{copy} is where the ids of {source['name']} would go, and was not made from it; move it away")
    return kept == source and copy.is_file()


def _write(path: Path, copy: Path, arrays: Iterator[np.ndarray], source: dict, say) -> None:
    say(f"copying the ids of {path} ({format_bytes(path.stat().st_size)}) once to {copy}")
    temporary = Path(f"{copy}.tmp")
    highest = count = 0
    try:
        with open(temporary, "wb") as f:
            for ids in arrays:
                highest, count = max(highest, int(ids.max())), count + len(ids)
                ids.astype(DTYPE).tofile(f)
            f.flush()
            os.fsync(f.fileno())
        if not count:
            raise UserError(f"token file {path} has no ids in its rows; make it again")
        copy.unlink(missing_ok=True)  # a new sidecar must not stand beside an old copy
        write_sidecar(copy, count, highest + 1, None, DTYPE, source=source)
        os.replace(temporary, copy)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _opened(copy: Path) -> Tokens:
    tokens = Tokens.open(copy)
    return replace(tokens, vocab=None)  # its vocabulary is only the highest id that it happens to have


def _read(path: Path, kind: str, column: str | None) -> Iterator[np.ndarray]:
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError(f'token file {path} is {kind}, which pyarrow reads: pip install "spillcliff[arrow]"') from None
    row = 0
    try:
        with contextlib.ExitStack() as stack:
            schema, batches = _batches(path, kind, stack)
            name = _column(path, schema, column)
            for batch in batches(name):
                ids = _flat(path, batch.column(batch.schema.get_field_index(name)), row)
                row += batch.num_rows
                if len(ids):
                    yield ids
    except (pa.ArrowException, ValueError, OSError) as e:
        raise UserError(f"token file {path} is {kind} and damaged after row {row} ({str(e).splitlines()[0]:.120}); copy or "
                        f"make it again") from None


def _batches(path: Path, kind: str, stack):
    """The file's schema, and a function from a column's name to its record batches."""
    if kind == "parquet":
        import pyarrow.parquet as pq

        file = stack.enter_context(pq.ParquetFile(path, memory_map=True))
        return file.schema_arrow, lambda name: file.iter_batches(ROWS, columns=[name])
    import pyarrow as pa

    mapped = stack.enter_context(pa.memory_map(str(path)))
    if mapped.read(6) == b"ARROW1":
        file = pa.ipc.open_file(mapped)
        return file.schema, lambda name: (file.get_batch(i) for i in range(file.num_record_batches))
    mapped.seek(mapped.size() - len(END_OF_STREAM))
    if mapped.read() != END_OF_STREAM:
        raise ValueError("no end-of-stream mark: it was cut off")
    mapped.seek(0)
    stream = pa.ipc.open_stream(mapped)
    return stream.schema, lambda name: stream


def _column(path: Path, schema, asked: str | None) -> str:
    import pyarrow as pa

    def holds_ids(kind) -> bool:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        return pa.types.is_integer(kind)

    there = ", ".join(schema.names[:8])
    fit = [name for name in schema.names if holds_ids(schema.field(name).type)]
    if asked is not None:
        if asked not in schema.names:
            raise UserError(f"token file {path} has no column {asked!r}; it has {there}")
        if asked not in fit:
            raise UserError(f"token file {path}: column {asked!r} holds {schema.field(asked).type}; ids are whole numbers "
                            f"or lists of them")
        return asked
    known = [name for name in NAMES if name in fit]
    if not known and len(fit) != 1:
        why = f"several columns of whole numbers ({', '.join(fit[:8])}); say which holds the ids with --column" if fit else (
            f"no column of ids (it has {there}); text in it must be written as JSONL and go through `train tokenize`")
        raise UserError(f"token file {path} has {why}")
    return (known or fit)[0]


def _flat(path: Path, column, row: int) -> np.ndarray:
    """A batch's ids; UserError naming the rows where one is missing, negative or over 32 bits."""
    import pyarrow as pa

    if column.null_count:
        bad = row + column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise UserError(f"token file {path}: row {bad} has no ids (null); leave such rows out")
    values = column if pa.types.is_integer(column.type) else column.flatten()
    ids = None if values.null_count else values.to_numpy()
    wrong = None if ids is None or not len(ids) else (ids >= 1 << 32) | (ids < 0)
    if ids is None or (wrong is not None and wrong.any()):
        at = int(values.is_null().to_numpy(zero_copy_only=False).argmax() if ids is None else wrong.argmax())
        seen = "an id that is null" if ids is None else f"id {int(ids[at])}"
        raise UserError(f"token file {path} has {seen} in rows {row} to {row + len(column) - 1}; ids are 0 or more: leave "
                        f"out padding and masks")
    return ids
