"""`stepscope key new`."""

import json
import stat
from pathlib import Path

from tests.cli.command import stepscope


def test_a_new_key_shows_only_its_public_key(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "key", "new", "lab.key", "--format", "json")
    assert done.returncode == 0, done.stderr
    shown = {row["what"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert shown["public key"] == (tmp_path / "lab.key.pub").read_text().strip()
    assert shown["fingerprint"].startswith("sha256:")
    assert stat.S_IMODE((tmp_path / "lab.key").stat().st_mode) == 0o600
    secret = (tmp_path / "lab.key").read_text().splitlines()[1]
    for piece in (secret, secret[:24], secret[-24:]):
        assert piece not in done.stdout + done.stderr
    assert "--sign lab.key" in done.stderr


def test_a_key_is_not_overwritten_and_never_shown(tmp_path: Path) -> None:
    assert stepscope(tmp_path, "key", "new").returncode == 0
    secret = (tmp_path / "stepscope.key").read_bytes()
    again = stepscope(tmp_path, "key", "new")
    assert again.returncode == 2
    assert "`stepscope.key` already exists" in again.stderr
    assert "--force" in again.stderr
    assert (tmp_path / "stepscope.key").read_bytes() == secret
    assert stepscope(tmp_path, "key", "new", "--force").returncode == 0
    assert (tmp_path / "stepscope.key").read_bytes() != secret
    assert stepscope(tmp_path, "key", "old").returncode == 2
