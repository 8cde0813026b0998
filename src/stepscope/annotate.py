"""Named ranges in a trace: `stepscope.annotate`.

    @stepscope.annotate("rotate")                with stepscope.annotate("rotate"):
    def rotate(x): ...                               ...

    stepscope.annotate.push("rotate"); ...; stepscope.annotate.pop()

Ranges exist only while a recorder runs; otherwise, entering one checks a flag and returns. Annotated code does not
depend on the recorder: `activate` chooses the function that opens a range, in PyTorch's profiler or as NVTX.

In compiled code, ranges do nothing. The check for compilation comes first, so `torch.compile` removes the whole range
and adds no guard on our flag, which would trigger recompilation when a recorder starts.

`torch.profiler.record_function` goes through the dispatcher and costs 8× as much as the class used here, which
PyTorch's own compiler uses (17 µs instead of 2 µs per range on a 2-core VM). With the user scope, its ranges are
written as `user_annotation`, too. The profiler honors the scope only when it records shapes, as stepscope does.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Backend = Literal["profiler", "nvtx"]
Close = Callable[..., object]
Opener = Callable[[str], Close]

_open: Opener | None = None
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
        if not _is_compiling() and _open is not None:
            _opened.ranges.append((self, _open(self.name)))
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
        if not _is_compiling() and _open is not None:
            _opened.ranges.append((self, _open(name)))

    def pop(self) -> None:
        """Close the range that this thread pushed last. Does nothing if there is none, because the push may have come
        before the recorder started."""
        if not _is_compiling():
            _close_own(self)


annotate = Annotate()


def wrap(function: Callable[P, R], name: str) -> Callable[P, R]:
    """Wrap `function` so that each call is a range while a recorder runs."""

    @wraps(function)
    def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_compiling() or _open is None:
            return function(*args, **kwargs)
        close = _open(name)
        try:
            return function(*args, **kwargs)
        finally:
            close()

    return annotated


@contextmanager
def activate(backend: Backend | Opener) -> Iterator[None]:
    """Enable ranges within this context. For the profiler, enter it inside the profiler's own context: a range opened
    before the profiler started cannot be closed in it. Other recorders pass the function that opens a range."""
    global _open
    assert _open is None, "two recorders at once"
    match backend:
        case "profiler":
            _open = _profiler_opener()
        case "nvtx":
            _open = _nvtx_opener()
        case _:
            _open = backend
    try:
        yield
    finally:
        while _opened.ranges:  # pushed and never popped
            _opened.ranges.pop()[1]()
        _open = None


def open_range(name: str) -> Close:
    """Open a range and return the function that closes it, for ranges that do not fit a `with` block."""
    return _open(name) if _open is not None else lambda: None


def _close_own(owner: object) -> None:
    """Close the innermost range if `owner` opened it. A range entered before the recorder started does not exist."""
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


def _nvtx_opener() -> Opener:
    from torch.cuda import nvtx

    def open_range(name: str) -> Close:
        nvtx.range_push(name)  # type: ignore[no-untyped-call]
        return nvtx.range_pop

    return open_range
