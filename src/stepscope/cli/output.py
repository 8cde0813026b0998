"""Where a verb's result goes."""

import os
import shutil
import sys
from contextlib import suppress

from stepscope.errors import Exit, StepscopeError


def show(text: str) -> None:
    """To standard output. A reader that leaves early (`| head`) has seen enough: that is no failure."""
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing more can be written, not even by Python while it closes down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
    except OSError as error:
        raise StepscopeError(f"cannot write to standard output: {error.strerror}") from None


def printable(text: str) -> str:
    """Text with names from somebody's file in it: nothing in it reaches the terminal as a control sequence."""
    return "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)


def say(text: str) -> None:
    """To standard error, beside the result. What cannot be said there must not end what is being done."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def terminal_width() -> int | None:
    """None where the output is not a terminal: tables then take the width they need."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
