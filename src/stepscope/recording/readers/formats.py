"""Open any supported file as a recording. The format is recognized by the first bytes, not by the name."""

import shlex
import stat
import zlib
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.recording import store
from stepscope.recording.memory import reader as memory
from stepscope.recording.memory import snapshot_pickle
from stepscope.recording.readers import kineto, ncu, nsys
from stepscope.recording.store import Recording

_READABLE = (
    "a directory from `stepscope profile`, a PyTorch profiler trace (.json, .json.gz), an Nsight Systems export "
    "(.sqlite, or .nsys-rep if nsys is installed), `ncu --csv --page raw` output, or a CUDA memory snapshot "
    "(.pickle, .pickle.gz)"
)
_SNIFFED = 1 << 16
_BLANK = b"\xef\xbb\xbf \t\r\n"


def open_recording(path: Path) -> Recording:
    """Return the recording at `path`. Raise StepscopeError if it cannot be read."""
    if store.is_recording(path):
        return store.load(path)
    start = _first_bytes(path)
    if start.startswith(b"SQLite format 3\0") or path.suffix in nsys.REPORT_ENDINGS:
        return nsys.read(path)
    text = start.lstrip(_BLANK)
    if text[:1] in (b"{", b"["):
        return kineto.read(path)
    if text.startswith(b"==") or b'"Kernel Name"' in text:
        return ncu.read(path)
    if not text:
        raise StepscopeError(f"`{path}` is empty", detail=f"expected {_READABLE}")
    if snapshot_pickle.begins_like_pickle(start) or ".pickle" in path.suffixes:
        return memory.read(path)
    raise StepscopeError(f"unrecognized file format: `{path}`", detail=f"expected {_READABLE}")


def require_trace(path: Path) -> None:
    """Raise StepscopeError unless the first bytes look like a PyTorch profiler trace."""
    if _first_bytes(path).lstrip(_BLANK)[:1] not in (b"{", b"["):
        raise StepscopeError(f"`--bounded` requires a PyTorch profiler trace; got `{path}`", hint="leave out --bounded")


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes, decompressed. Only regular files: a pipe or a device could block or never end."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise StepscopeError(
                f"directory `{path}` is not a recording",
                detail=f"it has no {store.MANIFEST_NAME}; expected {_READABLE}",
                hint=f"to read traces in it: stepscope explain {shlex.quote(str(path))}/*.json.gz",
            )
        if not stat.S_ISREG(mode):
            raise StepscopeError(f"`{path}` is not a regular file", detail=f"expected {_READABLE}")
        with path.open("rb") as file:
            start = file.read(_SNIFFED)
    except FileNotFoundError:
        raise StepscopeError(f"file not found: `{path}`", detail=f"expected {_READABLE}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StepscopeError(f"cannot read `{path}`: {reason}") from None
    if start[:2] != b"\x1f\x8b":
        return start
    try:
        return zlib.decompressobj(31).decompress(start, _SNIFFED)
    except zlib.error as error:
        raise StepscopeError(f"damaged gzip file: `{path}`", detail=str(error)) from None
