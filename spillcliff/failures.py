"""What an exception means: that memory ran out, or that the card stopped working. Pure; read by type and text, since it may
come from another process, from a library, or wrapped in another one."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from spillcliff.units import format_bytes


class Failure(NamedTuple):
    """An exception by its type's name and its text."""

    kind: str
    text: str


class FailedElsewhere(Exception):
    """What another process failed with, as that process told it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.failure = Failure(kind, text)


def failure(e: BaseException) -> Failure:
    """What `e` stems from: the failure to allocate that it was raised for or while handling, since a graph's recording,
    a thread or another library wraps it; else itself."""
    own = _own(e)
    return own if is_out_of_memory(*own) and not _CAPTURE.search(own.text) else next(
        (f for f in map(_own, _chain(e)) if is_out_of_memory(*f) and not _CAPTURE.search(f.text)), _before_capture(e))


def _own(e: BaseException) -> Failure:
    return e.failure if isinstance(e, FailedElsewhere) else Failure(type(e).__name__, str(e))


def _before_capture(e: BaseException) -> Failure:
    """What invalidated a graph's recording, if an exception says it; else `e` itself."""
    chain = list(map(_own, _chain(e)))
    return next((f for f in chain if not _CAPTURE.search(f.text)), chain[0]) if _CAPTURE.search(chain[0].text) else chain[0]


def _chain(e: BaseException) -> Iterator[BaseException]:
    """`e`, what it was raised from or while handling, and the members of groups, each once."""
    waiting, seen = [e], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += [other for other in (one.__cause__, None if one.__suppress_context__ else one.__context__) if other]


_OOM_TYPES = ("OutOfMemoryError", "MemoryError")
"""How the names end: numpy's is _ArrayMemoryError."""
_CAPTURE = re.compile(r"StreamCaptureInvalidated|due to a previous error during capture")
"""What ends a graph's recording after something in it failed. Where nothing else is told that was the driver refusing
memory: the very same step has run before it is recorded."""
_OOM_TEXTS = (
    # in so many words, by whatever library: CUDA, HIP, XPU, MPS, Triton, NCCL, cupy, JAX; "out of shared memory" is not it
    r"out[ _-]?of[ _-]?(?:(?:device|host|gpu|cuda|video|system)[ _-]?)?memory",
    r"(?:not enough|insufficient)(?: free| available| gpu| cuda| device| host| system| video)? memory",
    r"exceeds? (?:the )?(?:allowed|available|free) memory",
    r"memory exhausted|RESOURCE_EXHAUSTED|std::bad_alloc|\bENOMEM\b|\bErrno 12\b",
    r"(?:can ?not|can't|could not|couldn't|unable to|fail(?:ed|ure)? to) (?:re)?allocate"
    r"(?! memory in static TLS)(?=.{0,60}(?:memory|bytes|\b[KMGT]i?B\b|buffer|tensor|array))",
    r"fail(?:ed|ure)? to (?:cuda |hip )?(?:(?:host )?alloc|calloc|malloc)",
    # by a code: CUDA's and HIP's 2 is no memory, Windows' 8 and 14 no memory and 1455 no paging file for it
    r"(?:cuda|hip)[^.\n]{0,40}\b(?:error|failure)[ :]{0,2}(?:code ?)?[ :=]?\(?2\b(?!\.?\d)",
    r"\bWinError (?:8|14|1455)\b|paging file is too small",
    r"(?:cuda|hip)ErrorMemoryAllocation|memory allocation fail",
    r"\b(?:CU|HIP|ROC|MIOPEN)[A-Z_]*ALLOC(?:ATION)?_FAILED",
    # what only want of memory brings about: the allocator asks NVML what was free when cudaMalloc fails, Metal's buffers
    # have a largest size, cuDNN has no algorithm left whose workspace can be had
    r"NVML_SUCCESS ?==.{0,80}INTERNAL ASSERT FAILED",
    r"Invalid buffer size",
    r"(?:no|unable to find a) valid cuDNN algorithm",
    # a process that the system killed: its out-of-memory killer does so
    r"killed by signal: Killed|Signal 9 \(SIGKILL\)|exit ?code ?: ?-9\b|exit(?:ed with)? code:? 137\b")
_OOM_TEXT = re.compile("|".join(_OOM_TEXTS), re.IGNORECASE)


def is_out_of_memory(kind: str, text: str) -> bool:
    """Whether an exception of type `kind` means that an allocation failed. No figure in the text is believed: under WSL2
    they are nonsense."""
    return kind.endswith(_OOM_TYPES) or bool(_OOM_TEXT.search(text) or _CAPTURE.search(text))


_LOST_TEXT = re.compile(r"(CUDA|HIP|XPU)( driver)? error: |CU[A-Z]+_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
                        r"|UR_RESULT_ERROR_DEVICE_LOST|GPU is lost")


def is_card_lost(kind: str, text: str) -> bool:
    """Whether an exception of type `kind`, not out of memory, means that the card stopped working for this process: a driver
    that was reset, a card that fell off the bus."""
    return not is_out_of_memory(kind, text) and (kind == "AcceleratorError" or bool(_LOST_TEXT.search(text)))


_LOST_PEER_TEXT = re.compile(r"[Cc]onnection (?:reset|closed|refused)|Broken pipe|Socket [Tt]imeout|remote process exited")


def is_peer_lost(text: str) -> bool:
    """Whether a process says with this that another of its group is gone: that one's own failure is the cause."""
    return bool(_LOST_PEER_TEXT.search(text))


FRAGMENTED_SHARE, FRAGMENTED_RECORDED, FRAGMENTED_BYTES = 0.25, 0.4, 256 << 20
"""Of the most that was reserved, the part that no tensor ever had from which on memory failed for being in pieces: 10 of
22.3 GB in a public report, 0.04 at most in 15 failures on an H200. A recorded step of a small cell has 0.36 by itself, since
what ran before the recording has blocks of its own. No less than the third, which is little on any card."""


def fragmentation(reserved_bytes: int | None, allocated_bytes: int | None, is_recorded: bool = False) -> str | None:
    """What of the memory that was reserved when an allocation failed lay free in pieces, by the peaks of a step that
    `is_recorded` as a graph or not, and what helps; None if little did."""
    if reserved_bytes is None or allocated_bytes is None:
        return None
    free, share = reserved_bytes - allocated_bytes, FRAGMENTED_RECORDED if is_recorded else FRAGMENTED_SHARE
    if free < max(FRAGMENTED_BYTES, share * reserved_bytes):
        return None
    return (f"fragmentation: {format_bytes(free)} of {format_bytes(reserved_bytes)} reserved lay free in pieces; "
            f"PYTORCH_ALLOC_CONF=expandable_segments:True (not under Windows) or a smaller step helps")
