"""The edge of a program that runs under one of NVIDIA's profilers: a request from a file, an answer beside it.

What the profiler records is its own; what we measured besides, or why we could not, is left in the answer for `jobs`,
which does not import torch. Neither does this file.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.errors import Exit, StepscopeError
from stepscope.measure.failures import is_out_of_memory


class RefusedError(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """It did not run to its end. `bad_input` where the user can mend it."""

    message: str
    detail: str = ""
    hint: str = ""
    bad_input: bool = False


def answer_path(request: Path) -> Path:
    return request.with_suffix(".answer.json")


def serve(program: str, arguments: list[str], record: Callable[[Path], msgspec.Struct]) -> int:
    """Hands `record` the request's path and writes what it says. The process boundary: whatever the model, the driver
    or a library raises becomes an answer."""
    if len(arguments) != 1:
        sys.stderr.write(f"usage: python -m {program} REQUEST.json\n")
        return Exit.BAD_INPUT
    path = Path(arguments[0])
    answer: msgspec.Struct
    try:
        answer = record(path)
    except StepscopeError as error:
        answer = RefusedError(message=error.message, detail=error.detail, hint=error.hint, bad_input=True)
    except BaseException as error:  # noqa: BLE001  # a model may call sys.exit, too
        traceback.print_exc()
        line = next(iter(str(error).splitlines()), "")[:300]
        message = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {line}"
        answer = RefusedError(message=message, detail=line if message == "out of memory" else "")
    answer_path(path).write_bytes(msgspec.json.encode(answer))
    if isinstance(answer, RefusedError):
        sys.stderr.write(f"error: {answer.message}\n{answer.detail}\n")
        return Exit.BAD_INPUT if answer.bad_input else Exit.GATE_FAILED
    return Exit.OK
