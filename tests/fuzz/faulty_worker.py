"""A worker whose command fails in every way that the fuzzer must distinguish, one after the other."""

import ctypes
import sys
import time
from pathlib import Path
from typing import NoReturn

from stepscope.errors import Exit
from tests.fuzz.worker import serve

# The expected outcomes of inputs 0, 1, 2 and so on.
CLASSES = ("result", "error", "exception", "exception", "exception", "memory", "crash", "hang", "result")


class Panic(BaseException):
    """An exception like those of polars."""


def fail(calls: Path) -> NoReturn:
    """`calls` counts across processes, since some of these kill the process."""
    with calls.open("a") as file:
        file.write("x")
    match calls.stat().st_size - 1:
        case 1:
            sys.stderr.write("skipped: a truncated last line\nerror: file not found\n")
            sys.exit(Exit.BAD_INPUT)
        case 2:
            sys.stderr.write("something went wrong\n")
            sys.exit(Exit.BAD_INPUT)
        case 3:
            sys.exit(Exit.OUR_MISTAKE)
        case 4:
            raise Panic
        case 5:
            held = []
            while True:
                held.append(b"x" * (64 << 20))
                time.sleep(0.05)  # or a busy machine runs out of memory before anybody looks
        case 6:
            ctypes.string_at(0)
        case 7:
            while True:
                pass
    sys.exit(Exit.UNDECIDED)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    serve(folder, int(sys.argv[2]), sys.argv[3], lambda: fail(folder.parent / "calls"))
