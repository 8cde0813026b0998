"""Key pairs: a private key in a file that only its owner can read, and a public key on one line.

Private keys are Ed25519 in PEM (PKCS #8), so that other tools can read them. Passphrases are not supported: the
library's PEM encryption uses only 2,048 rounds of PBKDF2, which is quick to brute-force, and reports are mostly signed
by scripts. As in ssh, a file that others can read is refused.

The public key's line is `ed25519:` and 32 bytes in base64. Its fingerprint is the SHA-256 of those bytes.
"""

import base64
import binascii
import hashlib
import os
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import open_plain, scratch_folder, writing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PREFIX = "ed25519:"
_KEY_BYTES = 32
_FILE_BYTES = 16 * 1024
_MAKE_ONE = "stepscope key new"
# With a key of small order, one signature is valid for many messages, and anybody can make it. These are the y of all
# such keys in the field of 2^255 - 19; the library does not reject them.
_FIELD = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_WEAK = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})


class PublicKey(msgspec.Struct, frozen=True):
    raw: bytes

    @property
    def text(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()

    @property
    def fingerprint(self) -> str:
        return "sha256:" + hashlib.sha256(self.raw).hexdigest()


def new_key(path: Path, *, force: bool = False) -> PublicKey:
    """Write a new private key to `path` and its public key to `path.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    beside = public_path(path)
    for existing in (path, beside):
        if os.path.lexists(existing) and not force:
            raise StepscopeError(
                f"`{existing}` already exists",
                detail="an overwritten key cannot be recovered",
                hint=f"{_MAKE_ONE} ANOTHER_FILE, or add --force",
            )
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = public_key_of(key)
    # The private key last: if anything fails before that, the old key is still there.
    replaced = beside.read_bytes() if beside.is_file() else None
    _create(beside, f"{public.text}\n".encode(), mode=0o644, force=force)
    try:
        _create(path, pem, mode=0o600, force=force)
    except StepscopeError:
        beside.unlink()
        if replaced is not None:
            _create(beside, replaced, mode=0o644, force=force)
        raise
    return public


def public_path(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def load_private_key(path: Path) -> "Ed25519PrivateKey":
    """Return the private key in a file. Errors never contain anything from the file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _read(path, private=True)
    if _PREFIX.encode() in content:
        raise StepscopeError(
            f"`{path}` is a public key", detail="signing requires the private key", hint="--sign FILE_WITHOUT_.pub"
        )
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise StepscopeError(
            f"the key in `{path}` has a passphrase", detail="passphrases are not supported", hint=_MAKE_ONE
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise StepscopeError(
            f"no private key in `{path}`", detail="expected an Ed25519 key in PEM", hint=_MAKE_ONE
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StepscopeError(f"unsupported key type in `{path}`", detail="expected an Ed25519 key", hint=_MAKE_ONE)
    return key


def public_key_of(private: "Ed25519PrivateKey") -> PublicKey:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return PublicKey(private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


def read_public_key(path_or_text: Path | str) -> PublicKey:
    """Return the public key in a file, or on the line itself."""
    text = str(path_or_text)
    if text.startswith(_PREFIX):
        return parse_public_key(text)
    content = _read(Path(path_or_text), private=False)
    if b"PRIVATE KEY" in content:
        raise StepscopeError(
            f"`{path_or_text}` is a private key",
            detail="checking requires the public key; do not share the private key",
            hint=f"--public-key {path_or_text}.pub",
        )
    return parse_public_key(content.decode("ascii", "replace").strip())


def parse_public_key(text: str) -> PublicKey:
    """Return the public key on a line. Only the canonical form is accepted."""
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _KEY_BYTES or PublicKey(raw).text != text:
        raise StepscopeError(
            "not a public key",
            detail=f"expected one line with `{_PREFIX}` and {_KEY_BYTES} bytes in base64, as in a .pub file",
            hint=_MAKE_ONE,
        )
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    if y >= _FIELD or y in _WEAK:
        raise StepscopeError("weak public key", detail="anybody can forge signatures for it: do not trust its source")
    return PublicKey(raw)


def _read(path: Path, *, private: bool) -> bytes:
    with open_plain(path, what="the private key" if private else "the public key") as (file, state):
        if private and state.st_mode & 0o077:
            raise StepscopeError(
                f"other users can read the private key `{path}`",
                detail=f"its permissions are {stat.S_IMODE(state.st_mode):04o}, expected 0600 or stricter\n"
                "if somebody may have read it, create a new key",
                hint=f"chmod 600 {shlex.quote(str(path))}",
            )
        return file.read(_FILE_BYTES)


def _create(path: Path, content: bytes, *, mode: int, force: bool) -> None:
    """Create a file that has its permissions from the start. With `force`, replace an existing file or link once the
    new file is complete."""
    with (
        writing(path, if_full="nothing was written", hint=f"{_MAKE_ONE} ANOTHER_FILE"),
        scratch_folder(path.parent, path.name) as scratch,
    ):
        place = scratch / path.name if force else path
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if force:
                place.replace(path)
        except BaseException:
            place.unlink(missing_ok=True)
            raise
