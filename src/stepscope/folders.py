"""Where stepscope keeps what it can make again: read traces, tuned tiles."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """STEPSCOPE_CACHE, or `stepscope` where the system keeps caches. Containers often run as a user without a home, or
    with one that cannot be written: the cache is then in the folder for temporary files."""
    if named := os.environ.get("STEPSCOPE_CACHE"):
        return Path(named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "stepscope"
    try:
        folder = Path.home() / ".cache" / "stepscope"
    except RuntimeError:  # HOME is not set, and the system does not know this user
        return _temporary_folder()
    return folder if _is_writable(folder) else _temporary_folder()


def _is_writable(folder: Path) -> bool:
    """Whether it can be written, or created."""
    while not os.path.exists(folder):  # noqa: PTH110  # where we may not look, Path.exists raises
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary_folder() -> Path:
    """This user's own. One that somebody else has made under its name is not trusted: nothing is kept then."""
    folder = Path(tempfile.gettempdir()) / f"stepscope-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours = folder.lstat().st_uid == os.getuid()
    except OSError:
        is_ours = False
    return folder if is_ours else Path(os.devnull) / "stepscope"
