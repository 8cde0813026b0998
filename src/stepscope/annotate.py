"""Named ranges in a trace: `stepscope.annotate`.

    @stepscope.annotate("rotate")                with stepscope.annotate("rotate"):
    def rotate(x): ...                               ...

    stepscope.annotate.push("rotate"); ...; stepscope.annotate.pop()

Ranges exist only while something records them: a recorder of stepscope, which chooses with `activate` how a range
opens, any profiler that was started through PyTorch (`torch.profiler`, `emit_nvtx`, `emit_itt`), or Nsight Systems.
Otherwise, entering one checks two flags and returns.

In compiled code, ranges do nothing. The check for compilation comes first, so `torch.compile` removes the whole range
and adds no guard on our flags, which would trigger recompilation when a profiler starts.

`torch.profiler.record_function` goes through the dispatcher and costs 4 to 8× as much as the two functions used here.
`_RecordFunctionFast`, from PyTorch's own compiler, is the fastest, but its ranges are `user_annotation` events only if
the profiler records shapes, as stepscope does; otherwise they look like operators. Profilers of others may not record
them, and get the slightly slower `_record_function_with_args_enter`.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Backend = Literal["profiler", "nvtx"]
Close = Callable[..., object]
Opener = Callable[[str], Close]

_open: Opener | None = None
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ
_USER_SCOPE = {"scope": "user_scope"}


class _Open(threading.local):
    """This thread's open ranges, innermost last: the owner of each, and the function that closes it."""

    def __init__(self) -> None:
        self.ranges: list[tuple[object, Close]] = []


_opened = _Open()


class Range(AbstractContextManager["Range"]):
    """A named range. It can be entered any number of times, from any thread, and decorate any number of functions."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(
                f"stepscope.annotate expects a name, got {type(name).__name__}; write @stepscope.annotate('name')"
            )
        self.name = name

    def __enter__(self) -> "Range":
        if not _is_compiling() and (opener := _find_opener()) is not None:
            _opened.ranges.append((self, opener(self.name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not _is_compiling():
            _close_own(self)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        return wrap(function, self.name)


class Annotate:
    """`stepscope.annotate`: a decorator, a context manager, and `push` and `pop`."""

    def __call__(self, name: str) -> Range:
        return Range(name)

    def push(self, name: str) -> None:
        """Open a range in this thread until `pop`."""
        if not _is_compiling() and (opener := _find_opener()) is not None:
            _opened.ranges.append((self, opener(name)))

    def pop(self) -> None:
        """Close the range that this thread pushed last. Does nothing if there is none, because the push may have come
        before the profiler started."""
        if not _is_compiling():
            _close_own(self)


annotate = Annotate()


def wrap(function: Callable[P, R], name: str) -> Callable[P, R]:
    """Wrap `function` so that each call is a range while something records."""

    @wraps(function)
    def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_compiling() or (opener := _find_opener()) is None:
            return function(*args, **kwargs)
        close = opener(name)
        try:
            return function(*args, **kwargs)
        finally:
            close()

    return annotated


@contextmanager
def activate(backend: Backend | Opener) -> Iterator[None]:
    """Open ranges this way within this context. For the profiler, enter it inside the profiler's own context: a range
    opened before the profiler started cannot be closed in it. Other recorders pass the function that opens a range."""
    global _open
    assert _open is None, "two recorders at once"
    match backend:
        case "profiler":
            _open = _profiler_opener()
        case "nvtx":
            _open = _nvtx_opener()
        case _:
            _open = backend
    outside = len(_opened.ranges)
    try:
        yield
    finally:
        while len(_opened.ranges) > outside:  # pushed and never popped
            _opened.ranges.pop()[1]()
        _open = None


def open_range(name: str) -> Close:
    """Open a range and return the function that closes it, for ranges that do not fit a `with` block."""
    opener = _find_opener()
    return opener(name) if opener is not None else lambda: None


def _find_opener() -> Opener | None:
    """How a range opens now; None if nothing records."""
    if _open is not None:
        return _open
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if profiler is not None and getattr(profiler, "_is_profiler_enabled", False):
        return _any_profiler_opener()
    return _nvtx_opener() if _UNDER_NSYS and _has_nvtx() else None


def _close_own(owner: object) -> None:
    """Close the innermost range if `owner` opened it. A range entered before the profiler started does not exist."""
    ranges = _opened.ranges
    if ranges and ranges[-1][0] is owner:
        ranges.pop()[1]()


def _is_compiling() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def _profiler_opener() -> Opener:
    from torch._C._profiler import _RecordFunctionFast

    def open_range(name: str) -> Close:
        opened = _RecordFunctionFast(name, (), _USER_SCOPE)
        opened.__enter__()
        return lambda: opened.__exit__(None, None, None)

    return open_range


@cache
def _any_profiler_opener() -> Opener:
    from torch._C._autograd import _record_function_with_args_enter, _record_function_with_args_exit

    def open_range(name: str) -> Close:
        handle = _record_function_with_args_enter(name)
        return lambda: _record_function_with_args_exit(handle)

    return open_range


def _has_nvtx() -> bool:
    """Whether torch is loaded and was built with NVTX, as all CUDA builds are."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and hasattr(torch._C, "_nvtx")


@cache
def _nvtx_opener() -> Opener:
    from torch.cuda import nvtx

    def open_range(name: str) -> Close:
        nvtx.range_push(name)  # type: ignore[no-untyped-call]
        return nvtx.range_pop

    return open_range
