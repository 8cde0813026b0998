"""Distinguishes "out of memory" from every other failure. Libraries report it in many ways, mostly plain RuntimeErrors.

This does not import torch: a sweep uses it on the last output of a dead worker.
"""

import re

_OUT_OF_MEMORY = re.compile(
    "|".join(
        (
            r"out of memory",
            r"DefaultCPUAllocator: (can't|not enough)",
            r"bad_alloc",
            r"cannot allocate memory",
            r"could not create a memory",  # oneDNN
            r"ALLOC_FAILED",  # cuBLAS, cuDNN
            r"\bMemoryError\b",
        )
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and mentions_out_of_memory(str(error))


def mentions_out_of_memory(text: str) -> bool:
    return _OUT_OF_MEMORY.search(text) is not None


def say_in_a_line(error: BaseException) -> str:
    # PyTorch's checks start with a location in its source, which means nothing to a user.
    lines = re.sub(r"^\[enforce fail at [^\]]*\][^.]*\. ", "", str(error).strip()).splitlines()
    said = " ".join(line.strip() for line in lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
