"""Sign reports, and check signed ones.

A signed report is one line of JSON:

    {"report":REPORT,"signature":"64 bytes in base64"}

The signature is Ed25519 over a fixed prefix and the bytes of REPORT as they are in the file. A checker extracts those
bytes by position and checks the signature before it parses them. Everything around them has exactly one valid form, so
that every bit of the file is either signed or fixed: no whitespace, no other encoding of the signature, no trailing
data.

A valid signature means that the holder of the key signed the report and that it is unchanged, not that it is true.
"""

import base64
import binascii
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import open_plain, write_atomically, writing
from stepscope.recover.reports.keys import (
    PublicKey,
    load_private_key,
    parse_public_key,
    public_key_of,
    read_public_key,
)
from stepscope.recover.reports.signed_report import (
    SCHEMA,
    HashedFile,
    SignedReport,
    base_name,
    canonical_bytes,
    hash_file,
    hash_files,
    parse_report,
)

# Domain separation: if a key ever signs anything else, that signature must not be valid for a report.
_CONTEXT = SCHEMA.encode() + b"\n"
_HEAD = b'{"report":'
_MIDDLE = b',"signature":"'
_TAIL = b'"}\n'
_SIGNATURE_BYTES = 64
_SIGNATURE_LETTERS = 88
_BEHIND = len(_MIDDLE) + _SIGNATURE_LETTERS + len(_TAIL)
_LARGEST_BYTES = 64 * 2**20
_MARK = b"stepscope.report"


class SignatureVerdict(StrEnum):
    GOOD = "good"
    CHANGED = "changed"
    OTHER_KEY = "signed by another key"


class SignatureCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`report` is set only if the signature is good. `signer` is the key that signed, if known."""

    verdict: SignatureVerdict
    report: SignedReport | None = None
    signer: PublicKey | None = None


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A file that differs from the report: changed, not in the report, or missing from its directory."""

    name: str
    problem: Literal["changed", "not in the report", "missing"]


def sign_report(report: SignedReport, key_path: Path) -> bytes:
    """Return the bytes of the signed report. Its `public_key` is set to that of the signing key."""
    key = load_private_key(key_path)
    content = canonical_bytes(msgspec.structs.replace(report, public_key=public_key_of(key).text))
    signature = base64.b64encode(key.sign(_CONTEXT + content))
    return _HEAD + content + _MIDDLE + signature + _TAIL


def write_signed(path: Path, report: SignedReport, key_path: Path, *, force: bool = False) -> None:
    if os.path.lexists(path) and not force:
        raise StepscopeError(f"`{path}` already exists", hint="add --force, or choose another file")
    content = sign_report(report, key_path)
    with writing(path, if_full="nothing was written", hint="choose a file on another disk"):
        write_atomically(path, content)


def check_signed(path: Path, public_key: Path | str) -> SignatureCheck:
    """Check a signed report. Raises StepscopeError if the file is not a signed report, or the key is invalid."""
    return check_signed_bytes(_read(path), read_public_key(public_key), name=str(path))


def check_signed_bytes(signed: bytes, public_key: PublicKey, *, name: str = "the file") -> SignatureCheck:
    parts = _take_apart(signed)
    if parts is None and _MARK not in signed:
        raise StepscopeError(
            f"not a signed report: `{name}`", detail=f"expected schema `{SCHEMA}`", hint="stepscope verify --help"
        )
    if parts is None:
        return SignatureCheck(verdict=SignatureVerdict.CHANGED)
    content, signature = parts
    if not _is_signed_by(public_key, content, signature):
        signer = _signer_in(content)
        if signer is not None and _is_signed_by(signer, content, signature):
            return SignatureCheck(verdict=SignatureVerdict.OTHER_KEY, signer=signer)
        return SignatureCheck(verdict=SignatureVerdict.CHANGED)
    report = parse_report(content)
    if report.public_key != public_key.text:
        raise StepscopeError(f"the report `{name}` names a different key than the one that signed it")
    return SignatureCheck(verdict=SignatureVerdict.GOOD, report=report, signer=public_key)


def check_evidence(report: SignedReport, paths: Sequence[Path]) -> list[Mismatch]:
    """Hash files and compare them with the evidence, claim and weights of the report. Single files may be renamed. In a
    directory, names must match and no file may be missing."""
    signed = {(file.name, file.sha256) for file in report.evidence}
    others = [one for one in (report.claim, report.weights) if one is not None]
    hashes = {file.sha256 for file in (*report.evidence, *others)}
    found: list[Mismatch] = []
    for path in paths:
        if path.is_dir():
            members = hash_files([path])
            found += [_mismatch(report, file) for file in members if (file.name, file.sha256) not in signed]
            present = {file.name for file in members}
            below = [file.name for file in report.evidence if file.name.startswith(f"{base_name(path)}/")]
            found += [Mismatch(name=name, problem="missing") for name in below if name not in present]
        else:
            file = hash_file(path)
            found += [] if file.sha256 in hashes else [_mismatch(report, file)]
    return found


def _mismatch(report: SignedReport, file: HashedFile) -> Mismatch:
    known = any(one.name == file.name for one in report.evidence)
    return Mismatch(name=file.name, problem="changed" if known else "not in the report")


def _take_apart(signed: bytes) -> tuple[bytes, bytes] | None:
    """Return the signed bytes and the signature, by position, or None if anything around them is not as expected."""
    behind = signed[-_BEHIND:]
    letters = behind[len(_MIDDLE) : -len(_TAIL)]
    if not signed.startswith(_HEAD) or len(signed) <= len(_HEAD) + _BEHIND:
        return None
    if not behind.startswith(_MIDDLE) or not behind.endswith(_TAIL):
        return None
    try:
        signature = base64.b64decode(letters, validate=True)
    except binascii.Error:
        return None
    # Decoders ignore the unused bits at the end of base64, so require the canonical form.
    if len(signature) != _SIGNATURE_BYTES or base64.b64encode(signature) != letters:
        return None
    return signed[len(_HEAD) : -_BEHIND], signature


def _is_signed_by(public_key: PublicKey, content: bytes, signature: bytes) -> bool:
    """Whether the signature is valid. The library rejects a second form of it (s plus the group order)."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key.raw).verify(signature, _CONTEXT + content)
    except InvalidSignature:
        return False
    return True


def _signer_in(content: bytes) -> PublicKey | None:
    """Return the key that an unverified report names. Only use it to check the signature against that key."""
    try:
        return parse_public_key(parse_report(content).public_key)
    except StepscopeError:
        return None


def _read(path: Path) -> bytes:
    with open_plain(path, what="the signed report") as (file, _):
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise StepscopeError(
            f"not a signed report: `{path}`", detail=f"the file is larger than {_LARGEST_BYTES:,} bytes"
        )
    return content
