"""Failures that a user can put right, each told in one line, and which failures are for want of memory."""

import re


class UserError(Exception):
    """Bad input or usage: the message names the thing, what is wrong and what would be right, in one line whatever it
    quotes."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NoPlan(UserError):
    """Nothing fits, or no plan is possible from what was measured."""

    exit_code = 3


class NoKernels(UserError):
    """The torch build has no machine code for the card."""


class Refused(UserError):
    """The machine is not in a state in which a run should start."""

    exit_code = 4


_OOM_TYPES = ("OutOfMemoryError", "MemoryError")
"""How the names end: numpy's is _ArrayMemoryError."""
_OOM_TEXT = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory|Triton Error \[CUDA\]: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(cuda|hip)Error(MemoryAllocation|OutOfMemory)|CU[A-Z]+_(STATUS_)?ALLOC_FAILED"
    r"|(CUDA|HIP|XPU) out of memory|MPS backend out of memory|OUT_OF_(DEVICE|HOST)_MEMORY"
    r"|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc|Cannot allocate memory")


def is_out_of_memory(kind: str, text: str) -> bool:
    """Whether an exception of type `kind` means that an allocation failed. No figure in the text is believed: under WSL2
    they are nonsense."""
    return kind.endswith(_OOM_TYPES) or bool(_OOM_TEXT.search(text))


_LOST_TEXT = re.compile(r"(CUDA|HIP|XPU)( driver)? error: |CU[A-Z]+_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
                        r"|UR_RESULT_ERROR_DEVICE_LOST|GPU is lost")


def is_card_lost(kind: str, text: str) -> bool:
    """Whether an exception of type `kind`, not out of memory, means that the card stopped working for this process: a driver
    that was reset, a card that fell off the bus."""
    return not is_out_of_memory(kind, text) and (kind == "AcceleratorError" or bool(_LOST_TEXT.search(text)))
