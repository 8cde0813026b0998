"""Opening a file that somebody named: a file, not whatever else may stand under a name."""

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import StepscopeError


@contextmanager
def open_plain(path: Path, *, what: str) -> Iterator[tuple["io.BufferedReader[io.FileIO]", os.stat_result]]:
    """The file and its state: of the file that was opened, as a name may mean another one a moment later."""
    try:
        with io.BufferedReader(io.FileIO(path, opener=_open_at_once)) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise StepscopeError(f"`{path}` is no file", detail=f"expected {what}")
            yield file, state
    except OSError as error:
        raise StepscopeError(f"cannot read {what}: `{path}`: {error.strerror}") from None


def _open_at_once(path: str, flags: int) -> int:
    """A pipe is refused, not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
