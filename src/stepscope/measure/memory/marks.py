"""Marks the position within a step for a memory recorder: the function that opens a range (`annotate.Opener`).

Steps and phases are marks, numbered in order. A mark is attached to every later event of the allocator's history, and
is an event of zero length in PyTorch's profiler, so that events of both can be placed between two marks.

Modules are ranges in the profiler, and are also tracked by autograd's sequence numbers: a node that runs in the
backward pass carries the number it got in the forward pass, which identifies its module.
"""

import time
from bisect import bisect_right
from collections.abc import Callable

import torch
from torch._C._profiler import _RecordFunctionFast

from stepscope.annotate import Close
from stepscope.recording.memory.labels import Mark

MARK, MODULE = "mark:", "module:"
LOSS = "(loss)"
_USER_SCOPE = {"scope": "user_scope"}


class Places:
    """`on_mark` receives the number of every mark. With `watches_modules`, modules are ranges; otherwise they are
    ignored.
    """

    def __init__(self, on_mark: Callable[[str], None] = lambda _: None) -> None:
        self._on_mark = on_mark
        self.marks: list[Mark] = []
        self.watches_modules = True
        self._modules: list[str] = []
        self._firsts: list[int] = []
        self._paths: list[str | None] = []
        self._phases: list[str] = []

    @property
    def mark(self) -> int:
        return len(self.marks) - 1

    def open(self, name: str) -> Close:
        kind, _, value = name.partition(":")
        if name == "phase:loss" and self.watches_modules:
            # The optimizer's operators have nodes too, and belong to no module.
            close_mark, close_module = self._open_mark(kind, value), self._open_module(LOSS)

            def close() -> None:
                close_module()
                close_mark()

            return close
        if kind in ("step", "phase"):
            return self._open_mark(kind, value)
        if kind == "module" and self.watches_modules:
            return self._open_module(value)
        return _close_nothing

    def find(self, sequence_nr: int) -> str | None:
        """Return the innermost module whose call created the autograd node of that number."""
        index = bisect_right(self._firsts, sequence_nr) - 1
        return self._paths[index] if index >= 0 else None

    def steps(self) -> list[int | None]:
        """Return the step that is open after each mark."""
        opened: int | None = None
        steps: list[int | None] = []
        for mark in self.marks:
            if mark.kind == "step":
                opened = int(mark.value) if mark.opens else None
            steps.append(opened)
        return steps

    def _open_mark(self, kind: str, value: str) -> Close:
        if kind == "phase":
            self._phases.append(value)
        self._add(Mark(opens=True, kind=kind, value=value, time_ns=time.time_ns()))

        def close() -> None:
            if kind == "phase":
                self._phases.pop()
            self._add(Mark(opens=False, kind=kind, value=value, time_ns=time.time_ns()))

        return close

    def _add(self, mark: Mark) -> None:
        self.marks.append(mark)
        self._on_mark(str(self.mark))
        with _RecordFunctionFast(f"{MARK}{self.mark}", (), _USER_SCOPE):
            pass

    def _open_module(self, path: str) -> Close:
        # In the backward pass a checkpointed module runs again: those numbers belong to another thread.
        is_forward = "backward" not in self._phases
        range_ = _RecordFunctionFast(MODULE + path, (), _USER_SCOPE)
        range_.__enter__()
        self._modules.append(path)
        if is_forward:
            self._change()

        def close() -> None:
            range_.__exit__(None, None, None)
            self._modules.pop()
            if is_forward:
                self._change()

        return close

    def _change(self) -> None:
        self._firsts.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self._modules[-1] if self._modules else None)


def _close_nothing() -> None:
    pass
