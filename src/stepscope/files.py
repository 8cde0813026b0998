"""Files and folders on disk: read without surprises, written whole or not at all, and nothing of anybody else's lost.

Five questions are answered here and nowhere else. How is a file read that somebody names: `open_plain`, `read_plain`
and `decode`, because a name may lead to a pipe that never ends, to a device, or to a document that was damaged or made
to do damage. How is something written so that a kill leaves the old version or the new one: `replacing`,
`write_atomically`. Whose is it: `is_ours` for figures, pages and traces, by what they say of themselves; `read_schema`
and `claim` for data. May it be replaced: `check_target`, `find_foreign`. And where is kept what can be made again:
`cache_folder`.

What is being made lies in a scratch folder. A file in it marks it as ours, says which host it belongs to, and is locked
as long as its process lives. One that nobody has locked was left by a process that was killed. The next process on that
host that writes to the same place removes it, and moves back what had been moved out of the way. A lock, unlike a
process id, holds across the containers of one machine. Between machines it may not: some network file systems keep a
lock to the machine that took it. So scratch folders of other hosts are left alone, and so are all where the file system
has no locks.
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

MOST_BYTES = 1 << 30  # of what is read whole: a sweep writes kilobytes per case

# A number that may be too long for 64 bits, unless it stands in a text.
_LONG_NUMBER = re.compile(rb"\d{19}")
_WHOLE_NUMBERS = range(-(2**63), 2**63)

T = TypeVar("T")
File = tuple["io.BufferedReader[io.FileIO]", os.stat_result]

_SCRATCH = ".stepscope-scratch"
_SCRATCH_NAME = re.compile(rf"\..*\.\w{{8}}{re.escape(_SCRATCH)}", re.DOTALL)
_SCRATCH_NAME_BYTES = 100  # of what it is for, in the name of a scratch folder: names of files have at most 255
_LOCK_NAME = ".stepscope-lock"  # in a scratch folder: the first file to come and the last to go
_LOCK_SCHEMA = "stepscope.scratch/1"
_HOST = os.uname().nodename
_NEW, _OLD = "new", "old"  # in a scratch folder: what is being made, and what it takes the place of
MARKER_NAME = ".stepscope"  # in a folder that was made by us
_HINT = "--out FOLDER"
_NO_LOCKS, _NO_SYNC = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP), (errno.EACCES, errno.EINVAL)
_LARGEST_DOCUMENT = 64 << 20  # bytes that are read to find out what a document is

GENERATOR = f"stepscope {__version__}"
PERFETTO_MARK = b'"stepscope":"a picture"'
_PNG, _PNG_HEADER_BYTES = b"\x89PNG\r\n\x1a\n", 33  # the signature, and with it the one chunk that must come first
_LOOKED_AT = 2048  # bytes at either end of a file, in which one of ours names its generator


class Versioned(msgspec.Struct, kw_only=True):
    """What a document of ours says it is, before anything else of it is decoded; empty where it says nothing."""

    schema: str = ""


class _Result(Versioned, kw_only=True):
    command: str


class _Lock(Versioned, kw_only=True):
    """What the lock of a scratch folder says: whose it is, and which name next to it `replacing` works on, if any."""

    host: str
    target: bytes


# --- Reading ---------------------------------------------------------------------------------------------------------


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
        content = _read_start(file, state, most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB")
    return content


def decode(content: bytes, kind: type[T]) -> T:
    """A JSON document as a `kind`. Raises msgspec.DecodeError, with the place, for whatever is wrong with it; a
    ValidationError unless it might only be cut short."""
    try:
        decoded = msgspec.json.decode(content, type=kind)
        if _LONG_NUMBER.search(content):
            _require_64_bits(msgspec.json.decode(content))
        return decoded
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError(f"not UTF-8: {error.reason} at byte {error.start} of a text") from None
    except RecursionError:
        raise msgspec.ValidationError("nested too deeply") from None


def decode_as(content: bytes, kind: type[T], schema: str) -> T:
    """The same for a document that says what it is: a ValidationError too where that is not `schema`."""
    if decode(content, Versioned).schema != schema:
        raise msgspec.ValidationError(f"its schema is not `{schema}`")
    return decode(content, kind)


def read_document(path: Path, kind: type[T], *, refusal: str, hint: str) -> T | None:
    """A JSON document of ours; None where there is no file. `refusal` begins the error for one that cannot be read."""
    try:
        return decode(read_plain(path), kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StepscopeError(f"{refusal} `{path}`", detail=str(error), hint=hint) from None


def _require_64_bits(value: object) -> None:
    """No measurement needs more, and neither tables nor floats can hold it."""
    if isinstance(value, int) and value not in _WHOLE_NUMBERS:
        raise msgspec.ValidationError("a whole number that does not fit into 64 bits")
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
    """A file may be longer than its size says: it grows, or it is one of the kernel's own, whose size is 0. Nothing is
    what a read gives (as None) that would have to wait."""
    content = file.read(min(state.st_size + 1, most_bytes)) or b""
    if len(content) > state.st_size:
        content += file.read(most_bytes - len(content)) or b""
    return content


def _read_document(path: Path) -> bytes:
    with _open(path) as (file, state):
        return _read_start(file, state, _LARGEST_DOCUMENT)


def _open_at_once(path: str, flags: int) -> int:
    """A pipe is refused, not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


# --- Writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def writing(
    path: Path,
    *,
    if_full: str = "the rows that were there are whole; free some space and the same command goes on",
    hint: str = _HINT,
) -> Iterator[None]:
    """Turns an operating system's refusal to write at `path` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StepscopeError(
            f"cannot write to `{path}`: {error.strerror}",
            detail=if_full if full else "",
            hint=hint,
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new, never a mixture. The new one is on the disk when this returns."""
    with replacing(path) as new, new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        _sync_folder(Path(os.path.realpath(path)).parent)
    except OSError as error:  # one may write there and not list, or the file system syncs no folders
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
    """Yields where to write the file or folder that takes the place of `path` when the block ends without an error.
    Until then, and after an error or a kill, `path` is as it was. A symbolic link is followed: what it points to is
    replaced, and the link stays. An empty folder is filled, with the file called `last` after all others."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(place.parent, place.name, target=place.name) as scratch:
        yield scratch / _NEW
        _put_in_place(scratch / _NEW, place, last)


def restore(path: Path) -> None:
    """Moves back a folder that a killed process had moved out of the way and not yet replaced."""
    with suppress(OSError, ValueError):  # nothing that could be looked into, or no name that a file can have
        if not path.exists():
            _remove_abandoned(Path(os.path.realpath(path)).parent)


def _put_in_place(new: Path, place: Path, last: str) -> None:
    """A folder cannot replace one with files in it, so the old one steps aside first and goes last. One that is empty
    is filled: somebody's shell may be in it. Permissions stay as they were."""
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
        raise OSError(errno.EINVAL, "it exists and is not a regular file")


@contextmanager
def scratch_folder(parent: Path | None = None, name: str = "stepscope", *, target: str = "") -> Iterator[Path]:
    """A private folder inside `parent`, or where the system keeps temporary files. It is gone when the block is left,
    and if the process is killed, when the next one on this host asks for a folder in the same parent. `target` is for
    `replacing`: what is moved out of the way belongs there."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, descriptor = _make_locked(parent, name, target)
    try:
        yield folder
    finally:
        is_empty = _discard(folder, target)
        os.close(descriptor)  # first: on NFS, a file that is removed while it is open keeps its folder from going
        if is_empty:
            _remove_empty(folder)


def _make_locked(parent: Path, name: str, target: str) -> tuple[Path, int]:
    """Again when another process, which looks for abandoned ones, removed or locked it first."""
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
    if not os.access(parent, os.R_OK):  # into which one may write and not look: others will have to
        return
    for folder in [one for one in parent.iterdir() if _SCRATCH_NAME.fullmatch(one.name)]:
        with suppress(OSError):  # gone meanwhile, in use (BlockingIOError), or somebody else's
            state = folder.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """A folder without a lock was left before it got one, and is empty, or is not ours."""
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
    """None for what is not a lock of ours, or not yet written, and then it may be any host's."""
    try:
        lock = decode(os.pread(descriptor, _LOOKED_AT, 0), _Lock)
    except (OSError, msgspec.DecodeError):
        return None
    is_name = not set(b"/\0") & set(lock.target)
    return lock if lock.schema == _LOCK_SCHEMA and is_name else None


def _discard(scratch: Path, target: str) -> bool:
    """Deletes what is in it but the lock, unless that is a folder that was moved out of the way of one that never came
    and has no way back. Whether only the lock is left."""
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
    with suppress(OSError):  # another process, which took it for abandoned, was faster
        (scratch / _LOCK_NAME).unlink(missing_ok=True)
        scratch.rmdir()


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _is_scratch(path: Path) -> bool:
    """Whether it is a scratch folder of ours, on whatever host, or was one a moment ago. One that is still empty gets
    its lock next."""
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
    """Whether the lock was had, without waiting; BlockingIOError where another process has it. False on network file
    systems that lock no files, where it is up to the user to run one command per folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def lock_or_raise(descriptor: int, refusal: StepscopeError) -> None:
    """`refusal` is raised when another process has the lock."""
    try:
        try_lock(descriptor)
    except BlockingIOError:
        raise refusal from None


@contextmanager
def locked(folder: Path, refusal: StepscopeError, *, name: str = "") -> Iterator[None]:
    """Holds the lock of `folder`, which is made where there is none, or that of the file `name` in it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644) if name else os.open(folder, os.O_RDONLY)
    try:
        with writing(folder):
            lock_or_raise(descriptor, refusal)
        yield
    finally:
        os.close(descriptor)


# --- Whose it is ------------------------------------------------------------------------------------------------------


def stamp(content: bytes, suffix: str) -> bytes:
    """A figure with a note of what made it, by which `is_ours` knows it again. Pages (`.html`) carry their own."""
    match suffix:
        case ".png":
            chunk = b"tEXtSoftware\0" + GENERATOR.encode()
            packed = (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
            return content[:_PNG_HEADER_BYTES] + packed + content[_PNG_HEADER_BYTES:]
        case ".svg":
            return content.rstrip() + f"\n<!-- Generator: {GENERATOR} -->\n".encode()
        case ".pdf":  # before the pointer to the table of offsets, so that nothing it points to moves
            head, pointer, tail = content.rpartition(b"startxref")
            return head + f"% Generator: {GENERATOR}\n".encode() + pointer + tail
        case _:
            return content


def is_ours(path: Path) -> bool:
    """Whether a file is a figure, a page or a Perfetto trace that stepscope wrote, as it says itself."""
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
    """What a JSON document, or the first of JSON lines, says it is; empty where it says nothing."""
    try:
        content = _read_document(path)
    except (OSError, ValueError):  # nothing that could be read, or no name that a file can have
        return ""
    for text in (content, content.partition(b"\n")[0]):
        with suppress(msgspec.DecodeError):
            return decode(text, Versioned).schema
    return ""


def is_of_kind(path: Path, schema: str) -> bool:
    """Whether a document has this schema, in any version."""
    return read_schema(path).partition("/")[0] == schema.partition("/")[0]


def is_result_of(path: Path, command: str) -> bool:
    """Whether a document of ours was measured by this very command; `--force` in it makes no difference."""
    try:
        found = decode(_read_document(path), _Result)
    except (OSError, msgspec.DecodeError):
        return False
    return found.schema.startswith("stepscope.") and _without_force(found.command) == _without_force(command)


def _without_force(command: str) -> list[str]:
    return [word for word in command.split() if word != "--force"]


def claim(folder: Path, schema: str, *, knows: Callable[[Path], bool] = lambda _: False, hint: str = _HINT) -> None:
    """Makes `folder` one of ours, for data of `schema`: gives it a marker, unless it has one or `knows` it. Several
    processes may claim one folder at a time. StepscopeError, and nothing is touched, where `require_own` raises it."""
    require_own(folder, schema, knows=knows, hint=hint)
    if not is_of_kind(folder / MARKER_NAME, schema) and not knows(folder):
        with writing(folder, hint=hint):
            write_atomically(folder / MARKER_NAME, msgspec.json.encode(Versioned(schema=schema)) + b"\n")


def require_own(
    folder: Path, schema: str, *, knows: Callable[[Path], bool] = lambda _: False, hint: str = _HINT
) -> None:
    """StepscopeError unless `folder` is new or empty, has our marker for data of `schema`, or, as folders of earlier
    versions have none, `knows` it by its content."""
    if folder.exists() and not folder.is_dir():
        raise StepscopeError(f"`{folder}` is not a directory", hint=hint)
    with writing(folder, hint=hint):
        foreign = find_foreign(folder, lambda _: False) if folder.is_dir() else None
    # In this order: it may be claimed between the two looks, and then the second one shows it.
    if foreign is not None and not is_of_kind(folder / MARKER_NAME, schema) and not knows(folder):
        raise StepscopeError(
            f"`{folder}` contains files that stepscope did not create: `{foreign}`",
            detail="nothing was changed",
            hint=f"use a new or empty directory: {hint}",
        )


# --- May it be replaced? ----------------------------------------------------------------------------------------------


def check_target(path: Path, *, force: bool, flag: str, command: str | None = None) -> None:
    """Refuses, before anything runs, a file that could not or should not be written afterwards. `force` replaces
    any regular file; without it a figure or page of ours is replaced, and what was measured, for which `command` is
    given, if the same command measured it."""
    if path.is_dir():
        raise StepscopeError(f"`{path}` is a directory", detail="expected the name of a file", hint=f"{flag} FILE")
    if path.exists() and not path.is_file():
        raise StepscopeError(
            f"`{path}` exists and is not a regular file", detail="expected the name of a file", hint=f"{flag} FILE"
        )
    require_parent(path)
    if path.exists() and not force and not (is_ours(path) if command is None else is_result_of(path, command)):
        detail = "it is not a file that stepscope wrote" if command is None else "another command wrote it"
        raise StepscopeError(
            f"`{path}` exists", detail=detail, hint=f"--force replaces it, or another name: {flag} FILE"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StepscopeError(f"cannot write to `{path.parent}`", hint=f"{flag} FILE")


def require_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise StepscopeError(f"there is no folder `{path.parent}`", hint=f"mkdir -p {path.parent}")


def find_foreign(folder: Path, is_own: Callable[[str], bool]) -> str | None:
    """The first thing in a folder that is not ours, by its path there; None where there is none. `is_own` judges paths,
    those of folders with a slash at their end. Symbolic links are never ours, and what a process is just writing, or
    left when it was killed, always is."""
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


# --- What can be made again: read traces, tuned tiles ----------------------------------------------------------------


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
