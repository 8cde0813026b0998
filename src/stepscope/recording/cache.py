"""A cache of recordings, so that a large file from another tool is parsed once while it is unchanged.

The cache is in `$STEPSCOPE_CACHE`, or in `stepscope` in the user's cache directory. It holds at most `_MOST_BYTES` and
evicts the least recently used recordings. If it cannot be written, the file is parsed again next time.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import stepscope
from stepscope.errors import StepscopeError
from stepscope.files import cache_folder
from stepscope.recording import store
from stepscope.recording.store import Recording

_WORTH_S = 1.0
_MOST_BYTES = 4 << 30
_KEY = re.compile("[0-9a-f]{24}")  # the name of a cache entry


def read_cached(path: Path, read: Callable[[Path], Recording]) -> tuple[Recording, Path | None]:
    """Return the recording of a file, and its cache directory if it is cached."""
    if path.is_dir():
        return read(path), path
    folder = cache_folder() / _key(path)
    if store.is_recording(folder):
        try:
            recording = store.load(folder)
        except StepscopeError:  # from another version, or damaged: parse the file again
            with suppress(OSError):  # another process may delete it too
                store.delete(folder)
        else:
            with suppress(OSError):  # a read-only cache can still be read
                os.utime(folder)
            return recording, folder
    started = time.monotonic()
    recording = read(path)
    if time.monotonic() - started < _WORTH_S:
        return recording, None
    try:
        store.save(recording, folder, force=True)
        _make_room(folder)
    except (StepscopeError, OSError):  # not writable, or another process is evicting
        return recording, None
    return recording, folder


def _key(path: Path) -> str:
    what: list[object] = [str(path)]
    with suppress(OSError):  # the reader reports what is wrong with it
        seen = path.stat()
        what = [str(path.resolve()), seen.st_size, seen.st_mtime_ns, seen.st_ino]
    content = repr((store.SCHEMA, stepscope.__version__, what)).encode()
    return hashlib.sha256(content).hexdigest()[:24]


def _make_room(newest: Path) -> None:
    kept = [folder for folder in newest.parent.iterdir() if _KEY.fullmatch(folder.name) and folder != newest]
    folders = [folder for folder in kept if store.is_recording(folder)]
    room = _MOST_BYTES - store.folder_bytes(newest)
    for folder in sorted(folders, key=lambda one: one.stat().st_mtime, reverse=True):
        room -= store.folder_bytes(folder)
        if room < 0:
            store.delete(folder)
