"""Where a verb's result goes."""

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError
from stepscope.render.formats import Format, visible

if TYPE_CHECKING:
    from stepscope.findings import Table


class _Output(io.TextIOWrapper):
    """A standard stream. A reader that leaves early (`| head`) has seen enough: the rest goes
    nowhere, and the verb ends as it would have. A full disk is an error, if there is somebody to tell."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._end(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        # Nothing more can be written, not even by Python while it closes down.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self is sys.stdout and not isinstance(error, BrokenPipeError):
            raise StepscopeError(f"cannot write to standard output: {error.strerror}") from None


def prepare_streams() -> None:
    """Makes standard output and standard error end well. Names and signs that a terminal cannot show are no reason to
    fail, and messages do not go to standard output where standard error is closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            kept = {"encoding": stream.encoding, "line_buffering": stream.line_buffering}
            setattr(sys, name, _Output(stream.detach(), errors="backslashreplace", **kept))


def show(text: str) -> None:
    """To standard output, with nothing in it that a terminal would obey."""
    if sys.stdout is not None:  # it was closed before we started
        sys.stdout.write(visible(text))
        sys.stdout.flush()


def show_tables(tables: "Sequence[Table]", format_: Format, *, detail: bool = False) -> None:
    """Tables below each other; one document in JSON."""
    from stepscope.render.tables import render_all

    show(render_all(tables, format_, detail=detail, width=terminal_width()))


def show_parts(parts: "Iterable[str | Table]", format_: Format) -> None:
    """Prose and tables as they are read. Prose does not belong in a table's file, and goes to standard error."""
    if format_ is Format.TEXT:
        for part in parts:
            if isinstance(part, str):
                show(part)
            else:
                show_tables([part], format_)
        return
    tables = []
    for part in parts:
        if not isinstance(part, str):
            tables.append(part)
        elif part.strip():
            say(part.strip())
    show_tables(tables, format_)


def say(text: str) -> None:
    """To standard error, beside the result. What cannot be said there must not end what is being done."""
    with suppress(OSError):
        print(visible(text), file=sys.stderr, flush=True)  # noqa: T201


def terminal_width() -> int | None:
    """None where the output is not a terminal: tables then take the width they need."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


@contextmanager
def showing_stages() -> Iterator[Callable[[str], None]]:
    """What is being done right now, for verbs that do one thing at a time: on a terminal, and only there."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("looking at the device") as status:
        yield status.update
