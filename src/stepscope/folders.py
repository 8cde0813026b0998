"""Where stepscope keeps what it can make again: read traces, tuned tiles."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """STEPSCOPE_CACHE, or `stepscope` where the system keeps caches."""
    if named := os.environ.get("STEPSCOPE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepscope"
