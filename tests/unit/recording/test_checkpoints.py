"""Checkpoints are atomic, whatever happens while one is written."""

import contextlib
import errno
import os
from pathlib import Path
from typing import IO

import pytest

from stepscope.errors import StepscopeError
from stepscope.recording.rows import checkpoints
from stepscope.recording.rows.checkpoints import forget_all, newest, save
from stepscope.spec import SIZES, Training, Workload

TRAINING = Training(workload=Workload(model=SIZES["nano"]))


class KilledError(BaseException):
    """Simulates a kill: nothing runs afterwards, not even cleanup."""


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
def test_damaged_checkpoint_is_an_error_with_a_command(tmp_path: Path, damage: object) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    path = tmp_path / "step-00000002.pt"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(StepscopeError, match="damaged checkpoint") as caught:
        newest(tmp_path)
    assert "resumes from step 1" in caught.value.detail
    for name in caught.value.hint.split()[1:]:
        Path(name).unlink()
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 1


def test_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1)

    def fill(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StepscopeError, match="No space left") as caught:
        save(tmp_path, 2, TRAINING, "", fill)
    assert "previous checkpoint is intact" in caught.value.detail
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".pt"]
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 1


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failed_write_leaves_no_temporary_file(tmp_path: Path, failure: type[BaseException]) -> None:
    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise failure

    with pytest.raises(failure):
        save(tmp_path, 2, TRAINING, "", fail)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_that_the_writer_ignores_is_an_error(tmp_path: Path) -> None:
    def fill(file: IO[bytes]) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            os.dup2(full.fileno(), file.fileno())
        with contextlib.suppress(OSError):
            file.write(b"x" * 1_000_000)
        raise RuntimeError("unexpected pos 64")

    with pytest.raises(StepscopeError, match=r"cannot write to .*No space left"):
        save(tmp_path, 1, TRAINING, "", fill)
    assert list(tmp_path.iterdir()) == []


def test_state_is_deleted_if_its_manifest_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)

    def fill(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write_atomically", fill)
    with pytest.raises(StepscopeError, match="No space left"):
        _save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.json", "step-00000001.pt"]


@pytest.mark.parametrize("unlinked", range(5))
def test_kill_while_deleting_leaves_complete_checkpoints(
    tmp_path: Path, unlinked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    (tmp_path / "step-00000003.part").touch()
    _kill_after(unlinked, monkeypatch)
    with pytest.raises(KilledError):
        forget_all(tmp_path)
    monkeypatch.undo()
    found = newest(tmp_path)
    assert (found is not None) == (unlinked < 2)
    forget_all(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_kill_are_deleted_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    _kill_after(1, monkeypatch)
    with pytest.raises(KilledError):
        _save(tmp_path, 3)
    monkeypatch.undo()
    assert (tmp_path / "step-00000001.pt").exists()
    for name in ("step-00000004.part", "step-00000004.json.part", "step-00000004.pt"):
        (tmp_path / name).touch()
    later = tmp_path / "step-00000009.part"
    later.touch()
    _save(tmp_path, 5)
    kept = [f"step-0000000{step}.{kind}" for step in (3, 5) for kind in ("json", "pt")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, later.name]


def test_other_files_are_never_deleted(tmp_path: Path) -> None:
    for name in ("step-best.pt", "step-by-step.json", "step-00000001.txt", "step-1.pt", "step-00000001.pt.bak"):
        (tmp_path / name).write_text("theirs")
    before = sorted(path.name for path in tmp_path.iterdir())
    for step in (1, 2, 3):
        _save(tmp_path, step)
    forget_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def _kill_after(unlinked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a kill after a number of deletions."""
    left, unlink = unlinked, Path.unlink

    def count_down(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", count_down)


@pytest.mark.parametrize("calls", range(1, 9))
def test_kill_at_any_moment_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a kill at the n-th sync, rename or hash."""
    _save(tmp_path, 1)

    left = calls

    def count_down(home: object, name: str) -> None:
        original = getattr(home, name)

        def wrapped(*arguments: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left <= 0:
                raise KilledError
            return original(*arguments, **named)

        monkeypatch.setattr(home, name, wrapped)

    count_down(os, "fsync")
    for name in ("_digest", "write_atomically", "_forget_old"):
        count_down(checkpoints, name)
    count_down(Path, "replace")
    count_down(Path, "unlink")  # a killed process does not clean up
    with contextlib.suppress(KilledError):
        _save(tmp_path, 2, b"new")
    monkeypatch.undo()
    found = newest(tmp_path)
    assert found is not None
    assert found.path.read_bytes() == {1: b"state", 2: b"new"}[found.manifest.step]
    assert (found.manifest.step == 2) == (calls >= 7)
