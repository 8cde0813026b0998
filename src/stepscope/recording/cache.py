"""Large foreign files are read once: the recording made of one is kept, and found again while the file is unchanged.

Kept under `$STEPSCOPE_CACHE`, or `stepscope` in the user's cache folder, at most `_MOST_BYTES`, the longest unused
going first. A cache that cannot be written costs a second reading and nothing else.
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
_KEY = re.compile("[0-9a-f]{24}")  # what a folder of the cache is called


def read_cached(path: Path, read: Callable[[Path], Recording]) -> tuple[Recording, Path | None]:
    """The recording of a file, and the folder it is kept in, None where it is not."""
    if path.is_dir():
        return read(path), path
    folder = cache_folder() / _key(path)
    if store.is_recording(folder):
        try:
            recording = store.load(folder)
        except StepscopeError:  # written by a version that is gone, or damaged: read the file itself again
            with suppress(OSError):  # another process deletes it too
                store.delete(folder)
        else:
            with suppress(OSError):  # a cache that cannot be written is still read
                os.utime(folder)
            return recording, folder
    started = time.monotonic()
    recording = read(path)
    if time.monotonic() - started < _WORTH_S:
        return recording, None
    try:
        store.save(recording, folder, force=True)
        _make_room(folder)
    except (StepscopeError, OSError):  # not to be written, or somebody else is making room
        return recording, None
    return recording, folder


def _key(path: Path) -> str:
    what: list[object] = [str(path)]
    with suppress(OSError):  # the reader will say what is wrong with it
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
