"""A report as data: what was looked at, what was found, and the bytes that a signature goes over.

Signatures are made over bytes and reports are structures, so one structure must have one form in bytes. Ours is JSON
with sorted keys, no blanks, UTF-8 and Python's shortest form of floats. Strings are taken code point by code point:
nothing is normalised, so two spellings of one letter are two strings. A reader takes no other form than this one, which
leaves no room for a key that stands twice or for a field that nobody knows: what is not in the structure was not
signed.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from stepscope.errors import StepscopeError

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
    """Weights as they lay on the disk: a file's raw bytes, or a folder's list of names and hashes (`hashing.py`)."""

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
