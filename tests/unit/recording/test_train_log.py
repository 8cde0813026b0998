"""The log of a training run resumes at its checkpoint, whatever was written after it."""

import math
from pathlib import Path

import pytest

from stepscope.errors import StepscopeError
from stepscope.recording.rows.training_log import LogFile, TrainRow, keep_loss, read_log


def _row(step: int, loss: float = 2.0) -> TrainRow:
    return TrainRow(
        step=step,
        kept_loss=keep_loss(loss),
        tokens=8,
        learning_rate=0.1,
        step_ns=(5,),
        communication_ns=(1,),
        exposed_ns=(0,),
    )


def _write(path: Path, steps: range, tail: bytes = b"") -> None:
    with LogFile(path, after=0) as log:
        for step in steps:
            log.append(_row(step))
    with path.open("ab") as file:
        file.write(tail)


@pytest.mark.parametrize("tail", [b"", b'{"step": 6, "lo'])
def test_lines_after_the_checkpoint_are_removed(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 6), tail)
    with LogFile(path, after=3) as log:
        log.append(_row(4))
    rows, cut_bytes = read_log(path)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert cut_bytes == 0


def test_truncated_last_line_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 3), b'{"step": 3')
    rows, cut_bytes = read_log(path)
    assert ([row.step for row in rows], cut_bytes) == ([1, 2], 10)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e308, 0.0])
def test_any_loss_survives_the_log(tmp_path: Path, loss: float) -> None:
    path = tmp_path / "log.jsonl"
    with LogFile(path, after=0) as log:
        log.append(_row(1, loss))
    with LogFile(path, after=1) as log:
        log.append(_row(2))
    rows, _ = read_log(path)
    assert repr([row.loss for row in rows]) == repr([loss, 2.0])
    assert rows[0].is_finite == math.isfinite(loss)


def test_null_loss_of_an_earlier_version_is_nan(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 2))
    path.write_bytes(path.read_bytes().replace(b'"loss":2.0', b'"loss":null'))
    ((row,), _) = read_log(path)
    assert math.isnan(row.loss)


def test_log_without_steps_of_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 3))
    with pytest.raises(StepscopeError, match="does not match the checkpoint"):
        LogFile(path, after=5)
    with pytest.raises(StepscopeError, match="does not match the checkpoint"):
        LogFile(tmp_path / "none.jsonl", after=1)


@pytest.mark.parametrize(
    "content", [b"not json\n", b'{"step": 1}\n', b'{"schema": "other"}\n{}\n', b"my notes", b'{"a": 1']
)
def test_other_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match="not a training log"):
        read_log(path)
