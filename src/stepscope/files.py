"""Files that somebody names, and the JSON in them, read without surprises.

A name may lead to a pipe that never ends, to a device, or to a document that was damaged on its way here or made to do
damage. So only regular files are opened, at once, and up to a bound, and whatever is wrong with a document of ours is
one kind of error.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.errors import StepscopeError

MOST_BYTES = 1 << 30  # of what is read whole: a sweep writes kilobytes per case

T = TypeVar("T")
File = tuple["io.BufferedReader[io.FileIO]", os.stat_result]


@contextmanager
def open_plain(path: Path, *, what: str) -> Iterator[File]:
    """The file and its state: of the file that was opened, as a name may mean another one a moment later."""
    try:
        with _open(path) as opened:
            yield opened
    except OSError as error:
        raise StepscopeError(f"cannot read {what}: `{path}`: {error.strerror}") from None


def read_plain(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """All of a regular file. Raises OSError, as `Path.read_bytes` does, for anything else and beyond the bound."""
    with _open(path) as (file, state):
        if state.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB")
        return file.read()


def decode(content: bytes, kind: type[T]) -> T:
    """A JSON document as a `kind`. Raises msgspec.DecodeError, with the place, for whatever is wrong with it; a
    ValidationError unless it might only be cut short."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError(f"not UTF-8: {error.reason} at byte {error.start} of a text") from None
    except RecursionError:
        raise msgspec.ValidationError("nested too deeply") from None


@contextmanager
def _open(path: Path) -> Iterator[File]:
    with io.BufferedReader(io.FileIO(path, opener=_open_at_once)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file, state


def _open_at_once(path: str, flags: int) -> int:
    """A pipe is refused, not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
