"""Load an untrusted pickle without running any code from it.

A pickle is a program: it can name functions and call them. PyTorch writes memory snapshots as pickles of plain lists,
dicts, strings and numbers, which name nothing, so any name is rejected before it is imported. The C unpickler does the
work, because the Python one is more than 10× slower.

A hostile file can still be too large. Eleven bytes can request a table of 64 GiB, and a small gzip file can decompress
to any size, so the load runs with a soft limit on the data of this process, and exceeding it raises MemoryError. The
alternative, counting opcodes first, needs a second pass and the worst case of every opcode.

The garbage collector is off during the load. It would visit millions of dicts again and again and find nothing, since a
snapshot has no cycles: with it, loading takes nearly 3× as long (`bench/snapshot_speed.py --collect`).
"""

import copyreg
import gc
import gzip
import io
import pickle
import resource
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from stepscope.errors import StepscopeError
from stepscope.hardware import available_bytes, read_proc_bytes
from stepscope.units import GIB, with_article

LIMIT_BYTES = 12 << 30  # the most memory that loading may add to this process
_EXPECTED = "expected a file from torch.cuda.memory._dump_snapshot"
_HINT = 'create it again: torch.cuda.memory._dump_snapshot("snapshot.pickle")'
_BUFFER_BYTES = 1 << 20
_HARMLESS_BYTES, _TRIED_BYTES = 16 << 10, 64 << 20  # too small to nest deeply; too large to load twice
_GZIP = b"\x1f\x8b"
_NAME_CHARACTERS = 100  # shown of a name in the file, which may be very long
# What the unpickler raises for bytes that are not a pickle, or an invalid one.
_MALFORMED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that rejects every class, function and external object."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise StepscopeError(
            f"unsafe pickle: `{self._path}` tries to import `{_printable(f'{module_name}.{global_name}')}`",
            detail="a memory snapshot has only lists, dicts, numbers and text, so classes and functions are rejected; "
            f"nothing was run\n{_EXPECTED}",
        )

    def persistent_load(self, _: Any, /) -> NoReturn:
        raise StepscopeError(
            f"unsafe pickle: `{self._path}` refers to an external object",
            detail=f"memory snapshots have none; nothing was run\n{_EXPECTED}",
        )


def load(path: Path) -> dict[str, Any]:
    """Return the dict of a memory snapshot, plain or gzipped. Only the presence of its two lists is checked."""
    _require_survival(path)
    with _opened(path) as file, without_collection(), _bounded():
        content = _unpickled(path, file)
    if type(content) is not dict:
        _refuse_content(path, f"it contains {with_article(type(content).__name__)}")
    for key in ("segments", "device_traces"):
        if type(content.get(key)) is not list:
            _refuse_content(path, f"it has no list `{key}`")
    return content


def _require_survival(path: Path) -> None:
    """Load the file in another process first, since some files crash Python without an exception: hashing a tuple that
    is nested a million levels deep overflows the stack. Large files are not tried: it would take too long."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would block
            return
        with path.open("rb") as file:
            is_small = file.read(2) != _GZIP and found.st_size < _HARMLESS_BYTES
    except OSError:
        return  # the reader reports what is wrong with it
    if is_small or found.st_size > _TRIED_BYTES:
        return
    code = "import sys; from stepscope.recording.memory.snapshot_pickle import try_loading; try_loading(sys.argv[1])"
    tried = subprocess.run([sys.executable, "-P", "-c", code, str(path.absolute())], capture_output=True, check=False)
    if tried.returncode < 0:
        raise StepscopeError(
            f"not a memory snapshot: `{path}`",
            detail="reading it crashes Python: it is nested too deeply",
            hint=_HINT,
        )


def try_loading(path: str) -> None:
    """Load a file in a separate process. Errors are ignored: the caller gets them when it loads the file itself."""
    with suppress(StepscopeError), _opened(Path(path)) as file, without_collection(), _bounded():
        _unpickled(Path(path), file)


def begins_like_pickle(start: bytes) -> bool:
    """Whether a file with these first bytes, decompressed, may be a pickle of a dict."""
    # Protocols 2 and later have a header; protocol 0 starts a dict with a mark, protocol 1 with an empty dict.
    return start[:1] == b"\x80" or start[:3] in (b"(dp", b"(d.") or start[:2] in (b"}q", b"}.", b"}r")


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn the garbage collector off, and restore its state afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unpickled(path: Path, file: BinaryIO) -> object:
    # An extension code that this process resolved earlier would return its object without asking `find_class`.
    copyreg.clear_extension_cache()
    try:
        return _PlainUnpickler(path, file).load()
    except MemoryError:
        raise StepscopeError(
            f"`{path}` does not fit in memory",
            detail=f"reading it needs more than the available {_free_bytes() / GIB:.1f} GiB, or it is damaged",
            hint="record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000)",
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        _refuse_damaged(path, error)
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`: {error.strerror or error}") from None
    except _MALFORMED as error:
        if "truncated" in str(error):  # the unpickler has no separate exception for this
            _refuse_damaged(path, error)
        raise StepscopeError(
            f"not a pickle, or damaged: `{path}`", detail=f"{_printable(str(error))}\n{_EXPECTED}", hint=_HINT
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed. Only regular files: a pipe or a device could never end."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise StepscopeError(f"`{path}` is not a regular file", detail=_EXPECTED)
        raw = path.open("rb", buffering=_BUFFER_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StepscopeError(f"cannot read `{path}`: {reason}", detail=_EXPECTED) from None
    with raw:
        start = raw.read(len(_GZIP))
        raw.seek(0)
        if not start:
            raise StepscopeError(f"`{path}` is empty", detail=_EXPECTED, hint=_HINT)
        if not start.startswith(_GZIP):
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unfolded, io.BufferedReader(unfolded, _BUFFER_BYTES) as buffered:
            yield buffered


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit how much memory this process may add inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = read_proc_bytes("/proc/self/status", "VmData") + _free_bytes()
    for present in (soft, hard):
        if present != resource.RLIM_INFINITY:
            limit = min(limit, present)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _free_bytes() -> int:
    """The memory that loading may add: at most what is available, so that other programs are not affected."""
    return min(LIMIT_BYTES, available_bytes())


def _refuse_damaged(path: Path, error: Exception) -> NoReturn:
    detail = _printable(str(error)) or "it ends early"
    raise StepscopeError(f"`{path}` is damaged or truncated", detail=detail, hint=_HINT) from None


def _refuse_content(path: Path, what: str) -> NoReturn:
    raise StepscopeError(f"`{path}` is a pickle, but not a memory snapshot", detail=f"{what}; {_EXPECTED}", hint=_HINT)


def _printable(text: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in text[:_NAME_CHARACTERS])
    return shown + "…" * (len(text) > _NAME_CHARACTERS)
