"""What a file is, told by its bytes and never by its name: which format, and of flat ids which type.

llm.c's header and both of its kinds: https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py. nanoGPT's
train.bin is flat uint16: https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py.
"""

import codecs
import re
import struct

import numpy as np

LLM_C: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""llm.c's magic numbers: the version that goes with each, and its ids' type."""
LLM_C_EVALUATION = 20240522
FOREIGN = {b"PK\x03\x04": "a zip file (what torch.save and np.savez write)", b"\x89HDF": "HDF5", b"GGUF": "a GGUF model",
           b"MMIDIDX": "Megatron's index", b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz",
           b"BZh91AY&SY": "bzip2"}
MIN_PAIRS = 16
"""Pairs of 16-bit halves below which a pattern in them may be chance."""
ANY_VOCAB = 1 << 20
"""The largest vocabulary that is thought possible where none is known: Gemma's, of the large ones, has 262,144."""


def kind_of(head: bytes, tail: bytes = b"", size: int = 0) -> str:
    """What a file of `size` bytes that begins with `head` and ends with `tail` is: "npy", "parquet", "arrow" (the file or
    the stream of its IPC), "llm.c", "text", "gzip", "zstd", the name of something else without ids that can be read, or
    "flat"."""
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
    if int.from_bytes(head[:4], "little") == LLM_C_EVALUATION:
        return "llm.c's multiple-choice evaluation"
    return "text" if _is_text(head) else "flat"


def _is_pickle(head: bytes, tail: bytes, size: int) -> bool:
    if len(head) < 4 or head[0] != 0x80 or not tail.endswith(b"."):
        return False
    if head[1] in (4, 5):
        return head[2] == 0x95 and len(head) > 11 and struct.unpack("<Q", head[3:11])[0] <= size - 11
    return head[1] in (2, 3) and head[2:3] in b"]}(cXK\x8a"


def _is_text(head: bytes) -> bool:
    encoding = "utf-16" if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(text) and not re.search(r"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]", text)


def flat_type(words: np.ndarray, vocab: int | None) -> tuple[np.dtype | None, str]:
    """(type, why) of a flat file's ids, from 16-bit words of it, (an even number,) uint16 in the file's order; (None, what
    to do) where neither or both of uint16 and uint32 are plausible.

    Read as uint32 every second word is the high half of an id, which a vocabulary of V keeps at (V - 1) >> 16 or below: 0
    below 65,536. A file of uint16 has ids of every size in both places.
    """
    highest = ((vocab or ANY_VOCAB) - 1) >> 16
    below = f"below the vocabulary of {vocab}" if vocab else "possible"

    def are_ids(low: np.ndarray, high: np.ndarray) -> bool:
        ids = low.astype(np.int64) | high.astype(np.int64) << 16
        return bool(len(ids)) and bool((ids < (vocab or ANY_VOCAB)).all())

    def are_no_high_halves(words: np.ndarray) -> bool:
        return len(words) >= MIN_PAIRS and float((words <= highest).mean()) < 0.5

    quads = words[:len(words) // 4 * 4].reshape(-1, 4)
    if len(quads) >= MIN_PAIRS and not quads[:, 1:].any() and quads[:, 0].any():
        return None, "its ids look like 8 bytes each; write them again as uint32 (NumPy: ids.astype('<u4').tofile(FILE))"
    swapped = words.byteswap()
    if are_ids(swapped[1::2], swapped[::2]) and are_no_high_halves(swapped[1::2]) and not are_ids(words[::2], words[1::2]):
        return None, "its ids look big-endian; write them again little-endian (NumPy: ids.astype('<u4').tofile(FILE))"
    as_32, as_16 = are_ids(words[::2], words[1::2]), vocab is None or bool((words < vocab).all())
    if as_32 and (not as_16 or are_no_high_halves(words[::2])):
        return np.dtype("<u4"), f"as uint32 every sampled id is {below}, and every second half {highest} or less"
    if as_16 and not as_32:
        return np.dtype("<u2"), f"as uint16 every sampled id is {below}, as uint32 not"
    if as_16:
        return None, "its ids are plausible as uint16 and as uint32; say which with --dtype uint16 or --dtype uint32"
    if (swapped < vocab).all():
        return None, "its ids look big-endian; write them again little-endian (NumPy: ids.astype('<u2').tofile(FILE))"
    return None, (f"its ids are past the vocabulary of {vocab} both as uint16 (id {int(words.max())}) and as uint32; plan "
                  f"with the --vocab it was made with, or say --dtype uint16 or uint32 if you know it")
