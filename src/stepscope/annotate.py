"""Named ranges in a recording: `stepscope.annotate`.

    @stepscope.annotate("rotate")                with stepscope.annotate("rotate"):
    def rotate(x): ...                               ...

    stepscope.annotate.push("rotate"); ...; stepscope.annotate.pop()

Ranges exist only while a recorder runs; otherwise entering one is a look at a flag. Which recorder it is makes no
difference to who annotates: `activate` chooses the one function that opens a range, in PyTorch's profiler or as NVTX.

Inside of compiled code a range does nothing: the question whether we are being compiled comes before any other, so
that `torch.compile` folds the whole range away, and has no guard on our flag that would compile anew once a recorder
starts.

`torch.profiler.record_function` goes through the dispatcher and costs eight times as much as the class used here (17 µs
against 2 µs a range on a 2-core VM), which its own compiler uses. Told that its scope is the user's, it is written as
`user_annotation`, too; the profiler looks at that only where it records shapes, which ours does.
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
    """The ranges that this thread has open, innermost last, each with its owner and with what closes it."""

    def __init__(self) -> None:
        self.ranges: list[tuple[object, Close]] = []


_opened = _Open()


class Range(AbstractContextManager["Range"]):
    """One name. It may be entered any number of times, from any thread, and decorate any number of functions."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a range has a name: stepscope.annotate('name'), not a {type(name).__name__}")
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
    """`stepscope.annotate`: a decorator, a context manager, and a pair of calls."""

    def __call__(self, name: str) -> Range:
        return Range(name)

    def push(self, name: str) -> None:
        """Opens a range in this thread, until `pop`."""
        if not _is_compiling() and _open is not None:
            _opened.ranges.append((self, _open(name)))

    def pop(self) -> None:
        """Closes the range that this thread pushed last. Without one it does nothing: the push may have come before the
        recorder did."""
        if not _is_compiling():
            _close_own(self)


annotate = Annotate()


def wrap(function: Callable[P, R], name: str) -> Callable[P, R]:
    """`function` with a range around each call while a recorder runs."""

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
    """Ranges exist inside of this. For the profiler it stands inside of the profiler's own context: a range that was
    opened before the profiler started cannot be closed in it. Any other recorder gives the function that opens one."""
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
    """For ranges that no `with` can hold: what it returns closes the range."""
    return _open(name) if _open is not None else lambda: None


def _close_own(owner: object) -> None:
    """Closes the innermost range if `owner` opened it: one that was entered before a recorder ran is not there."""
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
