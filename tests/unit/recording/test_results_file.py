"""A results file survives truncated lines, full disks, other versions and second writers."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.recording.rows.bench import BenchRow, Doubt, Retry, Status, case_key
from stepscope.recording.rows.memory_summary import MemoryRow
from stepscope.recording.rows.results_file import ResultsFile, read_rows
from tests.unit.rows import row

RECORDED = Path(__file__).parents[3] / "bench/results"
ROWS = [row(context=context) for context in (128, 256, 512)]


def write(path: Path, rows: list[bytes]) -> Path:
    path.write_bytes(b"".join(rows))
    return path


def lines() -> list[bytes]:
    return [msgspec.json.encode(one) + b"\n" for one in ROWS]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    with ResultsFile.open(path, BenchRow) as results:
        for one in ROWS:
            results.append(one)
    assert read_rows(path, BenchRow) == (tuple(ROWS), ())


@pytest.mark.parametrize("kept_bytes", [1, 10, 500, -2])
def test_truncated_last_line_is_moved_away_and_the_rest_kept(tmp_path: Path, kept_bytes: int) -> None:
    whole = lines()
    path = write(tmp_path / "results.jsonl", [*whole[:2], whole[2][:kept_bytes]])
    with ResultsFile.open(path, BenchRow) as results:
        assert results.rows == tuple(ROWS[:2])
        assert results.damaged_bytes == len(whole[2][:kept_bytes])
        results.append(ROWS[2])
    assert read_rows(path, BenchRow) == (tuple(ROWS), ())
    assert path.read_bytes() == b"".join(whole)
    assert (tmp_path / "results.jsonl.damaged").read_bytes() == whole[2][:kept_bytes] + b"\n"


def test_last_line_without_a_newline_is_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [b"".join(lines()).rstrip()])
    with ResultsFile.open(path, BenchRow) as results:
        assert results.damaged_bytes == 0
        results.append(row(context=1024))
    assert len(read_rows(path, BenchRow)[0]) == 4


def test_zeros_after_a_power_failure_are_moved_away(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [*lines(), b"\0" * 4096])
    with ResultsFile.open(path, BenchRow) as results:
        assert len(results.rows) == 3
    assert read_rows(path, BenchRow) == (tuple(ROWS), ())


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    whole = lines()
    path = write(tmp_path / "results.jsonl", [whole[0], whole[1][:50] + b"\n", whole[2]])
    before = path.read_bytes()
    with pytest.raises(StepscopeError, match="line 2"), ResultsFile.open(path, BenchRow):
        pass
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        b'{"schema":"stepscope.bench/9"}\n',
        b'{"a":1}\n',
        b"[1,2]\n",
        b"my notes",
        b'{"schema":"mine',
        b"\0" * 99,
    ],
)
def test_file_of_another_version_is_rejected_and_unchanged(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path / "results.jsonl", [line])
    with pytest.raises(StepscopeError, match="not a results file from this version"), ResultsFile.open(path, BenchRow):
        pass
    assert path.read_bytes() == line


@pytest.mark.parametrize("kept_bytes", [1, 20, 500])
def test_truncated_first_line_is_recognized_by_its_start(tmp_path: Path, kept_bytes: int) -> None:
    path = write(tmp_path / "results.jsonl", [lines()[0][:kept_bytes]])
    with ResultsFile.open(path, BenchRow) as results:
        assert results.damaged_bytes == kept_bytes
        results.append(ROWS[0])
    assert read_rows(path, BenchRow) == ((ROWS[0],), ())


def test_the_newest_row_of_a_case_wins(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile.open(path, BenchRow) as results:
        results.append(row("oom", context=128))
        results.append(row(context=128))
    ((one,), _) = read_rows(path, BenchRow)
    assert one.status == "ok"
    assert len(path.read_bytes().splitlines()) == 2


def test_second_writer_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with (
        ResultsFile.open(path, BenchRow),
        pytest.raises(StepscopeError, match="another sweep is writing"),
        ResultsFile.open(path, BenchRow),
    ):
        pass


def test_reading_notes_skipped_lines_and_changes_nothing(tmp_path: Path) -> None:
    whole = lines()
    path = write(tmp_path / "results.jsonl", [*whole[:2], whole[2][:40]])
    assert read_rows(path, BenchRow) == (tuple(ROWS[:2]), ("skipped: a truncated last line (40 bytes)",))
    assert path.read_bytes().endswith(whole[2][:40])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"precision":"fp32"', b'"precision":"fp4"'),
        (b'"attention":"naive"', b'"attention":"linear"'),
        (b'"status":"ok"', b'"status":"postponed"'),
        (b'"context":', b'"a_setting_of_tomorrow":1,"context":'),
    ],
)
def test_rows_of_a_later_version_are_skipped_and_counted(tmp_path: Path, old: bytes, new: bytes) -> None:
    whole = lines()
    assert old in whole[1]
    path = write(tmp_path / "results.jsonl", [whole[0], whole[1].replace(old, new), whole[2]])
    rows, (remark,) = read_rows(path, BenchRow)
    assert rows == (ROWS[0], ROWS[2])
    assert remark == "skipped: 1 row from a later version of stepscope"
    before = path.read_bytes()
    with ResultsFile.open(path, BenchRow) as results:
        assert results.rows == (ROWS[0], ROWS[2])
    assert path.read_bytes() == before
    with pytest.raises(StepscopeError, match="no rows") as raised:
        read_rows(write(tmp_path / "results.jsonl", [whole[1].replace(old, new)]), BenchRow)
    assert "1 row from a later version" in raised.value.detail


@pytest.mark.parametrize("content", [b"", b"hi", b"not json at all\n"])
def test_file_without_rows_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StepscopeError, match="no rows"):
        read_rows(write(tmp_path / "results.jsonl", [content]), BenchRow)


def test_non_regular_file_is_rejected_and_unchanged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "results.jsonl")
    with pytest.raises(StepscopeError, match="not a file"), ResultsFile.open(tmp_path / "results.jsonl", BenchRow):
        pass
    assert (tmp_path / "results.jsonl").is_fifo()


def test_existing_empty_file_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", [])
    with ResultsFile.open(path, BenchRow):
        pass
    assert path.exists()


def test_nothing_is_left_behind_when_no_row_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "results.jsonl"
    with pytest.raises(RuntimeError), ResultsFile.open(path, BenchRow):
        raise RuntimeError("refused")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    real_write = os.write

    def fill_up(descriptor: int, content: bytes) -> int:
        if len(content) > 100:
            return real_write(descriptor, content[:100])  # a part fits...
        raise OSError(errno.ENOSPC, "No space left on device")

    with ResultsFile.open(path, BenchRow) as results:
        results.append(ROWS[0])
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", lambda d, c: fill_up(d, c if len(c) != len(lines()[1]) else c[:150]))
        with pytest.raises(StepscopeError, match="No space left"):
            results.append(ROWS[1])
    assert path.read_bytes() == before


def test_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StepscopeError, match="cannot write") as raised,
        ResultsFile.open(tmp_path / "file" / "results.jsonl", BenchRow),
    ):
        pass
    assert "--out" in raised.value.hint


@pytest.mark.parametrize(
    ("status", "codes", "runs_again"),
    [
        ("ok", [], {None: False, Retry.FAILED: False, Retry.DOUBTFUL: False}),
        ("oom", [], {None: False, Retry.FAILED: True, Retry.DOUBTFUL: False}),
        ("ok", ["spread"], {None: False, Retry.FAILED: False, Retry.DOUBTFUL: True}),
        ("ok", ["few", "shared"], {None: False, Retry.FAILED: False, Retry.DOUBTFUL: True}),
        ("ok", ["throttled"], {None: False, Retry.FAILED: False, Retry.DOUBTFUL: True}),
        ("ok", ["few", "host-bound", "not-finite", "of a later version"], dict.fromkeys([None, *Retry], False)),
    ],
)
def test_retry_selects_failed_or_disturbed_rows(
    status: Status, codes: list[str], runs_again: dict[Retry | None, bool]
) -> None:
    one = row(status, doubts=tuple(Doubt(code=code, text="") for code in codes))
    assert {retry: not one.is_settled(retry) for retry in runs_again} == runs_again


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step_ns":[100000000,', b'"step_ns":[0,'),
        (b'"fp32":50000000000000.0', b'"fp32":0'),
        (b'"peak_bytes":1073741824', b'"peak_bytes":1' + b"0" * 30),
        (b'"num_layers":4', b'"num_layers":2147483648'),
    ],
)
def test_impossible_number_is_an_error_with_its_line(tmp_path: Path, old: bytes, new: bytes) -> None:
    whole = lines()
    assert old in whole[1]
    path = write(tmp_path / "results.jsonl", [whole[0], whole[1].replace(old, new), whole[2]])
    with pytest.raises(StepscopeError, match="line 2"):
        read_rows(path, BenchRow)


@pytest.mark.parametrize("name", ["memory_h200.jsonl", "memory_checkpoint_study_h200.jsonl"])
def test_cases_of_saved_results_are_found_by_key(name: str) -> None:
    rows, _ = read_rows(RECORDED / name, MemoryRow)
    assert rows
    assert [case_key(one.case, one.environment, one.source) for one in rows] == [one.key for one in rows]


def test_case_from_before_new_settings_keeps_its_key() -> None:
    # The rows of this file have keys from before any setting was added.
    rows, _ = read_rows(RECORDED / "bench_h200.jsonl", BenchRow)
    assert case_key(rows[0].case, rows[0].environment, rows[0].source) == "d2f04e04d2f50db0"


def test_new_setting_changes_the_key_only_if_set() -> None:
    assert row(grad_accumulation=1).key == row().key != row(grad_accumulation=2).key
