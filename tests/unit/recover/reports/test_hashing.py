"""Hashes that anybody can reproduce."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import BinaryIO

import pytest

from stepscope.errors import StepscopeError
from stepscope.recover.reports.signed_report import base_name, hash_files, hash_weights

SHELL = "find -L . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub dir").mkdir(parents=True)
    for name in ("B.safetensors", "a.safetensors", "sub dir/é", "sub dir.txt", ".hidden"):
        (folder / name).write_text(name)
    (tmp_path / "blob").write_text("far away")
    (folder / "linked").symlink_to(tmp_path / "blob")  # as in model caches
    return folder


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_a_weights_directory_has_the_hash_of_the_shell_command(weights: Path) -> None:
    shell = subprocess.run(["sh", "-c", SHELL], cwd=weights, capture_output=True, text=True, check=True).stdout
    hashed = hash_weights(weights)
    assert hashed.sha256 == shell.split()[0]
    assert (hashed.name, hashed.kind) == ("model", "folder")
    assert hashed.bytes == sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())


def test_file_names_are_part_of_the_hash_of_a_directory(weights: Path) -> None:
    before = hash_weights(weights).sha256
    assert hash_weights(weights.rename(weights.with_name("moved"))).sha256 == before
    moved = weights.with_name("moved")
    (moved / "a.safetensors").rename(moved / "C.safetensors")
    assert hash_weights(moved).sha256 != before


def test_a_weights_file_has_the_hash_of_its_bytes(weights: Path) -> None:
    one = hash_weights(weights / "B.safetensors")
    (same,) = hash_files([weights / "B.safetensors"])
    assert (one.kind, one.sha256, one.bytes) == ("file", same.sha256, len("B.safetensors"))


def test_files_of_a_directory_are_listed_in_byte_order(weights: Path) -> None:
    names = [file.name for file in hash_files([weights])]
    assert names == [
        "model/.hidden",
        "model/B.safetensors",
        "model/a.safetensors",
        "model/linked",
        "model/sub dir.txt",
        "model/sub dir/é",
    ]


def test_unreadable_files_and_links_are_errors(weights: Path) -> None:
    (weights / "up").symlink_to(weights)
    with pytest.raises(StepscopeError, match="links to directories"):
        hash_files([weights])
    (weights / "up").unlink()
    (weights / "gone").symlink_to(weights / "nowhere")
    with pytest.raises(StepscopeError, match="cannot read"):
        hash_files([weights])
    (weights / "gone").unlink()
    os.mkfifo(weights / "pipe")
    with pytest.raises(StepscopeError, match="not a regular file"):
        hash_files([weights])


def test_names_with_line_breaks_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a\nb").touch()
    with pytest.raises(StepscopeError, match="line breaks"):
        hash_weights(tmp_path)


def test_an_empty_weights_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="is empty"):
        hash_weights(tmp_path)


def test_a_file_that_changes_while_hashing_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("a")
    digest = hashlib.file_digest

    def write_meanwhile(file: BinaryIO, name: str) -> object:
        path.write_text("ab")
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", write_meanwhile)
    with pytest.raises(StepscopeError, match="changed while"):
        hash_files([path])


def test_base_names_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    assert [base_name(Path(name)) for name in (".", "deep/..", "deep", "../run/")] == ["run", "run", "deep", "run"]
    assert base_name(Path(os.fsdecode(b"caf\xe9.json"))) == "caf\\xe9.json"
