"""A checkpoint is whole or not there, whatever happens while it is written."""

import contextlib
import errno
import os
from pathlib import Path
from typing import IO

import pytest

from stepscope.errors import StepscopeError
from stepscope.recording import checkpoints
from stepscope.recording.checkpoints import newest, save
from stepscope.spec import SIZES, Training, Workload

TRAINING = Training(workload=Workload(model=SIZES["nano"]))


def _save(folder: Path, step: int, content: bytes = b"state") -> None:
    def write(file: IO[bytes]) -> None:
        file.write(content)

    save(folder, step, TRAINING, "", write)


def test_the_newest_is_found_and_only_two_are_kept(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for step in (5, 10, 15):
        _save(tmp_path, step, b"state %d" % step)
    found = newest(tmp_path)
    assert found is not None
    assert (found.manifest.step, found.path.read_bytes()) == (15, b"state 15")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-000000{step}.{kind}" for step in (10, 15) for kind in ("json", "pt")
    ]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"x" + content[1:]])
def test_a_damaged_one_is_an_error_that_says_what_to_do(tmp_path: Path, damage: object) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    path = tmp_path / "step-00000002.pt"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(StepscopeError, match="damaged checkpoint") as caught:
        newest(tmp_path)
    assert "goes on from step 1" in caught.value.detail
    for name in caught.value.hint.split()[1:]:
        Path(name).unlink()
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 1


def test_a_full_disk_leaves_the_one_before(tmp_path: Path) -> None:
    _save(tmp_path, 1)

    def fill(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StepscopeError, match="No space left") as caught:
        save(tmp_path, 2, TRAINING, "", fill)
    assert "the checkpoint before it is whole" in caught.value.detail
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".pt"]
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 1


@pytest.mark.parametrize("calls", range(1, 9))
def test_a_kill_at_any_moment_leaves_the_one_before_or_the_new_one(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the n-th time that something is forced to disk, renamed or hashed."""
    _save(tmp_path, 1)

    class KilledError(BaseException):
        pass

    left = calls

    def count_down(home: object, name: str) -> None:
        original = getattr(home, name)

        def wrapped(*arguments: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise KilledError
            return original(*arguments)

        monkeypatch.setattr(home, name, wrapped)

    for name in ("_to_disk", "_digest", "write_atomically", "_forget_old"):
        count_down(checkpoints, name)
    count_down(Path, "replace")
    with contextlib.suppress(KilledError):
        _save(tmp_path, 2, b"new")
    monkeypatch.undo()
    found = newest(tmp_path)
    assert found is not None
    assert found.path.read_bytes() == {1: b"state", 2: b"new"}[found.manifest.step]
    assert (found.manifest.step == 2) == (calls >= 7)
