"""Which files hold token ids, and how: recognised by what is in them, never by their names. Nothing is ever unpickled.

llm.c's header and both of its kinds: https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py. nanoGPT's
train.bin is flat uint16: https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py.
"""

import codecs
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spillcliff.errors import UserError
from trainer.data.shards import expand
from trainer.data.tokens import Tokens, sidecar

HEADER = 1024
"""Bytes of llm.c's header: 256 little-endian int32."""
LLM_C = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""llm.c's magic numbers: the version that goes with each, and its ids' type."""
FOREIGN = {b"PK\x03\x04": "a zip file (what torch.save and np.savez write)", b"\x89HDF": "HDF5", b"GGUF": "a GGUF model",
           b"MMIDIDX": "Megatron's index", b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz",
           b"BZh91AY&SY": "bzip2"}
TEXT = ("text", "gzip", "zstd")
"""Kinds that `train tokenize` reads."""
LOOKED_AT = 1 << 16
"""Bytes of a file's beginning, and of each piece of it, that a guess is made from."""
PIECES = 64
"""Pieces of a flat file that its type is decided by: 4 MB, read in milliseconds. Every id is checked later anyway."""
FEWEST = 16
"""Pairs of 16-bit halves below which a pattern in them may be chance."""
ANY_VOCAB = 1 << 20
"""Vocabulary taken for the largest there is where none is known: Gemma's, of the large ones, has 262,144."""


def kind_of(head: bytes, tail: bytes = b"", size: int = 0) -> str:
    """What a file of `size` bytes that begins with `head` and ends with `tail` is: "npy", "parquet", "arrow" (the file or
    the stream of its IPC), "llm.c", "text", "gzip", "zstd", the name of something else that holds no ids, or "flat"."""
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")) and len(head) > 16:
        metadata = struct.unpack("<i", head[4:8])[0]
        if head.startswith(b"ARROW1") or (metadata > 0 and metadata % 8 == 0 and metadata < max(size, 1)):
            return "arrow"
    for magic, name in FOREIGN.items():
        if head.startswith(magic):
            return name
    if len(head) > 8 and head[8:10] == b'{"' and struct.unpack("<Q", head[:8])[0] < size:
        return "safetensors"
    if _is_pickle(head, tail, size):
        return "a pickle"
    if len(head) >= 8 and int.from_bytes(head[:4], "little") in LLM_C:
        return "llm.c"
    if head[:4] in [magic.to_bytes(4, "big") for magic in LLM_C]:
        return "llm.c's format in big-endian order"
    if int.from_bytes(head[:4], "little") == 20240522:
        return "llm.c's multiple-choice evaluation"
    return "text" if _is_text(head) else "flat"


def _is_pickle(head: bytes, tail: bytes, size: int) -> bool:
    if len(head) < 4 or head[0] != 0x80 or not tail.endswith(b"."):
        return False
    if head[1] in (4, 5):
        return head[2] == 0x95 and len(head) > 11 and struct.unpack("<Q", head[3:11])[0] <= size - 11
    return head[1] in (2, 3) and head[2:3] in b"]}(cXK\x8a"


def _is_text(head: bytes) -> bool:
    for encoding in ("utf-16",) if head[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8",):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeDecodeError:
            return False
        return bool(text) and not re.search(r"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]", text)


def flat_type(words: np.ndarray, vocab: int | None) -> tuple[np.dtype | None, str]:
    """The type of a flat file's ids, and why, from 16-bit words of it (an even number, as they lie there); no type where
    none or both are plausible.

    Read as uint32 every second word is the high half of an id, which a vocabulary of V keeps at (V - 1) >> 16 or below: 0
    below 65,536. A file of uint16 has ids of every size in both places.
    """
    highest = ((vocab or ANY_VOCAB) - 1) >> 16
    below = f"below the vocabulary of {vocab}" if vocab else "possible"

    def wide(low, high) -> bool:
        ids = low.astype(np.int64) | high.astype(np.int64) << 16
        return bool(len(ids)) and bool((ids < (vocab or ANY_VOCAB)).all())

    def told_apart(low) -> bool:
        return len(low) >= FEWEST and float((low <= highest).mean()) < 0.5

    quads = words[:len(words) // 4 * 4].reshape(-1, 4)
    if len(quads) >= FEWEST and not quads[:, 1:].any() and quads[:, 0].any():
        return None, "its ids look like 8 bytes each; write them again as uint32 (NumPy: ids.astype('<u4').tofile(FILE))"
    swapped = words.byteswap()
    if wide(swapped[1::2], swapped[::2]) and told_apart(swapped[1::2]) and not wide(words[::2], words[1::2]):
        return None, "its ids look big-endian; write them again little-endian (NumPy: ids.astype('<u4').tofile(FILE))"
    as_32, as_16 = wide(words[::2], words[1::2]), vocab is None or bool((words < vocab).all())
    if as_32 and (not as_16 or told_apart(words[::2])):
        return np.dtype("<u4"), f"as uint32 every id looked at is {below}, and every second half {highest} or less"
    if as_16 and not as_32:
        return np.dtype("<u2"), f"as uint16 every id looked at is {below}, as uint32 not"
    if as_16:
        return None, "its ids are plausible as uint16 and as uint32; say which with --dtype uint16 or --dtype uint32"
    if (swapped < vocab).all():
        return None, "its ids look big-endian; write them again little-endian (NumPy: ids.astype('<u2').tofile(FILE))"
    return None, (f"its ids are past the vocabulary of {vocab} both as uint16 (id {int(words.max())}) and as uint32; plan "
                  f"with the --vocab it was made with, or say --dtype uint16 or uint32 if you know it")


def open_tokens(named: Sequence[Path | str], vocab: int | None, dtype: str | None = None, column: str | None = None,
                say=lambda line: None) -> Tokens:
    """The ids of all files that `named` (files, folders, patterns) stand for, in natural order, as one run of tokens.

    `vocab` is the model's, where known, by which the type of a flat file is told if `dtype` doesn't; `column` the one of a
    Parquet or Arrow file. UserError for what is damaged, no token file, or of another kind than the others.
    """
    paths = expand(named, _holds_ids)
    opened = [_open(path, vocab, dtype, column, say) for path in paths]
    first = opened[0]
    for path, found in zip(paths, opened, strict=True):
        if found[0] != first[0]:
            raise UserError(f"token files of two kinds: {paths[0]} is {first[0]}, {path} is {found[0]}; name those of one "
                            f"kind with --data, or put each kind in a folder of its own")
        if (found[1].vocab, _coder(found[1])) != (first[1].vocab, _coder(first[1])):
            raise UserError(f"token files of two tokenizers: {paths[0]} and {path}; tokenize both with one, by --tokenizer")
        if not len(found[1].ids) and len(paths) > 1:
            raise UserError(f"token file {path} is empty; remove it from --data")
    if len(paths) > 1:
        total = sum(len(tokens.ids) for _, tokens in opened)
        say(f"{len(paths)} files, {paths[0].name} to {paths[-1].name}, {total:,} tokens, {first[0]}")
    return Tokens.join([tokens for _, tokens in opened])


def _holds_ids(path: Path) -> bool:
    kind = kind_of(*_ends(path))
    return sidecar(path).is_file() or kind in ("npy", "parquet", "arrow", "llm.c", "flat")


def _coder(tokens: Tokens) -> bytes | None:
    try:
        return Path(tokens.tokenizer).read_bytes() if tokens.tokenizer else None
    except OSError:
        return None


def _ends(path: Path) -> tuple[bytes, bytes, int]:
    try:
        with open(path, "rb") as f:
            head = f.read(LOOKED_AT)
            size = f.seek(0, 2)
            f.seek(max(0, size - 16))
            return head, f.read(), size
    except OSError as e:
        raise UserError(f"token file {path}: {e.strerror or e}") from None


def _open(path: Path, vocab: int | None, dtype: str | None, column: str | None, say) -> tuple[str, Tokens]:
    """What the file is, and its ids."""
    if sidecar(path).is_file():
        tokens = Tokens.open(path)
        return _agreed(path, f"{tokens.ids.dtype} with {sidecar(path).suffix} beside", tokens, dtype)
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
        raise UserError(f"token file {path} is {what}, not ids; run `train tokenize {path} --out {out}` and give "
                        f"--data {out}")
    if kind == "npy":
        return _agreed(path, "npy", _npy(path, size), dtype)
    if kind == "llm.c":
        return _agreed(path, "llm.c", _llm_c(path, head, size), dtype)
    if kind in ("parquet", "arrow"):
        from trainer.data.arrow import converted

        return kind, converted(path, kind, column, say)
    if kind != "flat":
        raise UserError(f"token file {path} is {kind}, which holds no ids that can be read; give flat uint16 or uint32 ids, "
                        f".npy, llm.c's .bin, Parquet or Arrow")
    found = _flat_dtype(path, size, vocab, dtype, say)
    return f"flat {found.name}", Tokens.of_ids(_map(path, found, 0), None, str(path))


def _agreed(path: Path, kind: str, tokens: Tokens, dtype: str | None) -> tuple[str, Tokens]:
    if dtype and tokens.ids.dtype.name != dtype:
        raise UserError(f"token file {path} holds {tokens.ids.dtype.name} by its own words; leave --dtype {dtype} away")
    return kind, tokens


def _map(path: Path, dtype: np.dtype, offset: int) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r", offset=offset)


def _flat_dtype(path: Path, size: int, vocab: int | None, dtype: str | None, say) -> np.dtype:
    if dtype:
        found, why = np.dtype(dtype).newbyteorder("<"), "as --dtype says"
    else:
        words = np.memmap(path, dtype="<u2", mode="r", shape=(size // 8 * 4,)) if size >= 8 else np.empty(0, "<u2")
        step = LOOKED_AT // 2
        starts = np.linspace(0, max(0, len(words) - step), PIECES if len(words) > PIECES * step else 1).astype(int) // 4 * 4
        if len(words) <= PIECES * step:
            looked_at = np.asarray(words)
        else:
            looked_at = np.concatenate([words[s:s + step] for s in starts])
        found, why = flat_type(looked_at, vocab)
    if size % 2 or (found and size % found.itemsize):
        raise UserError(f"token file {path} has {size} bytes, which is no whole number of ids of "
                        f"{found.itemsize if found else 2} bytes: it was cut off in the middle of one; copy it again")
    if found is None:
        raise UserError(f"token file {path}: {why}")
    say(f"token file {path}: flat {found.name}, {why}")
    return found


def _llm_c(path: Path, head: bytes, size: int) -> Tokens:
    if size < HEADER:
        raise UserError(f"token file {path} begins as llm.c's and ends after {size} bytes, within its header of {HEADER}; "
                        f"copy it again")
    magic, version, count = struct.unpack("<3i", head[:12])
    right, dtype = LLM_C[magic]
    if version != right:
        raise UserError(f"token file {path} is llm.c's with magic {magic} in version {version}; version {right} is read")
    if size != HEADER + count * dtype.itemsize:
        raise UserError(f"token file {path}: its llm.c header promises {count} ids of {dtype.itemsize} bytes and "
                        f"{max(0, size - HEADER) / dtype.itemsize:g} follow; copy it again")
    if not count:
        raise UserError(f"token file {path} is empty after its header; make it again")
    return Tokens.of_ids(_map(path, dtype, HEADER), None, str(path))


def _npy(path: Path, size: int) -> Tokens:
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
