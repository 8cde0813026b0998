"""The input files of a report: their kinds, and the runs they belong to."""

import shutil
from pathlib import Path

import msgspec
import pytest

from stepscope.api.inputs import read_runs
from stepscope.api.run import load
from stepscope.errors import StepscopeError
from stepscope.explain.story.sources import Materials
from stepscope.jobs.report.data import State, write_state
from stepscope.recording import store
from stepscope.recording.rows.bench import Row
from stepscope.recording.store import Recording
from stepscope.spec import Scalar, build_case
from tests.unit.attention_rows import attend
from tests.unit.kineto_files import training_step, write_trace
from tests.unit.recordings import GEMM_BF16, Timeline
from tests.unit.rows import ENVIRONMENT, row

RESULTS = Path(__file__).parents[3] / "bench/results"
MEMORY = RESULTS / "memory_h200/small-train-fp32"
PRECISION = RESULTS / "precision_h200_small.json"
OTHER_MEMORY = RESULTS / "memory_h200/large-train-bf16"


def record(folder: Path, *, rank: int | None = None, world_size: int | None = None, **settings: Scalar) -> Path:
    """Save a trace in `folder`."""
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"), timeline.module("head"):
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
    case = build_case(settings) if settings else None
    recording: Recording = timeline.record().with_manifest(rank=rank, world_size=world_size, case=case)
    store.save(recording, folder)
    return folder


def write_rows(path: Path, *rows: Row, device: str = "NVIDIA H200") -> Path:
    """Write rows measured on `device`, which is also the device of recordings."""
    environment = msgspec.structs.replace(ENVIRONMENT, driver_name=device)
    moved = (msgspec.structs.replace(one, environment=environment) for one in rows)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in moved))
    return path


def read(*paths: Path) -> list[Materials]:
    return read_runs(paths, command="stepscope report …", cached=False)


def refuse(*paths: Path) -> StepscopeError:
    with pytest.raises(StepscopeError) as raised:
        read(*paths)
    return raised.value


def test_files_of_every_kind_make_one_run(tmp_path: Path) -> None:
    bench = write_rows(tmp_path / "b.jsonl", row(size="small"), row(size="small", precision="bf16"))
    attention = write_rows(tmp_path / "a.jsonl", attend(), attend("naive", "oom"))
    (run,) = read(attention, PRECISION, bench, MEMORY, record(tmp_path / "profile", size="small", device="cuda:0"))
    assert run.profile is not None
    assert run.ranks == ()
    assert run.memory is not None
    assert run.precision is not None
    assert [one.case.workload.precision for one in run.bench] == ["fp32", "bf16"]
    assert len(run.attention) == 1
    assert run.command == "stepscope report …"
    assert run.name.startswith("small batch 4")


def test_other_files_are_assigned_to_two_runs_in_order(tmp_path: Path) -> None:
    a, b = read(record(tmp_path / "one"), MEMORY, record(tmp_path / "two"), OTHER_MEMORY, PRECISION)
    assert a.profile is not None
    assert b.profile is not None
    assert a.memory is not None
    assert b.memory is not None
    assert a.memory.peak_bytes < b.memory.peak_bytes
    assert (a.precision is None, b.precision is None) == (False, True)
    assert a.name != b.name


def test_two_memory_snapshots_are_two_runs() -> None:
    assert [run.memory is not None for run in read(MEMORY, OTHER_MEMORY)] == [True, True]


def test_ranks_of_one_run_are_sorted(tmp_path: Path) -> None:
    (run,) = read(record(tmp_path / "x", rank=1, world_size=2), record(tmp_path / "y", rank=0, world_size=2))
    assert [one.rank for one in run.ranks] == [0, 1]
    assert run.profile is not None
    assert run.profile.recording.manifest.rank == 0


def test_directory_of_traces_is_a_run_with_ranks(tmp_path: Path) -> None:
    for name, ranks in (("a", (1, 0)), ("b", (0,))):
        (tmp_path / name).mkdir()
        for rank in ranks:
            properties = f', "distributedInfo": {{"rank": {rank}, "world_size": 2}}'
            write_trace(tmp_path / name / f"{1 - rank}.pt.trace.json", training_step(), properties=properties)
    (run,) = read(tmp_path / "a")
    assert [one.rank for one in run.ranks] == [0, 1]
    assert run.name == "a"
    assert [rank.profile.recording.manifest.rank for rank in load(tmp_path / "a").ranks] == [0, 1]
    assert [len(one.ranks) for one in read(tmp_path / "a", tmp_path / "b")] == [2, 0]
    second = load(tmp_path / "a" / "0.pt.trace.json")  # rank 1
    comparison = load(tmp_path / "a").compare(second).comparison
    names = (f"{tmp_path / 'a' / '0.pt.trace.json'} (rank 1)", str(tmp_path / "a" / "0.pt.trace.json"))
    assert comparison.names == names
    assert comparison.remarks[0] == f"compared trace: `{tmp_path / 'a' / '0.pt.trace.json'}` (one of 2)"
    assert not any("one of" in remark for remark in second.compare(second).comparison.remarks)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.json").write_text("{}")
    assert "not a recording" in refuse(tmp_path / "c").message


@pytest.mark.parametrize("second", [(0, 2), (1, 4), (None, None)])
def test_recordings_that_are_not_ranks_of_one_run_are_compared(
    tmp_path: Path, second: tuple[int | None, int | None]
) -> None:
    rank, world_size = second
    first = record(tmp_path / "x", rank=0, world_size=2)
    assert len(read(first, record(tmp_path / "y", rank=rank, world_size=world_size))) == 2


@pytest.mark.parametrize("second", [(0, 2), (1, 4), (2, 2)])
def test_loaded_files_must_be_ranks_of_one_run(tmp_path: Path, second: tuple[int, int]) -> None:
    files = [
        record(tmp_path / "x", rank=0, world_size=2),
        record(tmp_path / "y", rank=second[0], world_size=second[1]),
    ]
    with pytest.raises(StepscopeError, match="not the ranks of one run") as raised:
        load(*files)
    assert raised.value.detail == f"x: rank 0 of 2, y: rank {second[0]} of {second[1]}"


def test_recordings_of_unknown_ranks_have_no_mean(tmp_path: Path) -> None:
    run = load(record(tmp_path / "x"), record(tmp_path / "y"))
    first, *_, last = run.page().headline.split("\n\n")[0].splitlines()
    assert first.startswith("2 recordings: step 0.")
    assert "average" not in run.page().headline
    assert last == "the files do not contain their rank, so they are not matched"


def test_rank_outside_the_world_size_makes_a_second_run(tmp_path: Path) -> None:
    runs = read(record(tmp_path / "x", rank=0, world_size=2), record(tmp_path / "y", rank=2, world_size=2))
    assert len(runs) == 2


def test_runs_loaded_separately_are_compared(tmp_path: Path) -> None:
    files = [record(tmp_path / "x", rank=0, world_size=2), record(tmp_path / "y", rank=1, world_size=2)]
    apart = read_runs([load(file) for file in files], command="", cached=False)
    assert [one.ranks for one in apart] == [(), ()]
    (together,) = read_runs([load(*files)], command="", cached=False)
    assert len(together.ranks) == 2


def test_files_from_another_device_are_rejected(tmp_path: Path) -> None:
    recording = record(tmp_path / "one")
    bench = write_rows(tmp_path / "b.jsonl", row(size="small"), device="a CPU")
    attention = write_rows(tmp_path / "a.jsonl", attend(), device="a CPU")
    for file in (bench, attention):
        error = refuse(recording, file)
        assert str(file) in error.message
        assert "another device: `a CPU`" in error.message
        assert "NVIDIA H200" in error.detail
    (run,) = read(bench, attention)
    assert run.bench
    assert run.attention


def test_traces_of_ranks_of_several_runs_are_rejected(tmp_path: Path) -> None:
    error = refuse(*(record(tmp_path / name, rank=0, world_size=2) for name in "abc"))
    assert error.message == "got 3 traces of ranks that are not the ranks of one run"
    assert error.detail.startswith("a: rank 0 of 2")


def test_a_file_for_one_of_many_runs_is_rejected(tmp_path: Path) -> None:
    error = refuse(*(record(tmp_path / name) for name in "abc"), MEMORY)
    assert error.message == f"cannot tell which run `{MEMORY}` belongs to"
    assert error.detail == "3 runs, and 1 file of this kind"


def test_a_second_file_of_a_kind_needs_a_second_run(tmp_path: Path) -> None:
    error = refuse(record(tmp_path / "one"), MEMORY, OTHER_MEMORY)
    assert error.message.endswith("is another memory snapshot")


def test_results_row_matches_the_recorded_case(tmp_path: Path) -> None:
    bench = write_rows(tmp_path / "b.jsonl", *(row(size="small", context=context) for context in (128, 256, 512)))
    (run,) = read(bench, record(tmp_path / "one", size="small", context=256, device="cuda:0"))
    assert [one.case.workload.context for one in run.bench] == [256]
    error = refuse(bench, record(tmp_path / "two", size="medium", device="cuda:0"))
    assert "does not contain the recorded case" in error.message
    assert "3 cases" in refuse(bench).message


def test_precisions_of_one_case_need_no_recording(tmp_path: Path) -> None:
    rows = [row("oom", size="small"), row(size="small", precision="bf16"), row(size="small", precision="tf32")]
    (run,) = read(write_rows(tmp_path / "b.jsonl", *rows))
    assert [one.case.workload.precision for one in run.bench] == ["bf16", "tf32"]


def test_directory_is_read_through_its_results_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "results.jsonl", row(size="small"))
    (run,) = read(tmp_path)
    assert len(run.bench) == 1


def keep(folder: Path, *done: str) -> Path:
    """Create the directory of a report."""
    bench = row(size="small")
    for stage in ("bench", "attention"):
        (folder / stage).mkdir(parents=True)
    write_rows(folder / "bench/results.jsonl", row(size="medium"), bench)
    write_rows(folder / "attention/results.jsonl", attend(), attend(length=2048))
    record(folder / "profile")
    shutil.copy(PRECISION, folder / "precision.json")
    keys = {"bench": (bench.key,), "attention": (attend(length=2048).key,), "profile": ("p",), "precision": ("q",)}
    state = State(
        key=bench.key,
        case=bench.case,
        environment=ENVIRONMENT,
        command="stepscope report --size small",
        done={stage: keys[stage] for stage in done},
    )
    write_state(folder, state)
    return folder


def test_report_directory_is_a_run(tmp_path: Path) -> None:
    (run,) = read(keep(tmp_path / "data", "bench", "profile", "precision", "attention"))
    assert [one.case.workload.model.name for one in run.bench] == ["small"]
    assert [one.case.length for one in run.attention] == [2048]
    assert run.profile is not None
    assert run.precision is not None
    assert run.absent["memory"].why == "this stage was not run"
    assert run.absent["memory"].command == "stepscope report --size small"
    assert load(tmp_path / "data").step_ms == run.profile.step_ns / 1e6


def test_other_files_complete_a_report_directory(tmp_path: Path) -> None:
    data = keep(tmp_path / "data", "bench", "profile")
    (run,) = read(data, MEMORY)
    assert run.memory is not None
    assert set(run.absent) == {"precision", "attention", "plan"}
    a, b = read(data, record(tmp_path / "other"))
    assert (len(a.bench), len(b.bench)) == (1, 0)
    whole = keep(tmp_path / "whole", "bench", "precision")
    assert refuse(whole, PRECISION).message.endswith("is another `stepscope precision` result")


def test_missing_files_of_a_report_directory_are_reported(tmp_path: Path) -> None:
    data = keep(tmp_path / "data", "bench", "precision")
    (data / "precision.json").unlink()
    (run,) = read(data)
    assert "cannot read" in run.absent["precision"].why
    error = refuse(keep(tmp_path / "empty"))
    assert error.message.endswith("has no finished stages")


def test_unsupported_inputs_are_rejected(tmp_path: Path) -> None:
    assert "is given twice" in refuse(MEMORY, MEMORY).message
    assert "not found" in refuse(tmp_path / "nothing").message
    (tmp_path / "text").write_text("some text")
    error = refuse(tmp_path / "text")
    assert "results.jsonl" in error.detail
    (tmp_path / "other.json").write_text('{"schema": "stepscope.comm/1"}')
    assert "`stepscope.comm/1`" in refuse(tmp_path / "other.json").detail
    (tmp_path / "empty").mkdir()
    assert "is not a recording" in refuse(tmp_path / "empty").message


def test_file_with_only_failed_rows_is_rejected(tmp_path: Path) -> None:
    assert "has no successful cases" in refuse(write_rows(tmp_path / "b.jsonl", row("oom", size="small"))).message
