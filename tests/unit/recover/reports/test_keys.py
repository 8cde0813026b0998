"""Only the owner can read a private key, from its creation on."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stepscope.errors import StepscopeError
from stepscope.recover.reports.keys import load_private_key, new_key, public_key_of, read_public_key

WATCHED = """
import os, sys
from pathlib import Path
from stepscope.recover.reports import keys
os.umask(0)
opened = os.open
def watch(path, flags, mode=0o777, **rest):
    if flags & os.O_CREAT:
        descriptor = opened(path, flags, mode, **rest)
        print(Path(path).name, oct(os.fstat(descriptor).st_mode & 0o7777), os.fstat(descriptor).st_size)
        return descriptor
    return opened(path, flags, mode, **rest)
os.open = watch
keys.new_key(Path(sys.argv[1]), force=len(sys.argv) > 2)
"""


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_new_key_pair_matches(tmp_path: Path) -> None:
    public = new_key(tmp_path / "a.key")
    assert public_key_of(load_private_key(tmp_path / "a.key")) == public
    assert (tmp_path / "a.key.pub").read_text() == public.text + "\n"
    assert read_public_key(tmp_path / "a.key.pub") == public
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.key", "a.key.pub"]


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_a_private_key_is_never_readable_by_others_whatever_the_umask(more: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "a.key"), *more]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1:] for line in made if line.startswith("a.key ")] == [["0o600", "0"]]
    assert mode_of(tmp_path / "a.key") == 0o600
    assert mode_of(tmp_path / "a.key.pub") == 0o644


@pytest.mark.parametrize("existing", ["a.key", "a.key.pub"])
def test_existing_files_are_not_overwritten(existing: str, tmp_path: Path) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(StepscopeError, match="` already exists\\n"):
        new_key(tmp_path / "a.key")
    assert (tmp_path / existing).read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [existing]


def test_a_file_created_concurrently_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    (tmp_path / "a.key.pub").write_text("precious")
    with pytest.raises(StepscopeError, match="cannot write"):
        new_key(tmp_path / "a.key")
    assert (tmp_path / "a.key.pub").read_text() == "precious"
    assert not (tmp_path / "a.key").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / "a.key").symlink_to(target)
    with pytest.raises(StepscopeError, match="` already exists\\n"):
        new_key(tmp_path / "a.key")
    assert not target.exists()
    target.write_text("precious")
    target.chmod(0o644)
    new_key(tmp_path / "a.key", force=True)
    assert target.read_text() == "precious"
    assert not (tmp_path / "a.key").is_symlink()
    assert mode_of(tmp_path / "a.key") == 0o600


def test_force_replaces_the_key_and_leaves_no_other_files(tmp_path: Path) -> None:
    first = new_key(tmp_path / "a.key")
    (tmp_path / "a.key").chmod(0o644)
    second = new_key(tmp_path / "a.key", force=True)
    assert first != second
    assert read_public_key(tmp_path / "a.key.pub") == second
    assert mode_of(tmp_path / "a.key") == 0o600
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="cannot write"):
        new_key(tmp_path / "none" / "a.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o660])
def test_a_key_readable_by_others_is_rejected(mode: int, tmp_path: Path) -> None:
    new_key(tmp_path / "a.key")
    (tmp_path / "a.key").chmod(mode)
    with pytest.raises(StepscopeError, match="other users can read") as caught:
        load_private_key(tmp_path / "a.key")
    assert caught.value.hint == f"chmod 600 {tmp_path / 'a.key'}"
    (tmp_path / "a.key").chmod(0o400)
    load_private_key(tmp_path / "a.key")


def test_an_invalid_key_is_rejected_without_showing_its_content(tmp_path: Path) -> None:
    locked, raw = Ed25519PrivateKey.generate(), (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    curve = ec.generate_private_key(ec.SECP256R1())
    contents = {
        "secret words": "no private key",
        "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n": "no private key",
        locked.private_bytes(*raw, serialization.BestAvailableEncryption(b"p")).decode(): "passphrase",
        curve.private_bytes(*raw, serialization.NoEncryption()).decode(): "unsupported key type",
        public_key_of(locked).text: "is a public key",
    }
    path = tmp_path / "a.key"
    for content, message in contents.items():
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(content)
        with pytest.raises(StepscopeError, match=message) as caught:
            load_private_key(path)
        assert not any(line in str(caught.value) for line in content.splitlines())


def test_pipes_and_directories_are_not_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, message in (("pipe", "not a regular file"), ("folder", "cannot read"), ("missing", "No such file")):
        with pytest.raises(StepscopeError, match=message):
            load_private_key(tmp_path / name)


def test_an_old_key_survives_a_failed_write(tmp_path: Path) -> None:
    old = new_key(tmp_path / "a.key")
    (tmp_path / "a.key.pub").unlink()
    (tmp_path / "a.key.pub").mkdir()
    with pytest.raises(StepscopeError):
        new_key(tmp_path / "a.key", force=True)
    assert public_key_of(load_private_key(tmp_path / "a.key")) == old
