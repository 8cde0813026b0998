"""Reading files named by users: only regular ones, up to a size limit, with one kind of error for damage."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.files import decode, open_plain, read_plain
from stepscope.jobs.report.data import STATE_NAME, read_state
from stepscope.jobs.slurm.row_ledger import read_own
from stepscope.jobs.slurm.submissions import Job
from stepscope.recording.rows import checkpoints
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.links import read_links
from stepscope.recording.rows.precision_report import read_report
from stepscope.recording.rows.results_file import ResultsFile, read_rows
from stepscope.recording.rows.training_log import read_log, read_memory, read_run
from stepscope.recover.study.runs import read_truths
from stepscope.spec import grid_from_toml

DEEP = 100_000


def open_results(path: Path) -> None:
    with ResultsFile.open(path, BenchRow):
        pass


# A document, its file name, and the function that reads it.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "results": ("results.jsonl", lambda path: read_rows(path, BenchRow)),
    "results to resume": ("results.jsonl", open_results),
    "a job's results": ("results.jsonl", read_own),
    "a job's outcome": ("outcome-0.json", lambda path: Job(id="7", index=0, folder=path.parent).outcomes()),
    "links": ("links.json", read_links),
    "precision": ("precision.json", read_report),
    "log": ("log.jsonl", read_log),
    "run": ("run.json", lambda path: read_run(path.parent)),
    "memory": ("memory.json", lambda path: read_memory(path.parent)),
    "checkpoint": ("step-00000001.json", lambda path: checkpoints.newest(path.parent)),
    "report": (STATE_NAME, lambda path: read_state(path.parent)),
    "settings of a study": ("settings.json", read_truths),
}
DAMAGE = {
    "nested deeply": b'{"schema": "stepscope.bench/1", "key": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "nested deeply all over": b"[" * DEEP + b"]" * DEEP + b"\n",
    "not UTF-8": b'{"schema": "\xff\xfe"}\n',
    "not UTF-8 under a known name": b'{"step": 1, "schema": "stepscope.bench/1", "key": "\xc3\x28"}\n',
    "another document": b'{"schema": 5, "a": [1e400, -1, null]}\n',
    "no object": b"17\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_document_is_an_error_that_names_it(tmp_path: Path, name: str, damage: str) -> None:
    file, read = READERS[name]
    (tmp_path / file).write_bytes(DAMAGE[damage])
    with pytest.raises(StepscopeError) as raised:
        read(tmp_path / file)
    assert str(tmp_path) in raised.value.message


@pytest.mark.parametrize("name", sorted(set(READERS) - {"results to resume"}))
def test_pipe_instead_of_a_document_is_rejected_at_once(tmp_path: Path, name: str) -> None:
    file, read = READERS[name]
    os.mkfifo(tmp_path / file)
    done = threading.Event()

    def look() -> None:
        with pytest.raises((StepscopeError, OSError)):
            read(tmp_path / file)
        done.set()

    threading.Thread(target=look, daemon=True).start()
    assert done.wait(60)


def test_endless_settings_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path / "pipe", "not a regular file"), (Path("/dev/zero"), "not a regular file")):
        with pytest.raises(StepscopeError, match="cannot read settings file") as raised:
            grid_from_toml(path)
        assert why in raised.value.detail


def test_a_file_larger_than_the_bound_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert read_plain(path, most_bytes=11) == b"x" * 11
    with pytest.raises(OSError, match="larger than"):
        read_plain(path, most_bytes=10)


@pytest.mark.parametrize("size", [0, 5])
def test_file_longer_than_its_size_is_read_to_its_end_or_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "growing"
    path.write_bytes(b"x" * 11)
    fstat = os.fstat
    monkeypatch.setattr(
        "os.fstat", lambda descriptor: os.stat_result((*fstat(descriptor)[:6], size, *fstat(descriptor)[7:]))
    )
    assert read_plain(path, most_bytes=11) == b"x" * 11
    with pytest.raises(OSError, match="larger than"):
        read_plain(path, most_bytes=10)


def test_directory_and_device_are_not_regular_files(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(StepscopeError, match="cannot read a claim"), open_plain(path, what="a claim"):
            pass


def test_truncation_is_distinguished_from_other_damage() -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        decode(b'{"a": "b', dict[str, str])
    assert not isinstance(raised.value, msgspec.ValidationError)
    for content in (b"[" * DEEP, b'{"a": "\xff"}', b'{"a": 1}'):
        with pytest.raises(msgspec.ValidationError):
            decode(content, dict[str, str])
