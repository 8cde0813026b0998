"""Programs that run under one of NVIDIA's profilers, and what they share: a request in a file, a result next to it.

The profiler writes its own recording; our own measurements, or the reason why there are none, go into the result for
`jobs`, which does not import torch. Neither does this file, until a model runs.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import Exit, StepscopeError
from stepscope.measure.failures import is_out_of_memory

if TYPE_CHECKING:
    import torch


class TargetFailed(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The program failed. `bad_input` if the user can fix it."""

    message: str
    detail: str = ""
    hint: str = ""
    bad_input: bool = False


def answer_path(request: Path) -> Path:
    return request.with_suffix(".answer.json")


@contextmanager
def profiled_range(device: "torch.device") -> Iterator[None]:
    """What the profiler keeps: the work launched inside, until it finishes."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def serve(program: str, arguments: list[str], record: Callable[[Path], msgspec.Struct]) -> int:
    """Call `record` with the request's path and write its result. The process boundary: every exception of the model,
    the driver or a library becomes a result.
    """
    if len(arguments) != 1:
        sys.stderr.write(f"usage: python -m {program} REQUEST.json\n")
        return Exit.BAD_INPUT
    path = Path(arguments[0])
    answer: msgspec.Struct
    try:
        answer = record(path)
    except StepscopeError as error:
        answer = TargetFailed(message=error.message, detail=error.detail, hint=error.hint, bad_input=True)
    except BaseException as error:  # noqa: BLE001  # a model may call sys.exit, too
        traceback.print_exc()
        line = next(iter(str(error).splitlines()), "")[:300]
        message = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {line}"
        answer = TargetFailed(message=message, detail=line if message == "out of memory" else "")
    answer_path(path).write_bytes(msgspec.json.encode(answer))
    if isinstance(answer, TargetFailed):
        sys.stderr.write(f"error: {answer.message}\n{answer.detail}\n")
        return Exit.BAD_INPUT if answer.bad_input else Exit.GATE_FAILED
    return Exit.OK
