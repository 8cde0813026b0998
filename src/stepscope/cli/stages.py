"""What is being done right now, for verbs that do one thing at a time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def showing_stages() -> Iterator[Callable[[str], None]]:
    """On a terminal and only there."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("looking at the device") as status:
        yield status.update
