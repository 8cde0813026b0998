"""Where a verb's result goes."""

import os
import sys

from stepscope.errors import Exit


def show(text: str) -> None:
    """To standard output. A reader that leaves early (`| head`) has seen enough: that is no failure."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing more can be written, not even by Python while it closes down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
