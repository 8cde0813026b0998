"""Files of many runs: which is the baseline, in which order, and what cannot be in one table."""

from pathlib import Path

import msgspec
import pytest

from stepscope.api.series_inputs import read_series, read_sources
from stepscope.errors import StepscopeError
from stepscope.explain.story import RunSeries
from stepscope.recording import store
from stepscope.recording.rows.bench import BenchRow
from tests.unit.attention_rows import attend
from tests.unit.kineto_files import training_step, write_trace
from tests.unit.recordings import GEMM_BF16, Timeline
from tests.unit.rows import row

MS = 1_000_000


def record(folder: Path, us: float = 100, *, started: str = "", steps: int = 3) -> Path:
    timeline = Timeline()
    for _ in range(steps):
        with timeline.step(), timeline.phase("forward"):
            timeline.launch(GEMM_BF16, us, op="aten::mm")
            timeline.wait()
    store.save(timeline.record(started=started), folder)
    return folder


def write(path: Path, *rows: BenchRow) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    return path


def timed(step_ms: int, started: str = "2026-01-01T00:00:00+00:00", **settings: object) -> BenchRow:
    made = row(step_ns=tuple(step_ms * MS + place for place in range(5)), **settings)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, started=started)


def read(*paths: Path, **options: object) -> RunSeries:
    series = read_sources(paths, command="", cached=False, **options)  # type: ignore[arg-type]
    assert isinstance(series, RunSeries)
    return series


def refuse(*paths: Path, **options: object) -> StepscopeError:
    with pytest.raises(StepscopeError) as raised:
        read_sources(paths, command="", cached=False, **options)  # type: ignore[arg-type]
    return raised.value


def test_recordings_are_runs_in_the_given_order(tmp_path: Path) -> None:
    series = read(*(record(tmp_path / name, us) for name, us in (("c", 100), ("a", 300), ("b", 200))))
    assert series.labels == ("c", "a", "b")
    steps = [point.figures.step.step_ns for point in series.points if point.figures.step]
    assert steps[0] < steps[2] < steps[1]


def test_order_and_baseline_are_chosen(tmp_path: Path) -> None:
    days = {"c": "2026-03-03", "a": "2026-03-01", "b": "2026-03-02"}
    paths = [record(tmp_path / name, started=f"{day}T00:00:00+00:00") for name, day in days.items()]
    series = read(*paths, order="time", baseline=tmp_path / "b")
    assert series.labels == ("a", "b", "c")
    assert series.baseline == 1
    pair = read_sources(paths[:2], command="", cached=False, baseline=tmp_path / "a")
    assert isinstance(pair, list)
    assert [one.name for one in pair] == ["a", "c"]
    assert "does not say when" in refuse(*paths, record(tmp_path / "d"), order="time").message
    assert "is not one of the runs" in refuse(*paths, baseline=tmp_path / "x").message
    assert refuse(paths[0], baseline=paths[0]).message == "`--baseline` needs several runs"


def test_many_recordings_do_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.api.inputs._MOST_IN_MEMORY", 2)
    series = read(*(record(tmp_path / name) for name in "abc"))
    assert all(point.figures.step for point in series.points)


def test_results_of_one_case_each_are_runs(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{precision}.jsonl", timed(100, precision=precision)) for precision in ("fp32", "bf16")]
    series = read(*paths, write(tmp_path / "c.jsonl", timed(50, precision="bf16", compile=True)))
    assert series.labels == ("fp32", "bf16", "bf16 + compile")
    assert [point.verdict for point in series.points] == ["baseline", "same", "faster"]
    pair = read_series(paths)
    assert pair.labels == ("fp32", "bf16")


def test_results_of_several_cases_are_compared_case_by_case(tmp_path: Path) -> None:
    files = []
    for at, commit in enumerate(("4abf962", "cc5a586", "1e4a9ec")):
        day = f"2026-01-0{3 - at}T00:00:00+00:00"
        rows = [timed(100 + 10 * at, day, context=128), timed(200, day, context=256)]
        rows += [timed(400, day, context=512)] if at else []
        files.append(write(tmp_path / f"bench-{commit}/results.jsonl", *rows))
    series = read(*files)
    assert series.labels == ("bench-4abf962", "bench-cc5a586", "bench-1e4a9ec")
    assert [case.name for case in series.cases] == ["context 128", "context 256", "context 512"]
    assert [point.verdict for point in series.points if point.case.name == "context 128"] == [
        "baseline",
        "slower",
        "slower",
    ]
    assert [one is None for one in series.cases[2].figures] == [True, False, False]
    assert series.points[-2].verdict == "baseline"  # the first run that has the case
    folders = [file.parent for file in files]
    assert read(*folders, baseline=folders[2]).baseline == 2
    assert read(*files, order="time").labels[0] == "bench-1e4a9ec"
    assert len(read(*files[:2]).labels) == 2  # two files are enough


def test_two_files_of_one_case_in_precisions_are_compared_in_depth(tmp_path: Path) -> None:
    rows = [timed(100, precision="fp32"), timed(60, precision="bf16")]
    files = [write(tmp_path / f"{name}.jsonl", *rows) for name in "ab"]
    assert isinstance(read_sources(files, command="", cached=False), list)
    third = write(tmp_path / "c.jsonl", *rows)
    assert [case.name for case in read(*files, third).cases] == ["fp32", "bf16"]


def test_files_without_a_common_case_are_rejected(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{at}.jsonl", timed(1, context=2 ** (7 + 2 * at)), timed(1, context=2 ** (8 + 2 * at)))
        for at in range(3)
    ]
    error = refuse(*files)
    assert error.message == "these files have no case in common"
    assert "context 128" in error.detail


def test_runs_without_figures_are_rejected(tmp_path: Path) -> None:
    files = []
    for name in "abc":
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_bytes(msgspec.json.encode(attend()) + b"\n")
    assert refuse(*files).message == f"`{files[0]}` has no step time and no peak memory"


def test_steps_and_whole_traces_are_not_in_one_table(tmp_path: Path) -> None:
    bare = write_trace(tmp_path / "bare.json", [one for one in training_step() if "ProfilerStep" not in str(one)])
    error = refuse(record(tmp_path / "a"), record(tmp_path / "b"), bare)
    assert error.message == f"`{bare}` does not mark its steps, but other runs do"
