"""A pickle from somebody else, taken apart without ever running what it says.

A pickle is a programme: it names functions and calls them. PyTorch writes its memory snapshots as pickles of plain
lists, dicts, strings and numbers, which name nothing, so whatever does is refused before it is even imported. The C
unpickler stays underneath, because the one in Python takes more than ten times as long.

What is left to a hostile file is size. Eleven bytes can ask for a table of 64 GiB, and a small gzip can unfold into
anything, so the load runs under a soft limit on the data of this process, and Python's own MemoryError is the answer.
Counting the opcodes beforehand was the other way: it costs a second reading, and must know each opcode's worst case.

The garbage collector is off meanwhile. It visits millions of dicts over and over and finds nothing, for a snapshot has
no cycles: with it on, a load takes nearly three times as long (`bench/snapshot_speed.py --collect`).
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
from stepscope.units import GIB

LIMIT_BYTES = 12 << 30  # that a load may add to this process at most
_EXPECTED = "expected what torch.cuda.memory._dump_snapshot writes"
_HINT = 'write it again: torch.cuda.memory._dump_snapshot("snapshot.pickle")'
_BUFFER_BYTES = 1 << 20
_HARMLESS_BYTES, _TRIED_BYTES = 16 << 10, 64 << 20  # so few levels do no harm; so much takes long
_GZIP = b"\x1f\x8b"
_NAME_CHARACTERS = 100  # of whatever a file names; it may be as long as the file
# Whatever the unpickler makes of bytes that are no pickle, or that combine what cannot be combined.
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
    """An unpickler that knows no class, no function and no object outside of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise StepscopeError(
            f"`{self._path}` wants to call `{_printable(f'{module_name}.{global_name}')}`",
            detail=f"a memory snapshot has plain lists, numbers and text alone, so that no class or function at all is "
            f"admitted; nothing was run\n{_EXPECTED}",
        )

    def persistent_load(self, _: Any, /) -> NoReturn:
        raise StepscopeError(
            f"`{self._path}` refers to an object outside of itself",
            detail=f"none is admitted in a memory snapshot; nothing was run\n{_EXPECTED}",
        )


def load(path: Path) -> dict[str, Any]:
    """The dict of a memory snapshot, plain or gzipped, with its two lists in place and nothing else checked."""
    _require_survival(path)
    with _opened(path) as file, without_collection(), _bounded():
        content = _unpickled(path, file)
    if type(content) is not dict:
        _refuse_content(path, f"it holds a {type(content).__name__}")
    for key in ("segments", "device_traces"):
        if type(content.get(key)) is not list:
            _refuse_content(path, f"it has no list `{key}`")
    return content


def _require_survival(path: Path) -> None:
    """Python itself dies of some files, without an exception: to hash a tuple a million deep takes more stack than
    there is. A small file is first loaded by another process; a large one would take too long twice."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would wait for ever
            return
        with path.open("rb") as file:
            is_small = file.read(2) != _GZIP and found.st_size < _HARMLESS_BYTES
    except OSError:
        return  # the reader will say what is wrong with it
    if is_small or found.st_size > _TRIED_BYTES:
        return
    code = "import sys; from stepscope.recording.memory.snapshot_pickle import try_loading; try_loading(sys.argv[1])"
    tried = subprocess.run([sys.executable, "-P", "-c", code, str(path.absolute())], capture_output=True, check=False)
    if tried.returncode < 0:
        raise StepscopeError(
            f"`{path}` is no memory snapshot",
            detail="reading it breaks Python itself: it is nested too deep",
            hint=_HINT,
        )


def try_loading(path: str) -> None:
    """In a process of its own: errors are for the one that asked, which meets them again."""
    with suppress(StepscopeError), _opened(Path(path)) as file, without_collection(), _bounded():
        _unpickled(Path(path), file)


def begins_like_pickle(start: bytes) -> bool:
    """Whether a file that begins with these bytes, undone of compression, may be a pickle of a dict."""
    # Protocol 2 and later say so; protocol 0 opens a dict with a mark, protocol 1 with the empty dict.
    return start[:1] == b"\x80" or start[:3] in (b"(dp", b"(d.") or start[:2] in (b"}q", b"}.", b"}r")


@contextmanager
def without_collection() -> Iterator[None]:
    """The garbage collector off, and as it was afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unpickled(path: Path, file: BinaryIO) -> object:
    # An object that somebody's extension code stood for earlier in this process would be handed out unasked.
    copyreg.clear_extension_cache()
    try:
        return _PlainUnpickler(path, file).load()
    except MemoryError:
        raise StepscopeError(
            f"`{path}` does not fit into memory",
            detail=f"reading it takes more than the {_free_bytes() / GIB:.1f} GiB there are for it, or it is damaged",
            hint="record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000)",
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        _refuse_damaged(path, error)
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`: {error.strerror or error}") from None
    except _MALFORMED as error:
        if "truncated" in str(error):  # the unpickler's word for it, without an exception of its own
            _refuse_damaged(path, error)
        raise StepscopeError(
            f"`{path}` is no pickle, or a damaged one", detail=f"{_printable(str(error))}\n{_EXPECTED}", hint=_HINT
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes, undone of compression. Only a plain file: a pipe or a device could go on for ever."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise StepscopeError(f"`{path}` is no file", detail=_EXPECTED)
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
    """Lets the data of this process grow by so much and no further, for as long as it is entered."""
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
    """What a load may add: beyond what the machine has to spare, other programmes would pay for it."""
    return min(LIMIT_BYTES, available_bytes())


def _refuse_damaged(path: Path, error: Exception) -> NoReturn:
    detail = _printable(str(error)) or "it ends too early"
    raise StepscopeError(f"`{path}` is damaged or was cut short", detail=detail, hint=_HINT) from None


def _refuse_content(path: Path, what: str) -> NoReturn:
    raise StepscopeError(f"`{path}` is a pickle, but no memory snapshot", detail=f"{what}; {_EXPECTED}", hint=_HINT)


def _printable(text: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in text[:_NAME_CHARACTERS])
    return shown + "…" * (len(text) > _NAME_CHARACTERS)
