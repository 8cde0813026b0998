"""Marks in a profiler's recording: which line of the user's code runs.

Python stacks know the line of every call, but arithmetic (`x @ w`, `x[i]`, `a + b`) is not a call, so they lack its
line. Python's tracing function sees every line. Each line of the user's own files becomes an event of zero length, and
operators belong to the last one before them. This costs microseconds per line, in the one step that is recorded for its
lines and not for its times.
"""

import sys
from types import FrameType, TracebackType
from typing import Any, Self

from torch._C._profiler import _RecordFunctionFast

from stepscope.loop.source_lines import MARK, classify_file, shorten_path

_USER_SCOPE = {"scope": "user_scope"}


class LineMarks:
    """Marks lines that run in this thread within the context. A debugger, or a coverage tool, may already use Python's
    tracing function; then nothing is marked."""

    def __init__(self) -> None:
        self._traced: list[tuple[FrameType, Any]] = []
        self._is_on = False

    def __enter__(self) -> Self:
        if sys.gettrace() is not None:
            return self
        self._is_on = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_users(frame):
                self._traced.append((frame, frame.f_trace))
                frame.f_trace = self._trace_lines
            frame = frame.f_back
        sys.settrace(self._trace_call)
        if self._traced:
            _mark(self._traced[0][0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_on:
            return
        sys.settrace(None)
        for frame, before in self._traced:
            frame.f_trace = before
        self._traced.clear()

    def _trace_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._trace_lines if _is_users(frame) else None

    def _trace_lines(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            _mark(frame)
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not _is_users(caller):
                caller = caller.f_back
            if caller is not None:
                _mark(caller)  # its line goes on
        return self._trace_lines


def _is_users(frame: FrameType) -> bool:
    return classify_file(frame.f_code.co_filename) == "user"


def _mark(frame: FrameType) -> None:
    with _RecordFunctionFast(f"{MARK}{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno}", (), _USER_SCOPE):
        pass
