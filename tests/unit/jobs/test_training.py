"""An invalid training says what to change, and what makes two runs the same run."""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.slurm import rank_jobs
from stepscope.jobs.train import TrainJob, _only_one, build_training, is_rank
from stepscope.parallel.journal import Journal, read_journals
from stepscope.recording.rows.checkpoints import FOLDER_NAME, save
from stepscope.recording.rows.training_log import data_digest
from stepscope.spec import SIZES, Factory, Grid, SpecError, Training, Workload

NANO = Workload(model=SIZES["nano"], batch=8)
Alone = Callable[[Path], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"ranks": 3, "strategy": "flat"}, "batch `8` cannot be split evenly over 3 ranks", "--batch 9"),
        ({"ranks": 2, "strategy": "flat", "accumulate": 3}, "2 ranks with 3 micro-batches each", "--batch 12"),
        ({"ranks": 2}, "strategy `single` cannot be used with `2` ranks", "--strategy bucketed"),
        ({"strategy": "magic"}, "unknown strategy: `magic`", ""),
        ({"ranks": 0}, "ranks must be at least 1, got `0`", "--ranks 1"),
        ({"steps": -1}, "steps must be at least 1, got `-1`", "--steps 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, got `nan`", "--lr 0.001"),
        ({"bucket_mb": 0.0}, "bucket_mb must be above 0, got `0`", "--bucket-mb 25"),
        ({"shard_optimizer": True}, "cannot be used with strategy `single`", "--strategy bucketed"),
        ({"strategy": "fsdp", "shard_optimizer": True}, "strategy `fsdp`", "--shard-optimizer"),
        ({"warmup_steps": -2}, "warmup_steps must be at least 0, got `-2`", "--lr-warmup 0"),
    ],
)
def test_invalid_training_raises(settings: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        Training(workload=NANO, **settings)  # type: ignore[arg-type]
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp16"}, "precision `fp16` is unsupported"),
        ({"mode": "forward"}, "requires mode `train`, got `forward`"),
        ({"model": Factory(target="mine:build")}, "`mine:build` cannot be trained"),
    ],
)
def test_workloads_that_cannot_be_trained_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Training(workload=msgspec.structs.replace(NANO, **change))


def test_text_needs_a_vocabulary_for_bytes() -> None:
    small = msgspec.structs.replace(NANO, model=msgspec.structs.replace(SIZES["nano"], vocab=100))
    with pytest.raises(SpecError, match="vocab `100` is too small"):
        Training(workload=small, data="text.txt")


def test_ranks_and_strategy_do_not_change_the_run_and_the_seed_does() -> None:
    plain = Training(workload=NANO)
    other = Training(
        workload=msgspec.structs.replace(NANO, device="cpu"),
        ranks=4,
        strategy="fsdp",
        accumulate=2,
        steps=7,
        save_every=3,
    )
    assert plain.identity == other.identity
    assert plain.identity != Training(workload=msgspec.structs.replace(NANO, seed=1)).identity
    assert plain.identity != Training(workload=NANO, learning_rate=1e-2).identity


def test_gradient_accumulation_has_two_names() -> None:
    split = msgspec.structs.replace(NANO, grad_accumulation=2)
    by_workload = Training(workload=split, ranks=2, strategy="flat")
    assert by_workload == Training(workload=NANO, ranks=2, strategy="flat", accumulate=2)
    assert by_workload.passes == 2
    assert by_workload.identity == Training(workload=NANO).identity
    with pytest.raises(SpecError, match="former name of grad_accumulation"):
        Training(workload=split, accumulate=4)


def test_run_from_before_micro_batches_is_read() -> None:
    fields = msgspec.to_builtins(Training(workload=NANO, accumulate=2))
    del fields["workload"]["grad_accumulation"]
    assert msgspec.convert(fields, Training).workload.grad_accumulation == 2


# --- The same run ---------------------------------------------------------------------------------------------------


def _job(folder: Path, training: Training, *, fresh: bool = False) -> TrainJob:
    return TrainJob(training=training, folder=folder, command="stepscope train", fresh=fresh)


def _write(file: IO[bytes]) -> None:
    file.write(b"state")


def test_moved_text_is_the_same_run_and_another_text_is_not(tmp_path: Path) -> None:
    here, there = tmp_path / "text.txt", tmp_path / "moved.txt"
    here.write_text("to be")
    there.write_text("to be")
    trainings = [Training(workload=NANO, steps=3, data=str(path)) for path in (here, there)]
    save(tmp_path / FOLDER_NAME, 3, trainings[0], data_digest(here), _write)
    assert [_job(tmp_path, training).is_done for training in trainings] == [True, True]
    assert not _job(tmp_path, trainings[0], fresh=True).is_done
    here.write_text("or not")
    assert [_job(tmp_path, training).is_done for training in trainings] == [False, True]
    assert not _job(tmp_path, Training(workload=NANO, steps=3)).is_done, "generated tokens are another text"


def test_request_has_no_fresh_start_and_deletes_nothing(tmp_path: Path) -> None:
    training = Training(workload=NANO, steps=3)
    job = _job(tmp_path, training, fresh=True)
    job.claim_folder()
    save(tmp_path / FOLDER_NAME, 3, training, "", _write)
    assert job.as_request() == _job(tmp_path, training).as_request()
    assert _job(tmp_path, training).is_done
    job.prepare()
    assert not _job(tmp_path, training).is_done


# --- One run at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [_only_one, rank_jobs._alone])
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_works(
    tmp_path: Path, alone: Alone, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone(tmp_path):
        pass


@pytest.mark.parametrize("alone", [_only_one, rank_jobs._alone])
def test_second_run_raises_and_other_lock_errors_are_reported(
    tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(tmp_path), pytest.raises(StepscopeError, match="another"), alone(tmp_path):
        pass

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StepscopeError, match=r"cannot write to .*Input/output error"), alone(tmp_path):
        pass


def test_error_inside_a_run_is_not_another_run(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), _only_one(tmp_path):
        raise BlockingIOError


# --- Ranks under an external launcher -----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_run_does_not_read_journals_of_earlier_ranks(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 deletes the journals of missing ranks, and each rank its own: another may have joined by now."""
    folder = tmp_path / "journal"
    job = _job(tmp_path, Training(workload=NANO, ranks=2, strategy="flat"))
    job.claim_folder()
    for old in range(4):
        Journal(folder, old).leave("ValueError: of before")
    monkeypatch.setattr("stepscope.jobs.workers.rank.serve_here", lambda *_: None)
    monkeypatch.setattr("stepscope.jobs.train.read_result", lambda _: None)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    job.run_here(lambda _: None)
    assert [entry.rank for entry in read_journals(folder)] == {0: [1], 1: [0, 2, 3]}[rank]


def test_rank_knows_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        return build_training(Grid(), ranks=None, strategy=None, data="").ranks

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (is_rank(), count()) == (False, 1)
    monkeypatch.setenv("RANK", "0")
    assert is_rank()
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(StepscopeError, match="RANK is `0` but WORLD_SIZE is not set"):
        count()
