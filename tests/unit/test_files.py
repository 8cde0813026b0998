"""Atomic writes, and recognizing files by stepscope."""

import errno
import os
import signal
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope import files
from stepscope.errors import StepscopeError
from stepscope.files import (
    check_target,
    claim,
    find_foreign,
    is_of_kind,
    is_ours,
    is_result_of,
    read_schema,
    replacing,
    restore,
    scratch_folder,
    write_atomically,
)

# Newer Pythons warn about forking a process with threads, which polars starts. These children only write files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def die_in(work: Callable[[], None]) -> None:
    """Run `work` in a process that dies, as by SIGKILL, where it calls `kill`."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it was to be killed"


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_folder(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


def replace_folder(folder: Path, content: str) -> None:
    with replacing(folder) as new:
        make_folder(new, content)


def test_file_is_replaced_atomically_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert names(path.parent) == ["file"]


def test_error_keeps_the_old_file_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as new:
            new.write_text("half")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_next_write_removes_leftovers_of_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write() -> None:
        with replacing(path) as new:
            new.write_text("half")
            kill()

    die_in(write)
    assert len(names(tmp_path)) == 1
    write_atomically(path, b"whole")
    assert names(tmp_path) == ["file"]


def test_files_of_a_running_writer_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as slow:
        slow.write_text("slow")
        write_atomically(path, b"quick")
        assert slow.read_text() == "slow"
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_writer_leaves_the_old_or_the_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Killed before, between and after the two renames."""
    folder = make_folder(tmp_path / "kept", "old")
    rename, left = Path.rename, [renames]

    def rename_or_die(self: Path, target: Path) -> Path:
        if not left[0]:
            kill()
        left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        if renames == 2:
            patch.setattr(files, "_discard", kill)
        die_in(lambda: replace_folder(folder, "new"))
    assert folder.exists() == (renames != 1)
    restore(folder)
    assert (folder / "file").read_text() == ("new" if renames == 2 else "old")
    replace_folder(folder, "newer")
    assert names(tmp_path) == ["kept"]
    assert (folder / "file").read_text() == "newer"


def test_directory_of_a_running_writer_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "kept", "old")
    rename = Path.rename
    seen: list[bool] = []

    def rename_and_look(self: Path, target: Path) -> Path:
        result = rename(self, target)
        if not seen:
            restore(folder)
            seen.append(folder.exists())
        return result

    monkeypatch.setattr(Path, "rename", rename_and_look)
    replace_folder(folder, "new")
    assert seen == [False]
    assert (folder / "file").read_text() == "new"


def test_failed_second_rename_restores_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "kept", "old")
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(errno.EIO, "refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="refused"):
        replace_folder(folder, "new")
    assert (folder / "file").read_text() == "old"
    assert names(tmp_path) == ["kept"]


def test_moved_directory_survives_a_new_one_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "kept", "old")
    rename, left = Path.rename, [1]

    def rename_or_die(self: Path, target: Path) -> Path:
        if not left[0]:
            kill()
        left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        die_in(lambda: replace_folder(folder, "new"))
    make_folder(folder, "somebody's")
    replace_folder(folder, "newest")
    assert [path.read_text() for path in tmp_path.glob(".kept.*/old/file")] == ["old"]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_written_through(tmp_path: Path, dangling: bool) -> None:
    target = tmp_path / "target"
    if not dangling:
        make_folder(target, "old")
    link = tmp_path / "link"
    link.symlink_to(target)
    replace_folder(link, "new")
    assert link.readlink() == target
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == ["link", "target"]


def test_next_scratch_directory_removes_an_abandoned_one(tmp_path: Path) -> None:
    def work() -> None:
        with scratch_folder(tmp_path) as folder:
            (folder / "large").write_text("much")
            kill()

    die_in(work)
    assert len(names(tmp_path)) == 1
    with scratch_folder(tmp_path) as folder:
        assert names(tmp_path) == [folder.name]
        with scratch_folder(tmp_path) as second:
            assert folder.is_dir()
            assert second != folder
    assert names(tmp_path) == []


def test_directories_that_only_look_like_scratch_stay(tmp_path: Path) -> None:
    for name in (".stepscope.abcdefgh", "stepscope-abcdefgh", "a.abcdefgh.stepscope-scratch", ".stepscope.a.b"):
        (tmp_path / name).mkdir()
    elsewhere = make_folder(tmp_path / "elsewhere", "precious")
    (tmp_path / ".stepscope.abcdefgh.stepscope-scratch").symlink_to(elsewhere)
    before = names(tmp_path)
    with scratch_folder(tmp_path):
        pass
    assert names(tmp_path) == before
    assert (elsewhere / "file").read_text() == "precious"


def leave_scratch(parent: Path, *, target: str = "") -> Path:
    """Create a scratch directory as a killed process leaves it."""
    folder, lock = files._make_locked(parent, target or "stepscope", target)
    os.close(lock)
    return folder


def test_unlocked_scratch_directory_of_another_host_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "_HOST", "another")
        theirs = leave_scratch(tmp_path)
    (theirs / "work").write_text("precious")
    with scratch_folder(tmp_path):
        pass
    assert (theirs / "work").read_text() == "precious"


def test_the_lock_is_on_a_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    monkeypatch.setattr("fcntl.flock", lambda descriptor, _: locked.append(stat.S_ISREG(os.fstat(descriptor).st_mode)))
    with scratch_folder(tmp_path):
        pass
    assert locked == [True]


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": "theirs/1", "host": "", "target": ""}'])
def test_directory_with_a_scratch_name_but_no_lock_file_stays(tmp_path: Path, content: str | None) -> None:
    folder = make_folder(tmp_path / ".stepscope.abcdefgh.stepscope-scratch", "precious")
    if content is not None:
        (folder / ".stepscope-lock").write_text(content)
    with scratch_folder(tmp_path):
        pass
    assert (folder / "file").read_text() == "precious"
    assert find_foreign(tmp_path, lambda _: False) == folder.name


def test_scratch_directory_abandoned_before_its_lock_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".stepscope.abcdefgh.stepscope-scratch").mkdir()
    assert find_foreign(tmp_path, lambda _: False) is None
    with scratch_folder(tmp_path):
        pass
    assert names(tmp_path) == []


def test_full_disk_leaves_no_scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.write", refuse)
    with pytest.raises(OSError, match="full"), scratch_folder(tmp_path):
        pass
    assert names(tmp_path) == []


def test_scratch_without_a_target_is_never_moved_back(tmp_path: Path) -> None:
    folder = leave_scratch(tmp_path)
    (folder / "old").mkdir()
    (folder / "new").mkdir()
    with scratch_folder(tmp_path):
        pass
    assert names(tmp_path) == []


def test_moved_directory_is_restored_to_a_name_of_any_bytes(tmp_path: Path) -> None:
    target = os.fsdecode(b"caf\xe9\n" + b"x" * 240)
    folder = leave_scratch(tmp_path, target=target)
    make_folder(folder / "old", "old")
    (folder / "new").mkdir()
    restore(tmp_path / target)
    assert names(tmp_path) == [target]
    assert (tmp_path / target / "file").read_text() == "old"


def test_only_scratch_directories_are_ignored(tmp_path: Path) -> None:
    name = ".stepscope.abcdefgh.stepscope-scratch"
    with scratch_folder(tmp_path) as scratch:
        (scratch / "work").touch()
        assert find_foreign(tmp_path, lambda _: False) is None
        (tmp_path / name).write_text("precious")
        assert find_foreign(tmp_path, lambda _: False) == name
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(scratch)
        assert find_foreign(tmp_path, lambda _: False) == name


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
def test_a_name_of_any_length_can_be_written(tmp_path: Path, name: str) -> None:
    write_atomically(tmp_path / name, b"whole")
    assert names(tmp_path) == [name]


def test_a_file_keeps_its_permissions_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    for mode in (0o600, 0o640, 0o666):
        path.chmod(mode)
        write_atomically(path, b"new")
        assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL, errno.EIO])
def test_unsyncable_directory_is_fine_and_a_broken_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(files, "_sync_folder", refuse)
    path = tmp_path / "file"
    with pytest.raises(OSError, match="refused") if code == errno.EIO else nullcontext():
        write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_pipe_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_schema(pipe) == ""
    assert not is_ours(pipe)
    assert not is_result_of(pipe, "stepscope precision")
    for command in (None, "stepscope precision"):
        with pytest.raises(StepscopeError, match="not a regular file"):
            check_target(pipe, force=True, flag="--out", command=command)
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(pipe, b"new")
    assert names(tmp_path) == ["pipe"]
    assert pipe.is_fifo()


def test_a_device_is_not_a_target() -> None:
    with pytest.raises(StepscopeError, match="not a regular file"):
        check_target(Path(os.devnull), force=True, flag="--perfetto")


def test_nothing_counts_as_abandoned_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path):
        assert first.is_dir()
    assert names(tmp_path) == []


def test_restore_ignores_impossible_paths(tmp_path: Path) -> None:
    for path in (Path("a\0b"), Path("x" * 300), tmp_path / "none" / "a", Path("/proc/1/none/a"), Path()):
        restore(path)
    assert names(tmp_path) == []


def test_schema_is_read_from_documents_and_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content, expected in (
        (b'{\n "schema": "stepscope.x/1"\n}\n', "stepscope.x/1"),
        (b'{"a": 1, "schema": "stepscope.x/2"}\n{"cut', "stepscope.x/2"),
        (b'{"name": "web app"}', ""),
        (b'{"schema": 3}', ""),
        (b"[" * 100_000, ""),
        (b"\xff\xfe", ""),
        (b"", ""),
    ):
        path.write_bytes(content)
        assert read_schema(path) == expected
    assert read_schema(tmp_path / "missing") == read_schema(tmp_path) == ""


def test_result_is_recognized_by_its_command(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"schema": "stepscope.precision/1", "command": "stepscope precision --out a.json --force"}')
    assert is_result_of(path, "stepscope precision --out a.json")
    assert not is_result_of(path, "stepscope precision --size small --out a.json")
    check_target(path, force=False, flag="--out", command="stepscope precision --out a.json")
    with pytest.raises(StepscopeError, match="exists"):
        check_target(path, force=False, flag="--out", command="stepscope precision")
    path.write_text('{"schema": "theirs", "command": "stepscope precision --out a.json"}')
    assert not is_result_of(path, "stepscope precision --out a.json")


def test_invalid_target_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    check_target(path, force=False, flag="--out")
    path.write_text("precious")
    with pytest.raises(StepscopeError, match="exists") as caught:
        check_target(path, force=False, flag="--out")
    assert "--force" in caught.value.hint
    check_target(path, force=True, flag="--out")
    with pytest.raises(StepscopeError, match="is a directory"):
        check_target(tmp_path, force=True, flag="--out")
    with pytest.raises(StepscopeError, match="directory not found"):
        check_target(tmp_path / "b" / "a.json", force=True, flag="--out")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x89PNG\r\n\x1a\n", b"<svg></svg>", b"%PDF-1.7", b"\x1f\x8bno"),
        b"<!DOCTYPE html><title>stepscope</title>",
        b'<!DOCTYPE html><meta name="generator" content="stepscope in practice, a blog">',
    ],
)
def test_foreign_files_are_not_ours(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    assert not is_ours(path)
    assert not is_ours(tmp_path)
    assert not is_ours(tmp_path / "missing")


def has_run(folder: Path) -> bool:
    return is_of_kind(folder / "run.json", "stepscope.train/1")


def test_new_and_empty_directories_are_claimed_for_one_kind(tmp_path: Path) -> None:
    for folder in (tmp_path / "new" / "folder", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        claim(folder, "stepscope.train/1")
        (folder / "more").touch()
        claim(folder, "stepscope.train/2")
        with pytest.raises(StepscopeError, match="did not create"):
            claim(folder, "stepscope.comm/1")


def test_foreign_directory_is_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StepscopeError, match=r"notes\.txt"):
        claim(tmp_path, "stepscope.train/1", knows=has_run)
    assert names(tmp_path) == ["notes.txt"]
    with pytest.raises(StepscopeError, match="is not a directory"):
        claim(tmp_path / "notes.txt", "stepscope.train/1")


def test_directory_of_an_earlier_version_is_recognized_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "theirs"}')
    with pytest.raises(StepscopeError):
        claim(tmp_path, "stepscope.train/1", knows=has_run)
    (tmp_path / "run.json").write_text('{"schema": "stepscope.train/1"}')
    claim(tmp_path, "stepscope.train/1", knows=has_run)
    assert names(tmp_path) == ["run.json"]


def test_first_foreign_entry_is_named(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a").touch()
    assert find_foreign(tmp_path, {"own/", "own/a"}.__contains__) is None
    (tmp_path / "own" / "b").touch()
    assert find_foreign(tmp_path, {"own/", "own/a"}.__contains__) == "own/b"
    (tmp_path / "own" / "b").unlink()
    (tmp_path / "own" / "a").unlink()
    (tmp_path / "own" / "a").symlink_to(tmp_path)
    assert find_foreign(tmp_path, {"own/", "own/a"}.__contains__) == "own/a"


@pytest.mark.parametrize(
    ("flag", "reason"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")], ids=["disk", "folder"]
)
def test_target_that_cannot_be_written_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, reason: str
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag))
    with pytest.raises(StepscopeError, match=f"cannot write to .*: {reason}"):
        check_target(tmp_path / "a.svg", force=False, flag="--plot")
