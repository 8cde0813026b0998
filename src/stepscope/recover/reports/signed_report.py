"""The contents of a report: the files with their hashes, the result, and the bytes that are signed.

A signature covers bytes and a report is a structure, so each structure needs exactly one form in bytes: JSON with
sorted keys, no whitespace, UTF-8 and Python's shortest form of floats. Strings are not normalized, so two Unicode
spellings of one letter are two strings. Readers accept no other form, which rules out duplicate keys and unknown
fields: what is not in the structure was not signed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import open_plain

SCHEMA = "stepscope.report/1"
_WHOLE_NUMBERS = range(-(2**63), 2**63)  # what readers in other languages can represent
_NONCE = re.compile(r"[!-~]{1,200}")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")

# The result of a verb as JSON-compatible values. Reports do not interpret it.
Statement = Mapping[str, Any]


class HashedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hash of a file. `name` is its base name; in a directory, its path starting with the directory's name."""

    name: str
    bytes: int
    sha256: str


class HashedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hash of weights on disk: of a file's bytes, or of a directory's list of names and hashes (`hash_weights`)."""

    name: str
    kind: Literal["file", "folder"]
    bytes: int
    sha256: str


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU and where that information comes from: the evidence, the driver of the signing machine, or the signer."""

    name: str | None
    uuid: str | None
    said_by: Literal["evidence", "signing machine", "signer"]


class SignedReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a signature covers. It includes the signer's key, so that a signature belongs to one key only."""

    schema: str = SCHEMA
    stepscope: str
    signed_at: str  # UTC, by the signer's clock
    public_key: str = ""  # the signer's; set when signing
    nonce: str | None
    gpus: tuple[Gpu, ...]
    evidence: tuple[HashedFile, ...]
    claim: HashedFile | None
    weights: HashedWeights | None
    statement: dict[str, Any]


def canonical_bytes(report: SignedReport) -> bytes:
    """Return the canonical bytes of a report. Raises ValueError for a statement that has no canonical form."""
    return _encode(msgspec.to_builtins(report))


def parse_report(content: bytes) -> SignedReport:
    """Return the report in canonical bytes. Raises StepscopeError for any other form."""
    try:
        plain = json.loads(content.decode())
        same = _encode(plain) == content
    except (ValueError, RecursionError) as error:
        raise _no_report(str(error)) from None
    if not same:
        raise _no_report("it is not in canonical form")
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema != SCHEMA:
        raise _no_report(f"expected schema `{SCHEMA}`, got `{str(schema)[:60]}`")
    try:
        return msgspec.convert(plain, SignedReport)
    except msgspec.ValidationError as error:
        raise _no_report(str(error)) from None


def check_nonce(nonce: str) -> str:
    """Return the nonce if it is short visible ASCII: it is copied by hand and by scripts."""
    if not _NONCE.fullmatch(nonce):
        raise StepscopeError(
            "invalid nonce: expected 1 to 200 printable ASCII characters without spaces",
            detail="use exactly what the verifier sent",
            hint="the verifier can create one with openssl rand -hex 16",
        )
    return nonce


def check_uuid(uuid: str) -> str:
    if not _UUID.fullmatch(uuid):
        raise StepscopeError(
            f"not a GPU UUID: `{uuid[:80]}`",
            detail="expected `GPU-` and five groups of hexadecimal digits",
            hint="nvidia-smi --query-gpu=uuid --format=csv,noheader",
        )
    return uuid


def _encode(plain: object) -> bytes:
    _require_plain(plain)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair


def _require_plain(value: object) -> None:
    """Raise ValueError for values that JSON cannot represent, or that readers interpret differently."""
    match value:
        case None | bool() | str() | float():  # the encoder rejects NaN and infinity
            pass
        case int():
            if value not in _WHOLE_NUMBERS:
                raise ValueError("an integer does not fit into 64 bits")
        case list() | tuple():
            for one in value:
                _require_plain(one)
        case dict():
            for key, one in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"a key is not a string: {key!r}")
                _require_plain(one)
        case _:
            raise ValueError(f"{type(value).__name__} cannot be represented in JSON")


def _no_report(why: str) -> StepscopeError:
    return StepscopeError("the signed content is not a report in this version's format", detail=why[:200])


# --- Hashes of evidence and weights: SHA-256 of raw bytes, read once, whatever the size
#
# For a directory of evidence every file is listed. A directory of weights may have hundreds of files, so the list
# itself is hashed in the format of `sha256sum`. Anybody can compute the same hash without stepscope:
#
#     cd WEIGHTS && find -L . -type f -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum


def hash_files(paths: Iterable[Path]) -> tuple[HashedFile, ...]:
    """Hash every file and every file of every directory, in the given order and sorted within a directory."""
    return tuple(hashed for path in paths for hashed in _hash_one(path))


def hash_file(path: Path) -> HashedFile:
    return _hash(path, base_name(path))


def hash_weights(path: Path) -> HashedWeights:
    if not path.is_dir():
        only = hash_file(path)
        return HashedWeights(name=only.name, kind="file", bytes=only.bytes, sha256=only.sha256)
    files = [_hash(member, name) for name, member in _members(path)]
    if not files:
        raise StepscopeError(f"the weights directory is empty: `{path}`", hint="--weights FILE_OR_DIRECTORY")
    lines = "".join(f"{file.sha256}  {file.name}\n" for file in files)
    return HashedWeights(
        name=base_name(path),
        kind="folder",
        bytes=sum(file.bytes for file in files),
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
    )


def base_name(path: Path) -> str:
    """Return the base name of a path, also for `.` and `..`, escaped if not UTF-8. The directory stays private."""
    return _readable(path.resolve().name if path.name in ("", "..") else path.name)


def _hash_one(path: Path) -> Iterator[HashedFile]:
    if not path.is_dir():
        yield hash_file(path)
        return
    folder = base_name(path)
    for name, member in _members(path):
        yield _hash(member, f"{folder}/{name}")


def _members(folder: Path) -> list[tuple[str, Path]]:
    """Return all files in a directory with their relative paths, sorted by the bytes of the path. Raises StepscopeError
    for a directory that cannot be listed: no file is skipped."""
    found = []
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        for name in folders:
            if (Path(parent) / name).is_symlink():  # may be a loop
                raise StepscopeError(
                    f"links to directories are not supported: `{Path(parent) / name}`",
                    hint="pass the linked directory as another argument",
                )
        found += [Path(parent) / file for file in files]
    named = [(_readable(member.relative_to(folder).as_posix()), member) for member in found]
    for name, _ in named:
        if "\n" in name or "\\" in name:
            raise StepscopeError(
                f"unsupported file name: `{name[:200]!r}`",
                detail="expected UTF-8 without line breaks and backslashes",
            )
    return sorted(named, key=lambda pair: pair[0].encode())


def _refuse(error: OSError) -> None:
    raise StepscopeError(f"cannot list `{error.filename}`: {error.strerror}") from None


def _hash(path: Path, name: str) -> HashedFile:
    with open_plain(path, what="the file to hash") as (file, before):
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise StepscopeError(
            f"`{path}` changed while it was being read", hint="run it again when nothing is writing to this file"
        )
    return HashedFile(name=name, bytes=before.st_size, sha256=digest)


def _readable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")
