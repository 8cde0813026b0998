"""The cache directory on machines without a writable home."""

import os
import tempfile
from pathlib import Path

import pytest

from stepscope.files import cache_folder


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEPSCOPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_named_cache_directory_is_always_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "stepscope"
    monkeypatch.setenv("STEPSCOPE_CACHE", "/dev/null/none")
    assert cache_folder() == Path("/dev/null/none")


def test_writable_home_is_used(tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "home" / ".cache" / "stepscope"
    assert not (tmp_path / "home" / ".cache").exists(), "asking makes nothing"


@pytest.mark.parametrize("home", ["read-only", "file", "unknown"])
def test_private_temporary_directory_replaces_an_unwritable_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    if home == "read-only":  # root can write anywhere, so this is simulated
        writable = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "home" and writable(path, mode))
    elif home == "file":
        monkeypatch.setenv("HOME", "/dev/null")
    else:
        monkeypatch.setattr(Path, "home", _raise)
    folder = cache_folder()
    assert folder == tmp_path / "tmp" / f"stepscope-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_directory_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", _raise)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (tmp_path / "tmp" / "stepscope-4242").mkdir()
    folder = cache_folder()
    assert not folder.exists()
    with pytest.raises(OSError, match="Not a directory"):
        folder.mkdir(parents=True)


def _raise() -> Path:
    raise RuntimeError("Could not determine home directory.")
