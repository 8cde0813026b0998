"""A report as data: what was looked at, with its hashes, what was found, and the bytes that a signature goes over.

Signatures are made over bytes and reports are structures, so one structure must have one form in bytes. Ours is JSON
with sorted keys, no blanks, UTF-8 and Python's shortest form of floats. Strings are taken code point by code point:
nothing is normalised, so two spellings of one letter are two strings. A reader takes no other form than this one, which
leaves no room for a key that stands twice or for a field that nobody knows: what is not in the structure was not
signed.
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
_WHOLE_NUMBERS = range(-(2**63), 2**63)  # what readers in other languages can hold
_NONCE = re.compile(r"[!-~]{1,200}")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")

# What a verb found, in JSON's terms. Reports carry it and do not look into it.
Statement = Mapping[str, Any]


class HashedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file's raw bytes. The name is its base name, or its path from the folder's name on where a folder was given."""

    name: str
    bytes: int
    sha256: str


class HashedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights as they lay on the disk: a file's raw bytes, or a folder's list of names and hashes (`hash_weights`)."""

    name: str
    kind: Literal["file", "folder"]
    bytes: int
    sha256: str


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, and who says so: the evidence, the driver of the machine that signed, or whoever signed."""

    name: str | None
    uuid: str | None
    said_by: Literal["evidence", "signing machine", "signer"]


class SignedReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a signature covers. The signer's own key is in it: a signature then belongs to one key alone."""

    schema: str = SCHEMA
    stepscope: str
    signed_at: str  # UTC, by the signer's clock
    public_key: str = ""  # whose signature it is; comes with it
    nonce: str | None
    gpus: tuple[Gpu, ...]
    evidence: tuple[HashedFile, ...]
    claim: HashedFile | None
    weights: HashedWeights | None
    statement: dict[str, Any]


def canonical_bytes(report: SignedReport) -> bytes:
    """The one form of this report in bytes. ValueError for a statement that has none."""
    return _encode(msgspec.to_builtins(report))


def parse_report(content: bytes) -> SignedReport:
    """The report in its canonical form; StepscopeError for anything else, however much alike."""
    try:
        plain = json.loads(content.decode())
        same = _encode(plain) == content
    except (ValueError, RecursionError) as error:
        raise _no_report(str(error)) from None
    if not same:
        raise _no_report("it is not in canonical form")
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema != SCHEMA:
        raise _no_report(f"expected schema `{SCHEMA}`, found `{str(schema)[:60]}`")
    try:
        return msgspec.convert(plain, SignedReport)
    except msgspec.ValidationError as error:
        raise _no_report(str(error)) from None


def check_nonce(nonce: str) -> str:
    """A nonce is copied by hand and by scripts: visible ASCII, and not a novel."""
    if not _NONCE.fullmatch(nonce):
        raise StepscopeError(
            "a nonce is 1 to 200 letters, digits and signs of ASCII, without blanks",
            detail="it is what the verifier sent, unchanged",
            hint="--nonce $(openssl rand -hex 16), chosen by the verifier",
        )
    return nonce


def check_uuid(uuid: str) -> str:
    if not _UUID.fullmatch(uuid):
        raise StepscopeError(
            f"not the UUID of a GPU: `{uuid[:80]}`",
            detail="expected GPU- and five groups of hexadecimal digits",
            hint="nvidia-smi --query-gpu=uuid --format=csv,noheader",
        )
    return uuid


def _encode(plain: object) -> bytes:
    _require_plain(plain)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair


def _require_plain(value: object) -> None:
    """ValueError for what JSON cannot say, or says in a way that readers take differently."""
    match value:
        case None | bool() | str() | float():  # the encoder refuses floats that are none
            pass
        case int():
            if value not in _WHOLE_NUMBERS:
                raise ValueError("a whole number does not fit into 64 bits")
        case list() | tuple():
            for one in value:
                _require_plain(one)
        case dict():
            for key, one in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"a key is no text: {key!r}")
                _require_plain(one)
        case _:
            raise ValueError(f"{type(value).__name__} has no form in JSON")


def _no_report(why: str) -> StepscopeError:
    return StepscopeError("what was signed is no report of this version", detail=why[:200])


# --- Hashes of evidence and weights: SHA-256 of raw bytes, read once, whatever their size
#
# A folder has no bytes of its own. For evidence every file in it is listed. For weights, of which there may be
# hundreds, the list itself is hashed, in the form that `sha256sum` prints, so that anybody can make the same number
# without us:
#
#     cd WEIGHTS && find -L . -type f -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum


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
