"""Baselines: what is kept of a run, and what the store accepts."""

import json
from pathlib import Path

import msgspec
import pytest

from stepscope.api.baselines import check_baseline, read_source, save_baseline
from stepscope.errors import StepscopeError
from stepscope.recording import store as recordings
from stepscope.recording.baseline import (
    MOST_STEPS,
    SCHEMA,
    list_names,
    read_baseline,
    remove_baseline,
    thin_out,
    write_baseline,
)
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.loop_run import LoaderFacts, LoopFacts
from tests.unit.explain.gate_runs import baseline_of, make_run
from tests.unit.recordings import GEMM_BF16, Timeline
from tests.unit.rows import row

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "docs/examples/trace.json.gz"
MEMORY = ROOT / "bench/results/memory_h200/small-train-fp32"


def write_rows(folder: Path, *rows: BenchRow) -> Path:
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    return folder


def bench_runs(folder: Path, *step_ms: float) -> list[Path]:
    """Results of `stepscope bench`, as if it had run several times."""
    return [
        write_rows(folder / f"bench{number}", row(step_ns=(round(one * 1e6),) * 5))
        for number, one in enumerate(step_ms, start=len(list(folder.iterdir())))
    ]


def record(*, host_us: float = 5) -> Timeline:
    timeline = Timeline(host_us=host_us)
    for _ in range(4):
        with timeline.step(), timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 100)
            timeline.launch(GEMM_BF16, 100)
        timeline.host(300)
    return timeline


def test_a_trace_keeps_what_explain_says() -> None:
    run, conditions = read_source(TRACE)
    assert run.clock == "profiled"
    assert run.kernels == 88
    assert sum(run.classes.values()) == pytest.approx(sum(run.phases.values()))
    assert run.idle_ns is not None
    assert 0 < run.idle_ns < max(run.step_ns)
    assert conditions.device == "NVIDIA H200"


def test_a_recording_keeps_its_loop_and_the_peak_next_to_it(tmp_path: Path) -> None:
    loop = LoopFacts(
        script="train.py",
        found_by="optimizer steps",
        backwards_per_step=4.0,
        loaders=(LoaderFacts(dataset="Tokens", batch_size=8, num_workers=2),),
    )
    recordings.save(record().record().with_manifest(loop=loop, world_size=2), tmp_path / "rank")
    run, conditions = read_source(tmp_path / "rank")
    assert (run.kernels, run.peak_bytes) == (2, None)
    assert conditions.settings == {"script": "train.py", "micro-batches": "4", "batch size": "8"}
    assert conditions.world_size == 2
    (tmp_path / "rank/memory").symlink_to(MEMORY)
    assert read_source(tmp_path / "rank")[0].peak_bytes == read_source(MEMORY)[0].peak_bytes


def test_a_memory_recording_has_a_peak_and_no_steps() -> None:
    run, _ = read_source(MEMORY)
    assert run.peak_bytes is not None
    assert run.peak_bytes > 2**30
    assert run.step_ns == ()


def test_bench_results_keep_samples_and_settings(tmp_path: Path) -> None:
    (folder,) = bench_runs(tmp_path, 10)
    for source in (folder, folder / "results.jsonl"):
        run, conditions = read_source(source)
        assert (run.step_ns, run.peak_bytes, run.clock) == ((10_000_000,) * 5, 2**30, "unprofiled")
        assert run.phases == {"forward": 2.5e6, "backward": 5e6, "optimizer": 2.5e6}
        assert (conditions.device, conditions.torch) == ("Test GPU", "2.13.0")
        assert conditions.settings["batch"] == "4"
        assert "threads" not in conditions.settings


def test_bench_results_with_several_cases_are_refused(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "grid", row(batch=2), row(batch=4), row("oom", batch=8))
    with pytest.raises(StepscopeError, match="has 2 measured cases") as raised:
        read_source(folder)
    assert "batch 2" in raised.value.detail


def test_saved_runs_are_compared_with_later_ones(tmp_path: Path) -> None:
    store = tmp_path / "kept"
    base = bench_runs(tmp_path, 10, 10.02, 9.98)
    saved = save_baseline("main", base, store=store)
    assert read_baseline(store, "main") == saved
    assert list_names(store) == ["main"]
    slow, fine = bench_runs(tmp_path, 11, 10.01)
    assert check_baseline("main", [slow], store=store, limit=0.03).outcome == "fail"
    assert check_baseline("main", [fine], store=store, limit=0.03).outcome == "pass"
    assert check_baseline("main", [slow], store=store, limit=0.03, metrics=["peak-memory"]).outcome == "pass"


def test_runs_are_added_once(tmp_path: Path) -> None:
    store, runs = tmp_path / "kept", bench_runs(tmp_path, 10, 10.1)
    save_baseline("main", runs[:1], store=store)
    with pytest.raises(StepscopeError, match="already exists"):
        save_baseline("main", runs[1:], store=store)
    assert len(save_baseline("main", runs[1:], store=store, add=True).runs) == 2
    with pytest.raises(StepscopeError, match="are the same recording"):
        save_baseline("main", runs[1:], store=store, add=True)
    assert len(save_baseline("main", runs[1:], store=store, force=True).runs) == 1


def test_runs_of_different_things_are_not_one_baseline(tmp_path: Path) -> None:
    (one,) = bench_runs(tmp_path, 10)
    other = write_rows(tmp_path / "other", row(batch=8))
    with pytest.raises(StepscopeError, match="not repeated runs of the same thing") as raised:
        save_baseline("main", [one, other], store=tmp_path / "kept")
    assert raised.value.detail == "batch 4 → 8"
    save_baseline("main", [one], store=tmp_path / "kept")
    with pytest.raises(StepscopeError, match="do not belong to baseline `main`"):
        save_baseline("main", [other], store=tmp_path / "kept", add=True)


def test_the_same_recording_twice_is_not_two_runs(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="are the same recording"):
        save_baseline("main", [TRACE, TRACE], store=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "-x", "a b", "x" * 101, "é"])
def test_names_are_file_names_everywhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(StepscopeError, match="invalid baseline name"):
        read_baseline(tmp_path, name)


def test_a_missing_baseline_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="not found") as raised:
        read_baseline(tmp_path / "none", "main")
    assert raised.value.hint == "stepscope baseline save main RUN..."
    write_baseline(tmp_path, "nightly", baseline_of(make_run(1)), force=False)
    with pytest.raises(StepscopeError) as raised:
        read_baseline(tmp_path, "nightli")
    assert raised.value.hint == "--baseline nightly"


def test_other_files_are_neither_listed_replaced_nor_removed(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.json"
    foreign.write_text('{"schema": "mine/1"}')
    assert list_names(tmp_path) == []
    with pytest.raises(StepscopeError, match="is not a baseline"):
        write_baseline(tmp_path, "notes", baseline_of(make_run(1)), force=True)
    with pytest.raises(StepscopeError, match="is not a baseline"):
        remove_baseline(tmp_path, "notes")
    assert foreign.read_text() == '{"schema": "mine/1"}'


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b'{"schema":"stepscope.baseline/2","conditions":{},"runs":[]}',
        b'{"schema":"stepscope.baseline/1","conditions":{},"runs":[]}',
        b'{"schema":"stepscope.baseline/1","conditions":{},"runs":[{"file":"a","identity":"b","step_ns":[0]}]}',
    ],
)
def test_damaged_baselines_are_an_error_that_says_what_to_type(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "main.json").write_bytes(damage)
    with pytest.raises(StepscopeError, match="cannot read the baseline") as raised:
        read_baseline(tmp_path, "main")
    assert raised.value.hint.startswith("save it again: stepscope baseline save main")


def test_a_baseline_is_small_and_readable(tmp_path: Path) -> None:
    samples = thin_out(range(1, 100_001))
    assert len(samples) == MOST_STEPS
    assert samples[0] == 1
    assert samples[-1] > 99_000
    assert thin_out([5]) == (5,)
    path = write_baseline(tmp_path, "main", baseline_of(make_run(*samples)), force=False)
    assert path.stat().st_size < 10_000
    assert json.loads(path.read_text())["schema"] == SCHEMA
    remove_baseline(tmp_path, "main")
    assert not path.exists()
