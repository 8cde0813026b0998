"""Standard output for results, standard error for messages."""

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
    """A standard stream that survives a closed pipe. If the reader leaves early (`| head`), the rest is discarded and
    the verb finishes normally. A full disk raises StepscopeError if standard error still works."""

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
        # Discard everything from here on, including what Python flushes at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self is sys.stdout and not isinstance(error, BrokenPipeError):
            raise StepscopeError(f"cannot write to standard output: {error.strerror}") from None


def prepare_streams() -> None:
    """Make standard output and standard error robust. Characters that the terminal cannot show are escaped, and
    messages never go to standard output, not even when standard error is closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            kept = {"encoding": stream.encoding, "line_buffering": stream.line_buffering}
            setattr(sys, name, _Output(stream.detach(), errors="backslashreplace", **kept))


def show(text: str) -> None:
    """Write to standard output, with terminal control characters escaped."""
    if sys.stdout is not None:  # None if it was closed before stepscope started
        sys.stdout.write(visible(text))
        sys.stdout.flush()


def show_tables(tables: "Sequence[Table]", format_: Format, *, detail: bool = False) -> None:
    """Print tables one below the other, or as a single JSON document."""
    from stepscope.render.tables import render_all

    show(render_all(tables, format_, detail=detail, width=terminal_width()))


def show_parts(parts: "Iterable[str | Table]", format_: Format) -> None:
    """Print prose and tables in order. In formats other than text, prose goes to standard error."""
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
    """Write a message to standard error. A failure to write it is ignored, so that it never ends a run."""
    with suppress(OSError):
        print(visible(text), file=sys.stderr, flush=True)  # noqa: T201


def terminal_width() -> int | None:
    """The width of the terminal, or None if the output is not one: tables then take the width they need."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


@contextmanager
def if_interrupted(what: str) -> Iterator[None]:
    """Say what Ctrl-C leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {what}")
        raise


@contextmanager
def showing_stages() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current stage, for verbs that do one thing at a time. It prints only on a
    terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("inspecting the device") as status:
        yield status.update
