"""Keys: a private one in a file that only its owner can read, a public one on a line that anybody may.

Private keys are Ed25519 in PEM (PKCS #8), so that other tools can read them. There is no passphrase: the library's PEM
makes a key of one with 2,048 rounds of PBKDF2, which is soon tried, and reports are mostly signed by scripts. As with
ssh, a file that others can read is refused.

The public key's line is `ed25519:` and 32 bytes in base64; its fingerprint is the SHA-256 of those bytes.
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
# Under a key of small order one signature is good for many texts, whoever made it. These are all of them, by their y,
# in the field of 2^255 - 19; the library does not refuse them.
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
    """Writes a new private key to `path` and its public key beside it, to `path.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    beside = public_path(path)
    for existing in (path, beside):
        if os.path.lexists(existing) and not force:
            raise StepscopeError(
                f"`{existing}` exists",
                detail="a key that is overwritten is lost: nothing can be signed with it again",
                hint=f"{_MAKE_ONE} ANOTHER_FILE, or --force",
            )
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = public_key_of(key)
    # The private one last: whatever fails before it leaves an old key as it was.
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
    """What is wrong with a key file is said without a word of what is in it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _read(path, private=True)
    if _PREFIX.encode() in content:
        raise StepscopeError(f"`{path}` is a public key", detail="a private one signs", hint="--sign FILE_WITHOUT_.pub")
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise StepscopeError(
            f"the key in `{path}` is locked by a passphrase", detail="only keys without one can be used", hint=_MAKE_ONE
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise StepscopeError(
            f"no private key in `{path}`", detail="expected an Ed25519 key in PEM", hint=_MAKE_ONE
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StepscopeError(f"the key in `{path}` is of another kind", detail="expected Ed25519", hint=_MAKE_ONE)
    return key


def public_key_of(private: "Ed25519PrivateKey") -> PublicKey:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return PublicKey(private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


def read_public_key(path_or_text: Path | str) -> PublicKey:
    """From a file, or from the line itself."""
    text = str(path_or_text)
    if text.startswith(_PREFIX):
        return parse_public_key(text)
    content = _read(Path(path_or_text), private=False)
    if b"PRIVATE KEY" in content:
        raise StepscopeError(
            f"`{path_or_text}` is a private key",
            detail="give nobody that file; a public key checks",
            hint=f"--public-key {path_or_text}.pub",
        )
    return parse_public_key(content.decode("ascii", "replace").strip())


def parse_public_key(text: str) -> PublicKey:
    """From its line, in the one form that it has."""
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _KEY_BYTES or PublicKey(raw).text != text:
        raise StepscopeError(
            "not a public key",
            detail=f"expected one line: `{_PREFIX}` and {_KEY_BYTES} bytes in base64, as in the .pub file of a key",
            hint=_MAKE_ONE,
        )
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    if y >= _FIELD or y in _WEAK:
        raise StepscopeError("a weak public key", detail="anybody can sign in its name: whoever gave it meant no good")
    return PublicKey(raw)


def _read(path: Path, *, private: bool) -> bytes:
    with open_plain(path, what="a private key" if private else "a public key") as (file, state):
        if private and state.st_mode & 0o077:
            raise StepscopeError(
                f"others can read the private key `{path}`",
                detail=f"its permissions are {stat.S_IMODE(state.st_mode):04o}, and must be 0600 or less\n"
                "if somebody may have read it, make a new one",
                hint=f"chmod 600 {shlex.quote(str(path))}",
            )
        return file.read(_FILE_BYTES)


def _create(path: Path, content: bytes, *, mode: int, force: bool) -> None:
    """A new file, with its permissions from the first byte on. With `force` it takes the place of what is there, be it
    a link, when it is whole."""
    with (
        writing(path, if_full="nothing was kept", hint=f"{_MAKE_ONE} ANOTHER_FILE"),
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
