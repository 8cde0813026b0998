"""Formats are recognized by content, and unsupported files are clear errors."""

import gzip
import os
import sqlite3
from pathlib import Path

import polars as pl
import pytest

from stepscope import files
from stepscope.errors import StepscopeError
from stepscope.recording import store, tables
from stepscope.recording.cache import read_cached
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Manifest, MemoryFacts, Recording
from tests.unit.kineto_files import training_step, write_trace


def test_trace_is_recognized_by_its_content(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", training_step()).rename(tmp_path / "no-ending")
    assert open_recording(path).manifest.source == "pytorch profiler"


def test_recording_survives_saving(tmp_path: Path) -> None:
    first = open_recording(write_trace(tmp_path / "t.json", training_step()))
    store.save(first, tmp_path / "kept")
    again = open_recording(tmp_path / "kept")
    assert again.manifest == first.manifest
    for name in store.TABLE_NAMES:
        assert getattr(again, name).equals(getattr(first, name))


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    recording = Recording(manifest=Manifest(source="stepscope"))
    store.save(recording, tmp_path / "kept")
    with pytest.raises(StepscopeError, match="exists"):
        store.save(recording, tmp_path / "kept")
    store.save(recording, tmp_path / "kept", force=True)
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_foreign_directory_with_a_manifest_is_never_replaced(tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "src").mkdir(parents=True)
    (app / "manifest.json").write_text('{"name": "web app", "start_url": "/"}')
    (app / "src" / "index.js").write_text("work")
    with pytest.raises(StepscopeError, match="not a recording"):
        store.save(Recording(manifest=Manifest(source="stepscope")), app, force=True)
    assert (app / "src" / "index.js").read_text() == "work"
    assert [one.name for one in tmp_path.iterdir()] == ["app"]


@pytest.mark.parametrize("name", ["notes.md", "figures/a.png", "kernels.csv", "attributed.parquet"])
def test_recording_with_other_files_is_never_replaced(tmp_path: Path, name: str) -> None:
    recording = Recording(manifest=Manifest(source="stepscope"))
    store.save(recording, tmp_path / "kept")
    (tmp_path / "kept" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "kept" / name).write_text("work")
    with pytest.raises(StepscopeError, match="not part of the recording") as caught:
        store.save(recording, tmp_path / "kept", force=True)
    assert name.split("/")[0] in caught.value.message
    assert (tmp_path / "kept" / name).read_text() == "work"


def test_cached_results_are_replaced_with_the_recording(tmp_path: Path) -> None:
    raw = tmp_path / "trace.json.gz"
    raw.touch()
    recording = Recording(manifest=Manifest(source="stepscope"))
    store.save(recording, tmp_path / "kept", raw=raw)
    for name in ("attributed-0123456789ab.parquet", "findings-0123456789ab.json"):
        (tmp_path / "kept" / name).touch()
    store.save(recording, tmp_path / "kept", force=True)
    assert [one.name for one in (tmp_path / "kept").iterdir()] == ["manifest.json"]


def test_the_same_command_replaces_its_own_recording(tmp_path: Path) -> None:
    recording = Recording(manifest=Manifest(source="stepscope", command="stepscope profile --force"))
    store.save(recording, tmp_path / "kept")
    with pytest.raises(StepscopeError, match="exists"):
        store.save(recording, tmp_path / "kept", command="stepscope profile --size small")
    store.save(recording, tmp_path / "kept", command="stepscope profile")


@pytest.mark.parametrize("dangling", [False, True])
def test_symlink_to_a_recording_is_followed(tmp_path: Path, dangling: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if not dangling:
        store.save(Recording(manifest=Manifest(source="stepscope", file="old")), target)
    link.symlink_to(target)
    store.save(Recording(manifest=Manifest(source="stepscope", file="new")), link, force=True)
    assert link.is_symlink()
    assert store.load(target).manifest.file == "new"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "target"]


def test_recording_interrupted_by_a_kill_is_restored(tmp_path: Path) -> None:
    store.save(Recording(manifest=Manifest(source="stepscope", file="old")), tmp_path / "kept")
    scratch, lock = files._make_locked(tmp_path, "kept", "kept")
    (scratch / "new").mkdir()
    (tmp_path / "kept").rename(scratch / "old")
    os.close(lock)
    assert open_recording(tmp_path / "kept").manifest.file == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", ["raw.notes.txt", "raw", "raw.json.bak", "raw.d"])
def test_only_files_of_recorders_are_part_of_a_recording(tmp_path: Path, name: str) -> None:
    recording = Recording(manifest=Manifest(source="stepscope"))
    store.save(recording, tmp_path / "kept")
    (tmp_path / "kept" / name).write_text("work")
    with pytest.raises(StepscopeError, match="not part of the recording"):
        store.save(recording, tmp_path / "kept", force=True)
    assert not store.delete(tmp_path / "kept")
    assert (tmp_path / "kept" / name).read_text() == "work"


def test_empty_directory_is_filled_with_the_manifest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, raw = tmp_path / "kept", tmp_path / "trace.json.gz"
    folder.mkdir()
    raw.touch()
    before = folder.stat().st_ino
    rename, moved = Path.rename, list[str]()

    def watch(self: Path, target: Path) -> Path:
        moved.append(target.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watch)
    store.save(Recording(manifest=Manifest(source="stepscope", file="new")), folder, raw=raw)
    assert moved == ["raw.json.gz", "manifest.json"]
    assert folder.stat().st_ino == before
    assert store.load(folder).manifest.file == "new"


def test_wrong_event_count_is_reported_for_the_manifest(tmp_path: Path) -> None:
    facts = MemoryFacts(events=1 << 40)
    store.save(Recording(manifest=Manifest(source="stepscope", memory=facts)), tmp_path / "kept")
    with pytest.raises(StepscopeError) as caught:
        store.load(tmp_path / "kept")
    assert caught.value.detail.startswith("`manifest.json`")


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_put_in_place", fail)
    with pytest.raises(StepscopeError, match="No space left"):
        store.save(Recording(manifest=Manifest(source="stepscope")), tmp_path / "kept")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polars reports it as a malformed file."""

    def fail(*_: object) -> None:
        raise pl.exceptions.ComputeError(
            "parquet: File out of specification: underlying IO error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(store, "write_table", fail)
    kernels = tables.conform("kernels", pl.DataFrame({"name": ["k"], "start_ns": [0], "end_ns": [1]}))
    with pytest.raises(files.FullDiskError) as caught:
        store.save(Recording(manifest=Manifest(source="stepscope"), kernels=kernels), tmp_path / "kept")
    assert caught.value.message == f"cannot write to `{tmp_path / 'kept'}`: No space left on device"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\x80\x04\x95pickle", "pickle"),
        (b"plain words", "unrecognized file format"),
        (gzip.compress(b"plain words", mtime=0), "unrecognized file format"),
        (b"\x1f\x8bnot gzip at all", "damaged"),
    ],
)
def test_unreadable_file_says_what_was_expected(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match=said):
        open_recording(path)


def test_missing_files_and_directories_are_errors(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "gone", "not found"), (tmp_path, "not a recording"), (Path("/dev/zero"), "regular")):
        with pytest.raises(StepscopeError, match=said):
            open_recording(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StepscopeError, match="not a regular file"):
        open_recording(tmp_path / "pipe")


def test_foreign_database_is_rejected(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        database.execute("create table customers (name)")
    database.close()
    with pytest.raises(StepscopeError):
        open_recording(tmp_path / "other.sqlite")


@pytest.mark.parametrize("damage", ["manifest", "table", "schema"])
def test_a_damaged_recording_is_an_error(tmp_path: Path, damage: str) -> None:
    store.save(open_recording(write_trace(tmp_path / "t.json", training_step())), tmp_path / "kept")
    manifest = tmp_path / "kept" / "manifest.json"
    if damage == "manifest":
        manifest.write_text("{")
    elif damage == "schema":
        manifest.write_text(manifest.read_text().replace("recording/1", "recording/99"))
    else:
        (tmp_path / "kept" / "kernels.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(StepscopeError):
        open_recording(tmp_path / "kept")


def test_second_read_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    path = write_trace(tmp_path / "t.json", training_step())
    read = []

    def reader(one: Path) -> Recording:
        read.append(one)
        return open_recording(one)

    first, folder = read_cached(path, reader)
    again, same = read_cached(path, reader)
    assert read == [path]
    assert folder == same
    assert again.kernels.equals(first.kernels)
    write_trace(path, training_step()[:-1])
    changed, _ = read_cached(path, reader)
    assert len(read) == 2
    assert changed.kernels.height == first.kernels.height - 1


def test_damaged_cache_entry_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    path = write_trace(tmp_path / "t.json", training_step())
    _, folder = read_cached(path, open_recording)
    assert folder is not None
    (folder / "kernels.parquet").write_bytes(b"")
    again, _ = read_cached(path, open_recording)
    assert again.kernels.height == 7


def test_damaged_entry_deleted_by_another_process_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    path = write_trace(tmp_path / "t.json", training_step())
    _, folder = read_cached(path, open_recording)
    assert folder is not None
    (folder / "kernels.parquet").write_bytes(b"")

    def delete_after_another(entry: Path) -> bool:
        assert delete(entry)
        return delete(entry)

    delete = store.delete
    monkeypatch.setattr(store, "delete", delete_after_another)
    again, _ = read_cached(path, open_recording)
    assert again.kernels.height == 7


def test_unwritable_cache_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    recording, folder = read_cached(write_trace(tmp_path / "t.json", training_step()), open_recording)
    assert recording.kernels.height == 7
    assert folder is None


def test_read_only_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    path = write_trace(tmp_path / "t.json", training_step())
    _, folder = read_cached(path, open_recording)

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("os.utime", refuse)
    again, same = read_cached(path, open_recording)
    assert same == folder
    assert again.kernels.height == 7


def test_full_disk_fails_save_but_not_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise pl.exceptions.ComputeError("No space left on device (os error 28)")

    path = write_trace(tmp_path / "t.json", training_step())
    recording = open_recording(path)
    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(StepscopeError, match="No space left"):
        store.save(recording, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    assert read_cached(path, open_recording)[1] is None


def test_cache_never_deletes_foreign_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.recording.cache._WORTH_S", 0.0)
    monkeypatch.setattr("stepscope.recording.cache._MOST_BYTES", 0)
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    for name in ("app", "0" * 24):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "manifest.json").write_text('{"name": "web app"}')
        (tmp_path / "cache" / name / "index.js").write_text("work")
    read_cached(write_trace(tmp_path / "t.json", training_step()), open_recording)
    for name in ("app", "0" * 24):
        assert (tmp_path / "cache" / name / "index.js").read_text() == "work"
