"""What stepscope says while a user's script runs: lines on the standard error that the process started with."""

import os
from contextlib import suppress

PREFIX = "stepscope: "
# As it was at the start: a script may close or redirect it, and another file may then get its number.
try:
    TERMINAL = os.dup(2)
except OSError:  # closed already
    TERMINAL = os.open(os.devnull, os.O_WRONLY)


def tell(text: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        clear = "\r\x1b[K" if os.isatty(TERMINAL) else ""  # a progress bar may be on the line
        os.write(TERMINAL, f"{clear}{PREFIX}{text}\n".encode(errors="replace"))
