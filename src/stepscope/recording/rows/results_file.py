"""A results file: one JSON row per line, appended atomically.

A sweep runs for hours and may die at any moment. The file is only ever appended to, each row is on disk before the next
case starts, and one process writes at a time. A last line that a crash or a full disk truncated is moved to another
file when the results file is next opened for writing; any other damage is an error. Rows of a later version, with an
unknown setting or value, stay in the file and are skipped. A file whose first line is not a row belongs to another
program and is never changed.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import Versioned, decode, lock_or_raise, read_plain, writing
from stepscope.recording.rows.bench import Row
from stepscope.units import count_noun

R = TypeVar("R", bound=Row)
# The messages of msgspec for an unknown value and for an unknown field.
_LATER = ("Invalid enum value", "Object contains unknown field")


class Parsed(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """The rows of a file, the `good_bytes` that they take (the rest is a truncated last line), and the number of rows
    of a later version."""

    rows: tuple[R, ...]
    good_bytes: int
    later: int

    @property
    def newest(self) -> tuple[R, ...]:
        """The newest row of each case, in the order in which cases first appear."""
        return tuple({row.key: row for row in self.rows}.values())


def read_rows(path: Path, kind: type[R]) -> tuple[tuple[R, ...], tuple[str, ...]]:
    """Return the newest row of each case, in the order in which cases first appear, and notes on skipped lines."""
    content = _read(path, kind)
    parsed = parse_rows(path, content, kind)
    left_out = []
    if cut_bytes := len(content) - parsed.good_bytes:
        left_out.append(f"skipped: a truncated last line ({cut_bytes:,} bytes)")
    if parsed.later:
        left_out.append(f"skipped: {count_noun(parsed.later, 'row')} from a later version of stepscope")
    if not parsed.rows:
        expected = f"expected rows of schema `{_schema_of(kind)}`"
        raise StepscopeError(f"no rows in `{path}`", detail="\n".join([expected, *left_out]), hint=_verb_of(kind))
    return parsed.newest, tuple(left_out)


class HasKey(Protocol):
    @property
    def key(self) -> str: ...


class ResultsFile(Generic[R]):
    """A results file open for appending. `rows` are the rows it had when opened; `damaged_bytes` is the size of a
    truncated last line that was moved away."""

    def __init__(self, path: Path, descriptor: int, kind: type[R]) -> None:
        self.path = path
        self._descriptor = descriptor
        parsed = parse_rows(path, _read(path, kind), kind)
        self.rows = parsed.newest
        self._by_key = {row.key: row for row in self.rows}
        self.damaged_bytes = self._repair(parsed.good_bytes, kind)

    @classmethod
    @contextmanager
    def open(cls, path: Path, kind: type[R]) -> Iterator["ResultsFile[R]"]:
        """Open the file exclusively; a second sweep on the same file is an error."""
        hint = f"{_verb_of(kind)} --out DIR"
        with writing(path, hint=hint):
            existed = path.exists()
            new_folders = [folder for folder in path.parents if not folder.exists()]
        if existed and not path.is_file():
            raise StepscopeError(f"not a file: `{path}`", hint=hint)
        descriptor = _open_locked(path, hint)
        try:
            yield cls(path, descriptor, kind)
        finally:
            if os.fstat(descriptor).st_size == 0 and not existed:
                _leave_nothing(path, new_folders)
            os.close(descriptor)

    def find(self, planned: HasKey) -> R | None:
        """Return the row of a case, if the file had one."""
        return self._by_key.get(planned.key)

    def append(self, row: R) -> None:
        """Append a row and sync it to disk. If the disk is full, the file is unchanged."""
        size = os.fstat(self._descriptor).st_size
        with writing(self.path):
            try:
                _write_all(self._descriptor, msgspec.json.encode(row) + b"\n")
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, size)
                raise

    def _repair(self, good_bytes: int, kind: type[R]) -> int:
        content = _read(self.path, kind)
        rest = content[good_bytes:]
        if not self.rows and not _begins_as_row(rest, kind):
            raise _not_of_this_version(self.path, 1, "", kind)
        with writing(self.path):
            if rest:
                with self.path.with_name(self.path.name + ".damaged").open("ab") as aside:
                    aside.write(rest + b"\n")
                os.ftruncate(self._descriptor, good_bytes)
            elif content and not content.endswith(b"\n"):
                _write_all(self._descriptor, b"\n")
        return len(rest)


def parse_rows(path: Path, content: bytes, kind: type[R]) -> Parsed[R]:
    """Parse the `content` of the file at `path`."""
    rows: list[R] = []
    good_bytes = later = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(_decode(path, number, line, kind))
            except msgspec.DecodeError as error:
                if number == len(lines) and not isinstance(error, msgspec.ValidationError):
                    break
                if str(error).startswith(_LATER):
                    later += 1
                    good_bytes += len(line)
                    continue
                if not rows and not _begins_as_row(line, kind):
                    raise _not_of_this_version(path, number, "", kind) from None
                raise StepscopeError(
                    f"damaged results file: `{path}`, line {number}",
                    detail=f"{error}; a crash can only truncate the last line, so the file was damaged otherwise",
                    hint=f"fix or delete that line, or choose another directory: {_verb_of(kind)} --out DIR",
                ) from None
        good_bytes += len(line)
    return Parsed(rows=tuple(rows), good_bytes=good_bytes, later=later)


def _begins_as_row(line: bytes, kind: type[Row]) -> bool:
    """Whether an unreadable, perhaps truncated, line starts like a row."""
    beginning = b'{"schema":"' + _schema_of(kind).encode() + b'"'
    return line[: len(beginning)] == beginning[: len(line)]


def _not_of_this_version(path: Path, number: int, schema: str, kind: type[Row]) -> StepscopeError:
    return StepscopeError(
        f"not a results file from this version of stepscope: `{path}`, line {number}",
        detail=f"expected rows of schema `{_schema_of(kind)}`, got `{schema[:60] or 'none'}`",
        hint=f"choose another directory: {_verb_of(kind)} --out DIR",
    )


def _schema_of(kind: type[Row]) -> str:
    (default,) = (field.default for field in msgspec.structs.fields(kind) if field.name == "schema")
    return str(default)


def _verb_of(kind: type[Row]) -> str:
    """The verb that writes rows of this kind, from its schema: `stepscope.bench/1`."""
    return "stepscope " + _schema_of(kind).removeprefix("stepscope.").partition("/")[0]


def _decode(path: Path, number: int, line: bytes, kind: type[R]) -> R:
    schema = decode(line, Versioned).schema
    if schema != _schema_of(kind):
        raise _not_of_this_version(path, number, schema, kind)
    return decode(line, kind)


def _read(path: Path, kind: type[Row]) -> bytes:
    try:
        return read_plain(path)
    except OSError as error:
        raise StepscopeError(
            f"cannot read the results file: `{path}`",
            detail=error.strerror or "",
            hint=f"to measure again: {_verb_of(kind)}",
        ) from None


def _leave_nothing(path: Path, folders: Sequence[Path]) -> None:
    """Delete the empty file, and the directories created for it, if a sweep failed before its first row."""
    path.unlink()
    for folder in folders:
        if any(folder.iterdir()):
            return
        folder.rmdir()


def _open_locked(path: Path, hint: str) -> int:
    """Open and lock the file; try again if another process deleted it in between because it was empty."""
    while True:
        with writing(path, hint=hint):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(path, descriptor, hint)
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except StepscopeError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(path: Path, descriptor: int, hint: str) -> None:
    refusal = StepscopeError(
        f"another sweep is writing to `{path}`",
        detail="two sweeps would disturb each other's timings",
        hint=f"wait for it to finish, or choose another directory: {hint}",
    )
    lock_or_raise(descriptor, refusal)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
