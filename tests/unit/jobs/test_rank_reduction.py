"""Files of many ranks, reduced by several processes."""

from pathlib import Path

import msgspec
import pytest

from stepscope.api.run import load
from stepscope.errors import StepscopeError
from stepscope.explain.ranks.activity import reduce_rank
from stepscope.explain.ranks.activity_file import encode, read_activity
from stepscope.explain.trace.profile import make_profile
from stepscope.jobs.rank_reduction import ShareOfTraces, reduce_files, reduce_into, reduce_share
from stepscope.recording import store
from stepscope.recording.readers.formats import open_recording
from tests.unit.kineto_files import write_ranks
from tests.unit.rank_recordings import Rank, record_ranks

STEADY = [100.0] * 8


def test_traces_are_reduced_as_if_they_were_read_here(tmp_path: Path) -> None:
    paths = write_ranks(tmp_path, 5)
    found = reduce_files(paths, cached=False)
    assert [encode(one) for one in found] == [encode(reduce_rank(make_profile(open_recording(path)))) for path in paths]


def test_many_traces_are_one_run(tmp_path: Path) -> None:
    write_ranks(tmp_path, 10)
    run = load(tmp_path, cache=False)
    assert [row[0] for row in run.table("ranks").rows] == list(range(10))
    assert not any("_content" in vars(one) for one in run.opened)


def test_unreadable_trace_is_named(tmp_path: Path) -> None:
    paths = write_ranks(tmp_path, 3)
    paths[1].write_bytes(b"not a trace")
    with pytest.raises(StepscopeError, match=paths[1].name):
        reduce_files(paths, cached=False)


def test_traces_become_recordings_of_a_run(tmp_path: Path) -> None:
    paths = write_ranks(tmp_path / "traces", 3)
    reduce_into(paths, tmp_path / "run")
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == ["rank-0", "rank-1", "rank-2"]
    assert all(read_activity(tmp_path / "run" / f"rank-{rank}") is not None for rank in range(3))
    whole, reduced = load(*paths), load(tmp_path / "run")
    files = [column.key for column in whole.table("ranks").columns].index("file")
    for ours, theirs in zip(whole.table("ranks").rows, reduced.table("ranks").rows, strict=True):
        assert [*ours[:files], *ours[files + 1 :]] == [*theirs[:files], *theirs[files + 1 :]]
    assert whole.table("collectives").rows == reduced.table("collectives").rows


def test_tasks_of_a_job_share_the_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_ranks(tmp_path / "traces", 3)
    share = ShareOfTraces(traces=tuple(map(str, paths)), folder=str(tmp_path / "run"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for task, done in enumerate((["rank-0", "rank-2"], ["rank-0", "rank-1", "rank-2"])):
        monkeypatch.setenv("RANK", str(task))
        reduce_share(msgspec.json.encode(share).decode())
        assert sorted(one.name for one in (tmp_path / "run").iterdir()) == done


def test_ranks_that_are_reduced_already_are_left_alone(tmp_path: Path) -> None:
    (path,) = write_ranks(tmp_path, 1)
    reduce_into([path], tmp_path / "run")
    before = (tmp_path / "run/rank-0/manifest.json").stat().st_mtime_ns
    reduce_into([path], tmp_path / "run")
    assert (tmp_path / "run/rank-0/manifest.json").stat().st_mtime_ns == before
    other = path.rename(tmp_path / "other_rank0.json.gz")
    with pytest.raises(StepscopeError, match="already exists"):
        reduce_into([other], tmp_path / "run")


def test_trace_without_a_rank_has_no_place_in_a_run(tmp_path: Path) -> None:
    (path,) = write_ranks(tmp_path, 1, is_told=False)
    with pytest.raises(StepscopeError, match="does not contain its rank"):
        reduce_into([path], tmp_path / "run")


def test_recordings_without_an_activity_get_one(tmp_path: Path) -> None:
    folders = []
    for rank, profile in enumerate(record_ranks([Rank(compute_us=STEADY)] * 3)):
        folders.append(tmp_path / f"rank-{rank}")
        store.save(profile.recording, folders[-1])
    found = reduce_files(folders)
    assert [one.rank for one in found] == [0, 1, 2]
    assert all(read_activity(folder) is not None for folder in folders)
