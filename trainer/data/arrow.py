"""Token columns of Parquet and Arrow files, copied once to a flat file beside them that can be mapped."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, read_json
from spillcliff.units import format_bytes
from trainer.data.paths import COPY_SUFFIX
from trainer.data.tokens import Tokens, sidecar, write_sidecar

if TYPE_CHECKING:
    import pyarrow as pa

ID_COLUMNS = ("input_ids", "tokens", "ids", "token_ids")
"""Names of a column of ids, the first of which that fits is taken where there are several."""
DTYPE = np.dtype("<u4")
"""Of the copy: its highest id is known only when it has been read to the end."""
ROWS = 4096
"""Rows read together: 33 MB of int64 at 1,024 ids a row."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def open_column(path: Path, kind: str, column: str | None, say: Say = ignore) -> Tokens:
    """The ids of a "parquet" or "arrow" file, row after row, from its flat copy, which is made if there is none or the file
    has changed since. `column` is the one to read; without it that of the usual names, or the only one of ids. UserError if
    pyarrow is missing, the file damaged, no column holds ids, or the copy can't be written."""
    from filelock import FileLock

    copy, lock = Path(f"{path}{COPY_SUFFIX}"), Path(f"{path}{COPY_SUFFIX}.lock")
    now = path.stat()
    source = {"name": path.name, "size": now.st_size, "mtime_ns": now.st_mtime_ns, "column": column}
    if _is_copy_of(source, copy):
        return _open_copy(copy)
    try:
        with FileLock(lock):
            if not _is_copy_of(source, copy):
                _write(path, copy, _read(path, kind, column), source, say)
    except OSError as e:
        raise UserError(f"can't write {copy}, the flat copy of {path.name}: {e.strerror or e}; make room, or move "
                        f"{path.name} to a folder that can be written to") from None
    finally:
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
    return _open_copy(copy)


def _is_copy_of(source: dict, copy: Path) -> bool:
    """Whether `copy` was made of the file as `source` describes it; UserError if something else has its name."""
    if not copy.exists() and not sidecar(copy).exists():
        return False
    made_of = read_json(sidecar(copy), "token sidecar").get("source") if sidecar(copy).is_file() else None
    if not isinstance(made_of, dict) or made_of.get("name") != source["name"]:
        raise UserError(f"{copy} is where the ids of {source['name']} would go, and was not made from it; move it away")
    return made_of == source and copy.is_file()


def _write(path: Path, copy: Path, arrays: Iterator[np.ndarray], source: dict, say: Say) -> None:
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


def _open_copy(copy: Path) -> Tokens:
    return replace(Tokens.open(copy), vocab=None)  # the sidecar's is only the highest id that the file happens to have


def _read(path: Path, kind: str, column: str | None) -> Iterator[np.ndarray]:
    """The ids of the file, a batch of rows at a time; UserError where it is damaged."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError(f'token file {path} is {kind}, which pyarrow reads: pip install "spillcliff[arrow]"') from None
    row = 0
    try:
        with contextlib.ExitStack() as stack:
            schema, batches = _open_batches(path, kind, stack)
            name = _choose_column(path, schema, column)
            for batch in batches(name):
                ids = _flat(path, batch.column(batch.schema.get_field_index(name)), row)
                row += batch.num_rows
                if len(ids):
                    yield ids
    except (pa.ArrowException, ValueError, OSError) as e:
        raise UserError(f"token file {path} is {kind} and damaged after row {row} ({str(e).splitlines()[0]:.120}); copy or "
                        f"make it again") from None


def _open_batches(path: Path, kind: str, stack: contextlib.ExitStack) -> tuple["pa.Schema", Callable[[str], Any]]:
    """(the file's schema, a function from a column's name to an iterable of record batches that have it); the file is closed
    with `stack`."""
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


def _choose_column(path: Path, schema: "pa.Schema", asked: str | None) -> str:
    """The name of the column that holds the ids; UserError if that can't be told, or `asked` holds none."""
    names = ", ".join(schema.names[:8])
    of_ids = [name for name in schema.names if _holds_ids(schema.field(name).type)]
    if asked is not None:
        if asked not in schema.names:
            raise UserError(f"token file {path} has no column {asked!r}; it has {names}")
        if asked not in of_ids:
            raise UserError(f"token file {path}: column {asked!r} holds {schema.field(asked).type}; ids are whole numbers "
                            f"or lists of them")
        return asked
    usual = [name for name in ID_COLUMNS if name in of_ids]
    if usual or len(of_ids) == 1:
        return (usual or of_ids)[0]
    if of_ids:
        raise UserError(f"token file {path} has several columns of whole numbers ({', '.join(of_ids[:8])}); say which holds "
                        f"the ids with --column")
    raise UserError(f"token file {path} has no column of ids (it has {names}); text in it must be written as JSONL and go "
                    f"through `train tokenize`")


def _holds_ids(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind))


def _flat(path: Path, column: Any, row: int) -> np.ndarray:
    """The ids (count,) of a batch's column, an array of pyarrow's whose first row is the file's `row`; UserError naming the
    rows where one is missing, negative or over 32 bits."""
    import pyarrow as pa

    if column.null_count:
        null_row = row + int(column.is_null().to_numpy(zero_copy_only=False).argmax())
        raise UserError(f"token file {path}: row {null_row} has no ids (null); leave such rows out")
    values = column if pa.types.is_integer(column.type) else column.flatten()
    if values.null_count:
        problem = "an id that is null"
    else:
        ids: np.ndarray = values.to_numpy()
        is_wrong = (ids >= 1 << 32) | (ids < 0)
        if not is_wrong.any():
            return ids
        problem = f"id {int(ids[is_wrong.argmax()])}"
    raise UserError(f"token file {path} has {problem} in rows {row} to {row + len(column) - 1}; ids are 0 or more: leave "
                    f"out padding and masks")
