"""Any file somebody hands us, as a recording: what it is shows in its first bytes, not in its name."""

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
    "a folder of `stepscope profile`, a trace of PyTorch's profiler (.json, .json.gz), an Nsight Systems export "
    "(.sqlite, or .nsys-rep where nsys is installed), `ncu --csv --page raw` output, or a CUDA memory snapshot "
    "(.pickle, .pickle.gz)"
)
_SNIFFED = 1 << 16
_BLANK = b"\xef\xbb\xbf \t\r\n"


def open_recording(path: Path) -> Recording:
    """Raises StepscopeError for what cannot be read, with what was expected."""
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
    raise StepscopeError(f"`{path}` is nothing that can be read", detail=f"expected {_READABLE}")


def require_trace(path: Path) -> None:
    """Refuses whatever is no trace of PyTorch's profiler, as far as its first bytes show."""
    if _first_bytes(path).lstrip(_BLANK)[:1] not in (b"{", b"["):
        raise StepscopeError(f"`{path}` is no trace of PyTorch's profiler", hint="leave out --bounded")


def _first_bytes(path: Path) -> bytes:
    """Undone of compression. Only plain files: a pipe or a device could wait or go on for ever."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise StepscopeError(
                f"the folder `{path}` is no recording",
                detail=f"it has no {store.MANIFEST_NAME}; expected {_READABLE}",
                hint="stepscope explain FOLDER/*.json.gz for the traces inside it",
            )
        if not stat.S_ISREG(mode):
            raise StepscopeError(f"`{path}` is no file", detail=f"expected {_READABLE}")
        with path.open("rb") as file:
            start = file.read(_SNIFFED)
    except FileNotFoundError:
        raise StepscopeError(f"no such file: `{path}`", detail=f"expected {_READABLE}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StepscopeError(f"cannot read `{path}`: {reason}") from None
    if start[:2] != b"\x1f\x8b":
        return start
    try:
        return zlib.decompressobj(31).decompress(start, _SNIFFED)
    except zlib.error as error:
        raise StepscopeError(f"`{path}` begins like gzip and is damaged", detail=str(error)) from None
