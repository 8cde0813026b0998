"""Files and directories: safe reads, atomic writes, and no overwriting of files that stepscope did not write.

- Reading: `open_plain`, `read_plain` and `decode`. A path may be a pipe that never ends, a device, or a damaged or
  malicious document.
- Writing: `replacing` and `write_atomically`. If the process is killed, the old version or the new one is on disk.
- Ownership: `is_ours` recognizes figures, pages and traces by their generator note; `read_schema` and `claim`
  recognize data.
- Overwriting: `check_target` and `find_foreign`.
- Caching: `cache_folder`.

Work in progress is in a scratch directory. A lock file in it marks it as stepscope's, names its host, and stays locked
while its process lives. If it is not locked, its process was killed. The next process on that host that writes to the
same place removes the directory and restores whatever had been moved out of the way. Unlike a process id, a lock works
across the containers of one machine. It may not work between machines, because some network file systems keep locks
local. So scratch directories of other hosts are left alone, and so are all of them if the file system has no locks.
"""

import errno
import fcntl
import gzip
import io
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope import __version__
from stepscope.errors import StepscopeError

MOST_BYTES = 1 << 30  # for files that are read whole; a sweep writes kilobytes per case

# A number that may not fit in 64 bits. It may also be part of a string.
_LONG_NUMBER = re.compile(rb"\d{19}")
_WHOLE_NUMBERS = range(-(2**63), 2**63)

T = TypeVar("T")
File = tuple["io.BufferedReader[io.FileIO]", os.stat_result]

_SCRATCH = ".stepscope-scratch"
_SCRATCH_NAME = re.compile(rf"\..*\.\w{{8}}{re.escape(_SCRATCH)}", re.DOTALL)
_SCRATCH_NAME_BYTES = 100  # of the target's name, in the name of a scratch directory: file names have at most 255
_LOCK_NAME = ".stepscope-lock"  # in a scratch directory: created first and removed last
_LOCK_SCHEMA = "stepscope.scratch/1"
_HOST = os.uname().nodename
_NEW, _OLD = "new", "old"  # in a scratch directory: the new version, and the old one that it replaces
MARKER_NAME = ".stepscope"  # in every directory that stepscope creates
_HINT = "--out DIR"
_NO_LOCKS, _NO_SYNC = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP), (errno.EACCES, errno.EINVAL)
_LARGEST_DOCUMENT = 64 << 20  # bytes to read when looking for the schema of a document

GENERATOR = f"stepscope {__version__}"
PERFETTO_MARK = b'"stepscope":"a picture"'
_PNG, _PNG_HEADER_BYTES = b"\x89PNG\r\n\x1a\n", 33  # the signature, and its length with the mandatory first chunk
_LOOKED_AT = 2048  # bytes at either end of a file in which to look for the generator note


class Versioned(msgspec.Struct, kw_only=True):
    """The schema of a document, decoded before anything else; empty if it has none."""

    schema: str = ""


class _Result(Versioned, kw_only=True):
    command: str


class _Lock(Versioned, kw_only=True):
    """The content of a scratch directory's lock: its host, and the name that `replacing` works on next to it, if
    any."""

    host: str
    target: bytes


# --- Reading ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_plain(path: Path, *, what: str) -> Iterator[File]:
    """Yield the open file and its state, which is that of the opened file even if the path is replaced meanwhile."""
    try:
        with _open(path) as opened:
            yield opened
    except OSError as error:
        raise StepscopeError(f"cannot read {what}: `{path}`: {error.strerror}") from None


def read_plain(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole regular file. Raises OSError for anything else, or if it is larger than `most_bytes`."""
    with _open(path) as (file, state):
        content = _read_start(file, state, most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB")
    return content


def decode(content: bytes, kind: type[T]) -> T:
    """Decode a JSON document as a `kind`. Raises msgspec.DecodeError with the position of the problem, or its subclass
    ValidationError if the document cannot just be truncated."""
    try:
        decoded = msgspec.json.decode(content, type=kind)
        if _LONG_NUMBER.search(content):
            _require_64_bits(msgspec.json.decode(content))
        return decoded
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError(f"not UTF-8: {error.reason} at byte {error.start} of a string") from None
    except RecursionError:
        raise msgspec.ValidationError("nested too deeply") from None


def decode_as(content: bytes, kind: type[T], schema: str) -> T:
    """Like `decode`, and a ValidationError if the document's schema is not `schema`."""
    if decode(content, Versioned).schema != schema:
        raise msgspec.ValidationError(f"its schema is not `{schema}`")
    return decode(content, kind)


def read_document(path: Path, kind: type[T], *, refusal: str, hint: str) -> T | None:
    """Read a JSON document of stepscope; None if it does not exist. `refusal` starts the message if it cannot be
    read."""
    try:
        return decode(read_plain(path), kind)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise StepscopeError(f"`{path.parent}` is not a directory", hint="give a directory, not a file") from None
    except (OSError, msgspec.DecodeError) as error:
        raise StepscopeError(f"{refusal} `{path}`", detail=str(error), hint=hint) from None


def _require_64_bits(value: object) -> None:
    """Raise ValidationError for integers that tables and floats cannot hold. No measurement needs them."""
    if isinstance(value, int) and value not in _WHOLE_NUMBERS:
        raise msgspec.ValidationError("an integer that does not fit in 64 bits")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_64_bits(one)


@contextmanager
def _open(path: Path) -> Iterator[File]:
    with io.BufferedReader(io.FileIO(path, opener=_open_at_once)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file, state


def _read_start(file: "io.BufferedReader[io.FileIO]", state: os.stat_result, most_bytes: int) -> bytes:
    """Read up to `most_bytes`. A file may be longer than its size says: it may be growing, or a kernel file of size 0.
    A read that would block returns None and counts as the end."""
    content = file.read(min(state.st_size + 1, most_bytes)) or b""
    if len(content) > state.st_size:
        content += file.read(most_bytes - len(content)) or b""
    return content


def _read_document(path: Path) -> bytes:
    with _open(path) as (file, state):
        return _read_start(file, state, _LARGEST_DOCUMENT)


def _open_at_once(path: str, flags: int) -> int:
    """Open without blocking, so that a pipe is an error instead of a wait."""
    return os.open(path, flags | os.O_NONBLOCK)


# --- Writing ----------------------------------------------------------------------------------------------------------


class FullDiskError(StepscopeError):
    """The disk, or the user's quota on it, is full: nothing else can be written there either."""


@contextmanager
def writing(
    path: Path,
    *,
    if_full: str = "rows already written are intact; free some space and run the same command again to resume",
    hint: str = _HINT,
) -> Iterator[None]:
    """Turn an OSError while writing to `path` into a StepscopeError that says what to do."""
    try:
        yield
    except OSError as error:
        said = f"cannot write to `{path}`: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullDiskError(said, detail=if_full, hint=hint) from None
        raise StepscopeError(said, hint=hint) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that readers see the old content or the new one. The new content is on disk when this
    returns."""
    with replacing(path) as new, new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        _sync_folder(Path(os.path.realpath(path)).parent)
    except OSError as error:  # the directory is writable but not readable, or cannot be synced on this file system
        if error.errno not in _NO_SYNC:
            raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, *, last: str = "") -> Iterator[Path]:
    """Yield the path at which to write a file or directory that replaces `path` when the block ends without an error.
    Until then, and after an error or a kill, `path` is unchanged. A symbolic link is followed: its target is replaced
    and the link stays. An empty directory is filled, with the file called `last` coming last."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(place.parent, place.name, target=place.name) as scratch:
        yield scratch / _NEW
        _put_in_place(scratch / _NEW, place, last)


def restore(path: Path) -> None:
    """Move back a directory that a killed process had moved out of the way and not yet replaced."""
    with suppress(OSError, ValueError):  # unreadable, or not a valid file name
        if not path.exists():
            _remove_abandoned(Path(os.path.realpath(path)).parent)


def _put_in_place(new: Path, place: Path, last: str) -> None:
    """Move `new` to `place`. A directory cannot replace one that has files, so the old one is moved aside first and
    removed last. An empty directory is filled, because it may be some shell's working directory. Permissions are
    kept."""
    if os.path.lexists(place):
        _require_replaceable(place)
        mode = stat.S_IMODE(place.stat().st_mode)
        if stat.S_IMODE(new.stat().st_mode) != mode:
            new.chmod(mode)
    if not new.is_dir() or not place.is_dir():
        new.replace(place)
    elif any(place.iterdir()):
        place.rename(new.with_name(_OLD))
        new.rename(place)
    else:
        for child in sorted(new.iterdir(), key=lambda one: (one.name == last, one.name)):
            child.rename(place / child.name)


def _require_replaceable(place: Path) -> None:
    if not place.is_file() and not place.is_dir():
        raise OSError(errno.EINVAL, "exists and is not a regular file")


@contextmanager
def scratch_folder(parent: Path | None = None, name: str = "stepscope", *, target: str = "") -> Iterator[Path]:
    """Yield a private directory inside `parent`, or inside the system's temporary directory. It is removed when the
    block ends. If the process is killed, the next process on this host that asks for one in the same parent removes it.
    `target` is for `replacing`: the name of what is moved out of the way."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, descriptor = _make_locked(parent, name, target)
    try:
        yield folder
    finally:
        is_empty = _discard(folder, target)
        os.close(descriptor)  # first: on NFS, removing an open file leaves a file behind in the directory
        if is_empty:
            _remove_empty(folder)


def _make_locked(parent: Path, name: str, target: str) -> tuple[Path, int]:
    """Create and lock a scratch directory. Retries if a process that removes abandoned ones was faster."""
    content = msgspec.json.encode(_Lock(schema=_LOCK_SCHEMA, host=_HOST, target=os.fsencode(target)))
    short = os.fsencode(name)[:_SCRATCH_NAME_BYTES].decode(errors="ignore")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{short}.", suffix=_SCRATCH, dir=parent))
        with suppress(FileNotFoundError, BlockingIOError):
            return folder, _lock_new(folder / _LOCK_NAME, content)


def _lock_new(path: Path, content: bytes) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try_lock(descriptor)
        os.write(descriptor, content)
    except BaseException:
        os.close(descriptor)
        _remove_empty(path.parent)
        raise
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    if not os.access(parent, os.R_OK):  # writable but not readable: another process has to clean up
        return
    for folder in [one for one in parent.iterdir() if _SCRATCH_NAME.fullmatch(one.name)]:
        with suppress(OSError):  # already gone, in use (BlockingIOError), or another user's
            state = folder.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a scratch directory whose process was killed. One without a lock file is removed only if it is empty."""
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        folder.rmdir()
        return
    try:
        lock = _read_lock(descriptor) if try_lock(descriptor) else None
        is_empty = lock is not None and lock.host == _HOST and _discard(folder, os.fsdecode(lock.target))
    finally:
        os.close(descriptor)
    if is_empty:
        _remove_empty(folder)


def _read_lock(descriptor: int) -> _Lock | None:
    """The content of a lock file, or None if it is not one of stepscope's or not yet written."""
    try:
        lock = decode(os.pread(descriptor, _LOOKED_AT, 0), _Lock)
    except (OSError, msgspec.DecodeError):
        return None
    is_name = not set(b"/\0") & set(lock.target)
    return lock if lock.schema == _LOCK_SCHEMA and is_name else None


def _discard(scratch: Path, target: str) -> bool:
    """Delete everything but the lock, and return whether only the lock is left. A directory that had been moved out of
    the way and was never replaced is moved back first; if that is impossible, nothing is deleted."""
    old, new, place = scratch / _OLD, scratch / _NEW, scratch.parent / target
    with suppress(OSError):
        if target and old.exists() and new.exists():
            if os.path.lexists(place):
                return False
            old.rename(place)
        for child in scratch.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != _LOCK_NAME:
                child.unlink()
        return _names_in(scratch) == {_LOCK_NAME}
    return False


def _remove_empty(scratch: Path) -> None:
    with suppress(OSError):  # another process is already removing it
        (scratch / _LOCK_NAME).unlink(missing_ok=True)
        scratch.rmdir()


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _is_scratch(path: Path) -> bool:
    """Whether this is a scratch directory of stepscope, on any host, or was one a moment ago. An empty one is about to
    get its lock."""
    if _SCRATCH_NAME.fullmatch(path.name) is None or path.is_symlink():
        return False
    inside: set[str] = set()
    try:
        inside = _names_in(path)
        if inside <= {_LOCK_NAME}:
            return True
        with _open(path / _LOCK_NAME) as (file, _):
            return _read_lock(file.fileno()) is not None
    except FileNotFoundError:
        return not inside or _LOCK_NAME in inside
    except OSError:
        return False


def try_lock(descriptor: int) -> bool:
    """Take the lock without waiting; BlockingIOError if another process has it. Returns False on network file systems
    without locks, where users must run one command per directory."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def lock_or_raise(descriptor: int, refusal: StepscopeError) -> None:
    """Take the lock, or raise `refusal` if another process has it."""
    try:
        try_lock(descriptor)
    except BlockingIOError:
        raise refusal from None


@contextmanager
def locked(folder: Path, refusal: StepscopeError, *, name: str = "") -> Iterator[None]:
    """Hold the lock of `folder`, or of the file `name` in it. Creates the directory if necessary."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644) if name else os.open(folder, os.O_RDONLY)
    try:
        with writing(folder):
            lock_or_raise(descriptor, refusal)
        yield
    finally:
        os.close(descriptor)


# --- Ownership --------------------------------------------------------------------------------------------------------


def stamp(content: bytes, suffix: str) -> bytes:
    """Add a generator note to a figure, by which `is_ours` recognizes it. Pages (`.html`) already have one."""
    match suffix:
        case ".png":
            chunk = b"tEXtSoftware\0" + GENERATOR.encode()
            packed = (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
            return content[:_PNG_HEADER_BYTES] + packed + content[_PNG_HEADER_BYTES:]
        case ".svg":
            return content.rstrip() + f"\n<!-- Generator: {GENERATOR} -->\n".encode()
        case ".pdf":  # before the pointer to the offset table, so that no offset changes
            head, pointer, tail = content.rpartition(b"startxref")
            return head + f"% Generator: {GENERATOR}\n".encode() + pointer + tail
        case _:
            return content


def is_ours(path: Path) -> bool:
    """Whether a file is a figure, page or Perfetto trace that stepscope wrote, by its generator note."""
    try:
        with _open(path) as (file, state):
            head = file.read(_LOOKED_AT) or b""
            file.seek(max(0, state.st_size - _LOOKED_AT))
            tail = file.read(_LOOKED_AT) or b""
            if head.startswith(b"\x1f\x8b"):
                file.seek(0)
                with gzip.GzipFile(fileobj=file) as unpacked:
                    head = unpacked.read(_LOOKED_AT)
    except (OSError, EOFError, ValueError, zlib.error):
        return False
    marks = (
        (_PNG, rb"tEXtSoftware\0stepscope \d", head),
        (b"<svg", rb"<!-- Generator: stepscope \d", tail),
        (b"%PDF-", rb"% Generator: stepscope \d", tail),
        (b"<!DOCTYPE html>", rb'<meta name="generator" content="stepscope \d', head),
        (b"{", re.escape(PERFETTO_MARK), head),
    )
    return any(head.startswith(start) and re.search(mark, where) for start, mark, where in marks)


def read_schema(path: Path) -> str:
    """The schema of a JSON document, or of the first of JSON lines; empty if there is none."""
    try:
        content = _read_document(path)
    except (OSError, ValueError):  # unreadable, or not a valid file name
        return ""
    for text in (content, content.partition(b"\n")[0]):
        with suppress(msgspec.DecodeError):
            return decode(text, Versioned).schema
    return ""


def is_of_kind(path: Path, schema: str) -> bool:
    """Whether a document has this schema, in any version."""
    return read_schema(path).partition("/")[0] == schema.partition("/")[0]


def is_result_of(path: Path, command: str) -> bool:
    """Whether this document is the result of `command`; `--force` is ignored in the comparison."""
    try:
        found = decode(_read_document(path), _Result)
    except (OSError, msgspec.DecodeError):
        return False
    return found.schema.startswith("stepscope.") and _without_force(found.command) == _without_force(command)


def _without_force(command: str) -> list[str]:
    return [word for word in command.split() if word != "--force"]


def claim(folder: Path, schema: str, *, knows: Callable[[Path], bool] = lambda _: False, hint: str = _HINT) -> None:
    """Mark `folder` as stepscope's, for data of `schema`, unless it has a marker or `knows` it. Several processes may
    claim the same directory at once. Raises StepscopeError like `require_own`, without changing anything."""
    require_own(folder, schema, knows=knows, hint=hint)
    if not is_of_kind(folder / MARKER_NAME, schema) and not knows(folder):
        with writing(folder, hint=hint):
            write_atomically(folder / MARKER_NAME, msgspec.json.encode(Versioned(schema=schema)) + b"\n")


def require_own(
    folder: Path, schema: str, *, knows: Callable[[Path], bool] = lambda _: False, hint: str = _HINT
) -> None:
    """Raise StepscopeError unless `folder` is new, empty, marked for data of `schema`, or recognized by `knows`, which
    handles directories that earlier versions wrote without a marker."""
    if folder.exists() and not folder.is_dir():
        raise StepscopeError(f"`{folder}` is not a directory", hint=hint)
    with writing(folder, hint=hint):
        foreign = find_foreign(folder, lambda _: False) if folder.is_dir() else None
    # In this order: if another process claims it in between, the second check sees the marker.
    if foreign is not None and not is_of_kind(folder / MARKER_NAME, schema) and not knows(folder):
        raise StepscopeError(
            f"`{folder}` contains files that stepscope did not create: `{foreign}`",
            detail="nothing was changed",
            hint=f"use a new or empty directory: {hint}",
        )


# --- Overwriting ------------------------------------------------------------------------------------------------------


def check_target(path: Path, *, force: bool, flag: str, command: str | None = None) -> None:
    """Raise StepscopeError, before anything runs, for a file that could not or should not be written afterwards.
    `force` overwrites any regular file. Without it, only a figure or page by stepscope is overwritten, or, if `command`
    is given, a result of the same command."""
    if path.is_dir():
        raise StepscopeError(f"`{path}` is a directory", detail="expected a file name", hint=f"{flag} FILE")
    if path.exists() and not path.is_file():
        raise StepscopeError(
            f"`{path}` exists and is not a regular file", detail="expected a file name", hint=f"{flag} FILE"
        )
    require_parent(path)
    if path.exists() and not force and not (is_ours(path) if command is None else is_result_of(path, command)):
        detail = "stepscope did not write it" if command is None else "another command wrote it"
        raise StepscopeError(
            f"`{path}` already exists", detail=detail, hint=f"--force to overwrite it, or another name: {flag} FILE"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        code = errno.EROFS if os.statvfs(path.parent).f_flag & os.ST_RDONLY else errno.EACCES
        raise StepscopeError(f"cannot write to `{path.parent}`: {os.strerror(code)}", hint=f"{flag} FILE")


def require_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise StepscopeError(f"directory not found: `{path.parent}`", hint=f"mkdir -p {path.parent}")


def find_foreign(folder: Path, is_own: Callable[[str], bool]) -> str | None:
    """The relative path of the first entry in a directory that stepscope did not write, or None. `is_own` decides by
    path; directories end with a slash. Symbolic links are always foreign, and scratch directories never are."""
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(folder).as_posix()
            if _is_scratch(path):
                continue
            if path.is_symlink() or not is_own(f"{name}/" if path.is_dir() else name):
                return name
            if path.is_dir():
                waiting.append(path)
    return None


# --- Cache: decoded traces, tuned tiles -------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The cache directory: STEPSCOPE_CACHE, or `stepscope` in the user's cache directory. Containers often run as a
    user without a writable home; the cache is then in the temporary directory."""
    if named := os.environ.get("STEPSCOPE_CACHE"):
        return Path(named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "stepscope"
    try:
        folder = Path.home() / ".cache" / "stepscope"
    except RuntimeError:  # HOME is not set and the user is not in the password database
        return _temporary_folder()
    return folder if _is_writable(folder) else _temporary_folder()


def _is_writable(folder: Path) -> bool:
    """Whether the directory can be written to, or created."""
    while not os.path.exists(folder):  # noqa: PTH110  # Path.exists raises without permission
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary_folder() -> Path:
    """This user's temporary directory. If another user owns it, nothing is cached."""
    folder = Path(tempfile.gettempdir()) / f"stepscope-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours = folder.lstat().st_uid == os.getuid()
    except OSError:
        is_ours = False
    return folder if is_ours else Path(os.devnull) / "stepscope"
