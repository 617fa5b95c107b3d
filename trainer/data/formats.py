"""Opens files of token ids in every format that is read; recognize.py tells which one a file has. Nothing is ever
unpickled."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore
from trainer.data.paths import expand
from trainer.data.recognize import LLM_C, flat_type, kind_of
from trainer.data.tokens import Tokens, sidecar

LLM_C_HEADER = 1024
"""Bytes of llm.c's header: 256 little-endian int32."""
TEXT = ("text", "gzip", "zstd")
"""Kinds that `train tokenize` reads."""
SAMPLE_BYTES = 1 << 16
"""Bytes of a file's beginning, and of each piece of it, from which its kind and type are guessed."""
SAMPLE_PIECES = 64
"""Pieces of a flat file that its type is decided by: 4 MB, read in milliseconds. Every id is checked later anyway."""


@dataclass(frozen=True)
class _Opened:
    """A token file, and what kind it is: those that are read as one must be of one kind."""

    path: Path
    kind: str
    tokens: Tokens

    def check_dtype(self, asked: str | None) -> "_Opened":
        """Itself; UserError if another type was asked for than the file says that it has."""
        name = self.tokens.shards[0].ids.dtype.name
        if asked and asked != name:
            raise UserError(f"token file {self.path} says itself that it holds {name}; leave out --dtype {asked}")
        return self


def open_tokens(named: Sequence[Path | str], vocab: int | None, dtype: str | None = None, column: str | None = None,
                say: Say = ignore) -> Tokens:
    """The ids of all files that `named` (files, folders, patterns) stand for, in natural order, as one run of tokens.

    `vocab` is the model's, where known, by which the type of a flat file is told if `dtype` ("uint16" or "uint32") doesn't;
    `column` is that of a Parquet or Arrow file. UserError for a file that is missing, damaged, not of token ids, or of
    another kind or tokenizer than the others.
    """
    paths = expand(named, _holds_ids)
    files = [_open(path, vocab, dtype, column, say) for path in paths]
    first = files[0]
    for file in files:
        if file.kind != first.kind:
            raise UserError(f"token files of two kinds: {first.path} is {first.kind}, {file.path} is {file.kind}; name "
                            f"those of one kind with --data, or put each kind in a folder of its own")
        if (file.tokens.vocab, _tokenizer_bytes(file.tokens)) != (first.tokens.vocab, _tokenizer_bytes(first.tokens)):
            raise UserError(f"token files of two tokenizers: {first.path} and {file.path}; tokenize both with one, by "
                            f"--tokenizer")
        if not len(file.tokens) and len(files) > 1:
            raise UserError(f"token file {file.path} is empty; remove it from --data")
    if len(files) > 1:
        total = sum(len(file.tokens) for file in files)
        say(f"{len(files)} files, {paths[0].name} to {paths[-1].name}, {total:,} tokens, {first.kind}")
    return Tokens.join([file.tokens for file in files])


def _holds_ids(path: Path) -> bool:
    kind = kind_of(*_ends(path))
    return sidecar(path).is_file() or kind in ("npy", "parquet", "arrow", "llm.c", "flat")


def _tokenizer_bytes(tokens: Tokens) -> bytes | None:
    try:
        return Path(tokens.tokenizer).read_bytes() if tokens.tokenizer else None
    except OSError:
        return None


def _ends(path: Path) -> tuple[bytes, bytes, int]:
    """(first bytes, last bytes, size) of a file; UserError if it can't be read."""
    try:
        with open(path, "rb") as f:
            head = f.read(SAMPLE_BYTES)
            size = f.seek(0, 2)
            f.seek(max(0, size - 16))
            return head, f.read(), size
    except OSError as e:
        raise UserError(f"token file {path}: {e.strerror or e}") from None


def _open(path: Path, vocab: int | None, dtype: str | None, column: str | None, say: Say) -> _Opened:
    if sidecar(path).is_file():
        tokens = Tokens.open(path)
        kind = f"{tokens.shards[0].ids.dtype} with {sidecar(path).suffix} beside"
        return _Opened(path, kind, tokens).check_dtype(dtype)
    head, tail, size = _ends(path)
    if not size:
        raise UserError(f"token file {path} is empty; make it again")
    kind = kind_of(head, tail, size)
    if kind == "text" and dtype:
        kind = "flat"
    if kind in TEXT:
        what, out = kind if kind == "text" else f"compressed by {kind}", path.with_suffix(".bin")
        if out == path:
            out = path.with_suffix(".ids.bin")
        raise UserError(f"token file {path} is {what}, not ids; run `train tokenize {path} --out {out}` and name {out} "
                        f"with --data")
    if kind == "npy":
        return _Opened(path, kind, _open_npy(path, size)).check_dtype(dtype)
    if kind == "llm.c":
        return _Opened(path, kind, _open_llm_c(path, head, size)).check_dtype(dtype)
    if kind in ("parquet", "arrow"):
        from trainer.data.arrow import open_column

        return _Opened(path, kind, open_column(path, kind, column, say))
    if kind != "flat":
        raise UserError(f"token file {path} is {kind}, which holds no ids that can be read; flat uint16 or uint32 ids, "
                        f".npy, llm.c's .bin, Parquet and Arrow are read")
    flat = _flat_dtype(path, size, vocab, dtype, say)
    return _Opened(path, f"flat {flat.name}", Tokens.of_ids(_map(path, flat, 0), None, str(path)))


def _map(path: Path, dtype: np.dtype, offset: int) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r", offset=offset)


def _flat_dtype(path: Path, size: int, vocab: int | None, asked: str | None, say: Say) -> np.dtype:
    """The type of a flat file's ids; UserError if it can't be told, or the file is no whole number of them."""
    dtype: np.dtype | None
    if asked:
        dtype, why = np.dtype(asked).newbyteorder("<"), "as --dtype says"
    else:
        dtype, why = flat_type(_sample_words(path, size), vocab)
    itemsize = dtype.itemsize if dtype else 2
    if size % itemsize:
        raise UserError(f"token file {path} has {size} bytes, which is not a whole number of ids of {itemsize} bytes: it "
                        f"was cut off in the middle of one; copy it again")
    if dtype is None:
        raise UserError(f"token file {path}: {why}")
    say(f"token file {path}: flat {dtype.name}, {why}")
    return dtype


def _sample_words(path: Path, size: int) -> np.ndarray:
    """16-bit words of a flat file, (an even number,) uint16: all of a small one, pieces spread evenly over a large one."""
    if size < 8:
        return np.empty(0, "<u2")
    words = np.memmap(path, dtype="<u2", mode="r", shape=(size // 8 * 4,))
    step = SAMPLE_BYTES // 2
    if len(words) <= SAMPLE_PIECES * step:
        return np.asarray(words)
    starts = np.linspace(0, len(words) - step, SAMPLE_PIECES).astype(int) // 4 * 4
    return np.concatenate([words[s:s + step] for s in starts])


def _open_llm_c(path: Path, head: bytes, size: int) -> Tokens:
    if size < LLM_C_HEADER:
        raise UserError(f"token file {path} begins as llm.c's and ends after {size} bytes, within its header of "
                        f"{LLM_C_HEADER}; copy it again")
    magic, version, count = struct.unpack("<3i", head[:12])
    readable_version, dtype = LLM_C[magic]
    if version != readable_version:
        raise UserError(f"token file {path} is llm.c's with magic {magic} in version {version}; version {readable_version} "
                        f"is read")
    if size != LLM_C_HEADER + count * dtype.itemsize:
        raise UserError(f"token file {path}: its llm.c header promises {count} ids of {dtype.itemsize} bytes and "
                        f"{max(0, size - LLM_C_HEADER) / dtype.itemsize:g} follow; copy it again")
    if not count:
        raise UserError(f"token file {path} is empty after its header; make it again")
    return Tokens.of_ids(_map(path, dtype, LLM_C_HEADER), None, str(path))


def _open_npy(path: Path, size: int) -> Tokens:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as e:
        raise UserError(f"token file {path} is .npy and can't be read ({str(e).splitlines()[0]:.120}); save whole numbers "
                        f"again with np.save") from None
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise UserError(f"token file {path} is .npy of {ids.dtype} with shape {ids.shape}; it must be one dimension of "
                        f"whole numbers: np.save(FILE, ids.reshape(-1).astype(np.uint32))")
    if not len(ids):
        raise UserError(f"token file {path} is .npy without an id in it; make it again")
    if size != ids.offset + ids.nbytes:
        raise UserError(f"token file {path}: its .npy header promises {len(ids)} ids of {ids.itemsize} bytes and "
                        f"{(size - ids.offset) / ids.itemsize:g} follow; copy it again")
    return Tokens.of_ids(ids, None, str(path))
