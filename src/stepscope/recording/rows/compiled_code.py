"""Compiled code: the kernels that it calls, in order, and the modules that they come from.

It is noted while code is generated (`measure.compiled_code`), in a process that does not load the readers, and joined
to a trace afterwards (`recording.compiled_code`).
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

LOSS_MODULE = "(loss)"  # not a module, but computed by compiled code as well
_FILE_NAME = "compiled_code.json"
_OPERATOR = re.compile(r"^torch\.ops\.(\w+)\.(\w+)(\.\w+)?$")
_LIBRARY = re.compile(r"^(?:extern_kernels|aten)\.(\w+)$")


class CompiledCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of a kernel, or of an operator of a library, as the generated code names it."""

    kernel: str
    module: str | None

    @property
    def operator(self) -> str:
        """The name that the profiler gives to the call."""
        if found := _OPERATOR.match(self.kernel):
            return f"{found[1]}::{found[2]}"
        found = _LIBRARY.match(self.kernel)
        return f"aten::{found[1]}" if found else self.kernel


class CompiledGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one compiled function. The profiler writes `key`, that of the compiler's cache, to its trace."""

    is_backward: bool
    key: str | None = None
    calls: tuple[CompiledCall, ...]


def save_graphs(folder: Path, graphs: Sequence[CompiledGraph]) -> None:
    """Write the graphs next to the trace of a recorder."""
    (folder / _FILE_NAME).write_bytes(msgspec.json.encode(graphs))


def load_graphs(folder: Path) -> tuple[CompiledGraph, ...]:
    """The graphs next to a trace; none if its recorder does not note them."""
    path = folder / _FILE_NAME
    return msgspec.json.decode(path.read_bytes(), type=tuple[CompiledGraph, ...]) if path.exists() else ()
