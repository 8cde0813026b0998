"""Hashes of evidence and weights: SHA-256 of raw bytes, read once, whatever their size.

A folder has no bytes of its own. For evidence every file in it is listed. For weights, of which there may be hundreds,
the list itself is hashed, in the form that `sha256sum` prints, so that anybody can make the same number without us:

    cd WEIGHTS && find -L . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.files import open_plain
from stepscope.recover.reports.signed_report import HashedFile, HashedWeights


def hash_files(paths: Iterable[Path]) -> tuple[HashedFile, ...]:
    """Every file, and every file of every folder, in the order given and sorted within a folder."""
    return tuple(hashed for path in paths for hashed in _hash_one(path))


def hash_file(path: Path) -> HashedFile:
    return _hash(path, base_name(path))


def hash_weights(path: Path) -> HashedWeights:
    if not path.is_dir():
        only = hash_file(path)
        return HashedWeights(name=only.name, kind="file", bytes=only.bytes, sha256=only.sha256)
    files = [_hash(member, name) for name, member in _members(path)]
    if not files:
        raise StepscopeError(f"no files in the folder of weights: `{path}`", hint="--weights FILE_OR_FOLDER")
    lines = "".join(f"{file.sha256}  {file.name}\n" for file in files)
    return HashedWeights(
        name=base_name(path),
        kind="folder",
        bytes=sum(file.bytes for file in files),
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
    )


def base_name(path: Path) -> str:
    """Also of `.` and `..`, and readable where a name is not UTF-8. Where a file lies is nobody's business."""
    return _readable(path.resolve().name if path.name in ("", "..") else path.name)


def _hash_one(path: Path) -> Iterator[HashedFile]:
    if not path.is_dir():
        yield hash_file(path)
        return
    folder = base_name(path)
    for name, member in _members(path):
        yield _hash(member, f"{folder}/{name}")


def _members(folder: Path) -> list[tuple[str, Path]]:
    """The files below, with their paths from the folder on, in the order of the names' bytes. Nothing is left out: what
    cannot be listed is an error."""
    found = []
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        for name in folders:
            if (Path(parent) / name).is_symlink():  # may lead back up
                raise StepscopeError(f"a link to a folder: `{Path(parent) / name}`", hint="give the folder itself, too")
        found += [Path(parent) / file for file in files]
    named = [(_readable(member.relative_to(folder).as_posix()), member) for member in found]
    for name, _ in named:
        if "\n" in name or "\\" in name:
            raise StepscopeError(f"a name with a line break or a backslash, or not in UTF-8: `{name[:200]!r}`")
    return sorted(named, key=lambda pair: pair[0].encode())


def _refuse(error: OSError) -> None:
    raise StepscopeError(f"cannot list `{error.filename}`: {error.strerror}") from None


def _hash(path: Path, name: str) -> HashedFile:
    with open_plain(path, what="a file to hash") as (file, before):
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise StepscopeError(f"`{path}` was written to while it was read", hint="wait until whatever writes it is done")
    return HashedFile(name=name, bytes=before.st_size, sha256=digest)


def _readable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")
