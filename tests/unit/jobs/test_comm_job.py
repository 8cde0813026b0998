"""The sweep over collectives: its cases, and what failing ranks cost the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.experiments import comm_sweep as job
from stepscope.jobs.experiments.comm_sweep import CommExperiment, run_comm
from stepscope.jobs.experiments.flag_grids import CommGrid, RankHost, grid_from_texts
from stepscope.jobs.experiments.sweep import Sweep
from stepscope.jobs.workers.messages import CommMeasured, MeasureComm, Setup, StageReached
from stepscope.recording.rows.bench import Retry
from stepscope.recording.rows.collective_case import CommCase, CommMeasurement, CommOutcome, CommRow
from stepscope.recording.rows.links import LinkPlace, find_links, read_links
from tests.unit.jobs.test_attention_job import Silent
from tests.unit.rows import ENVIRONMENT

MB = 10**6
GRID = CommGrid(collective=("all-reduce", "broadcast"), sizes=(MB, 2 * MB), ranks=(2, 4), backend="gloo")
Failing = Callable[[CommCase], str]


class Ranks:
    """Replaces the processes. `fail` says why a case ends them, if it does."""

    def __init__(self, fail: Failing) -> None:
        self._fail = fail
        self.requests: list[tuple[int, MeasureComm]] = []

    def run(self, request: MeasureComm, setup: Setup, folder: Path, on_message: Any) -> None:
        self.requests.append((setup.world, request))
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / "rank-1.log").write_text("what it said")
        for case in request.cases:
            reason = self._fail(case)
            if reason.startswith("at once"):
                raise StepscopeError(reason)
            on_message(0, StageReached(name="checking"))
            if reason:
                raise StepscopeError(reason, detail="rank 1 stopped in collective 3")
            on_message(1, StageReached(name="timing"))
            on_message(0, CommMeasured(outcome=measured(case)))


def measured(case: CommCase) -> CommOutcome:
    samples = ((1000 + case.moved_bytes,) * 5,) * case.ranks
    measurement = CommMeasurement(clock="host", samples_ns=samples, processor_ns=(1,) * case.ranks)
    return CommOutcome(status="ok", measurement=measurement)


@pytest.fixture(autouse=True)
def no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job, "_look", lambda *_: (RankHost(device="cpu"), ENVIRONMENT))


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fail: Failing = lambda _: "", **more: Any
) -> tuple[tuple[CommRow, ...], Ranks, Silent]:
    ranks, listener = Ranks(fail), Silent()
    monkeypatch.setattr(job, "run_ranks", ranks.run)
    remark = more.pop("remark", fail_on_remark)
    experiment = CommExperiment(grid=GRID)
    sweep = Sweep(experiment=experiment, folder=folder / "out", command="stepscope comm", **more)
    rows = run_comm(sweep, listener, remark=remark)
    assert rows is not None
    return rows, ranks, listener


def fail_on_remark(text: str) -> None:
    pytest.fail(text)


def test_unwritable_cache_is_reported_and_costs_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    remarks: list[str] = []
    rows, _, _ = run(tmp_path, monkeypatch, remark=remarks.append)
    assert [row.status for row in rows] == ["ok"] * 8
    (remark,) = remarks
    assert "could not cache the links" in remark
    assert str(tmp_path / "file" / "cache") in remark
    assert read_links(tmp_path / "out" / "links.json")


def test_cases_with_the_same_number_of_ranks_share_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ranks, _ = run(tmp_path, monkeypatch)
    assert [row.status for row in rows] == ["ok"] * 8
    assert [(world, len(request.cases)) for world, request in ranks.requests] == [(2, 4), (4, 4)]
    assert not (tmp_path / "out" / "ranks").exists()


def test_fitted_links_are_saved_in_the_cache_and_next_to_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch)
    place = LinkPlace(backend="gloo", device_name="Test GPU", ranks=4)
    for path in (None, tmp_path / "out" / "links.json"):
        found = find_links(place, path)
        assert found is not None
        link = found.links["broadcast"]
        assert link.latency_ns == pytest.approx(1000)
        assert link.bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("rank 1: RuntimeError: something", "error"),
        ("rank 1: MemoryError", "oom"),
        ("rank 1 was killed by SIGKILL, in collective 3", "killed"),
        ("rank 0 could not complete the all-reduce: Timed out waiting 1000ms for recv", "timeout"),
    ],
)
def test_failed_ranks_are_a_row_and_new_ranks_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, status: str
) -> None:
    rows, ranks, _ = run(
        tmp_path, monkeypatch, lambda case: reason if (case.ranks, case.message_bytes) == (2, 2 * MB) else ""
    )
    assert [row.status for row in rows] == ["ok", status, "ok", status, "ok", "ok", "ok", "ok"]
    assert [len(request.cases) for _, request in ranks.requests] == [4, 2, 4]
    assert rows[1].reason.startswith("rank ")
    assert "what it said" in (tmp_path / "out" / "logs" / f"{rows[1].key}.log").read_text()


def test_ranks_that_never_start_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepscopeError, match="at once: no such interface"):
        run(tmp_path, monkeypatch, lambda _: "at once: no such interface")
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_finished_cases_are_not_rerun_unless_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, monkeypatch, lambda case: "rank 1: ValueError" if case.ranks == 4 else "")
    _, ranks, listener = run(tmp_path, monkeypatch)
    assert (ranks.requests, listener.done) == ([], 8)
    rows, _, listener = run(tmp_path, monkeypatch, retry=Retry.FAILED)
    assert len(listener.waiting) == 4
    assert [row.status for row in rows] == ["ok"] * 8
    _, _, listener = run(tmp_path, monkeypatch, fresh=True)
    assert len(listener.waiting) == 8


def test_interrupt_keeps_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(case: CommCase) -> str:
        if case.ranks == 4:
            raise KeyboardInterrupt
        return ""

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch, interrupt)
    _, _, listener = run(tmp_path, monkeypatch)
    assert (listener.done, len(listener.waiting)) == (4, 4)


# --- Ranks under an external launcher -------------------------------------------------------------------------------


def run_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, grid: CommGrid, fail: Failing = lambda _: ""
) -> tuple[tuple[CommRow, ...] | None, list[tuple[Setup, MeasureComm]]]:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(job, "_look_here", lambda *_: (RankHost(device="cpu", world=3), ENVIRONMENT))
    asked = []

    def serve(setup: Setup, request: MeasureComm, tell: Callable[[object], None]) -> None:
        asked.append((setup, request))

        def hear(rank: int, message: object) -> None:
            if rank == 0:
                tell(message)

        Ranks(fail).run(request, setup, folder / "ranks", hear)

    monkeypatch.setattr(job, "serve_here", serve)
    sweep = Sweep(experiment=CommExperiment(grid=grid), folder=folder / "out", command="stepscope comm")
    return run_comm(sweep, Silent(), remark=fail_on_remark), asked


def test_under_torchrun_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = CommGrid(collective=("broadcast",), sizes=(MB,))
    rows, asked = run_started(tmp_path, monkeypatch, 0, grid)
    assert rows is not None
    assert [(row.case.ranks, row.status) for row in rows] == [(3, "ok")]
    (again, asked) = run_started(tmp_path, monkeypatch, 0, grid)
    assert again == rows
    assert [request.cases for _, request in asked] == [()]  # nothing is left to run, and the others must be told


def test_under_torchrun_a_failure_is_a_row_and_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = CommGrid(collective=("broadcast",), sizes=(MB, 2 * MB))
    with pytest.raises(StepscopeError, match="rank 1: ValueError"):
        run_started(tmp_path, monkeypatch, 0, grid, lambda _: "rank 1: ValueError")
    rows, _ = run_started(tmp_path, monkeypatch, 0, grid)
    assert rows is not None
    assert [row.status for row in rows] == ["error", "ok"]


def test_under_torchrun_another_number_of_ranks_raises_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        with pytest.raises(StepscopeError, match="`--ranks 2` does not match the 3 ranks"):
            run_started(tmp_path, monkeypatch, rank, CommGrid(ranks=(2,)))
    assert not (tmp_path / "out").exists()


# --- The grid ---------------------------------------------------------------------------------------------------------


def test_unset_axes_use_the_defaults_of_the_machine() -> None:
    on_cpu = CommGrid().cases(RankHost(device="cpu"))
    assert {(case.backend, case.ranks) for case in on_cpu} == {("gloo", 2), ("gloo", 4)}
    assert max(case.message_bytes for case in on_cpu) == 64 * MB
    on_gpus = CommGrid().cases(RankHost(device="cuda", gpus=6))
    assert {(case.backend, case.ranks) for case in on_gpus} == {("nccl", 2), ("nccl", 4), ("nccl", 6)}
    assert (min(case.message_bytes for case in on_gpus), max(case.message_bytes for case in on_gpus)) == (MB, 1000 * MB)
    assert {case.ranks for case in CommGrid().cases(RankHost(device="cuda", gpus=1))} == {1}


def test_nccl_has_at_most_one_rank_per_gpu() -> None:
    with pytest.raises(StepscopeError, match="`4` ranks with NCCL on 1 GPU") as raised:
        CommGrid(ranks=(4,)).cases(RankHost(device="cuda", gpus=1))
    assert raised.value.hint == "stepscope comm --ranks 1, or --backend gloo"
    assert CommGrid(ranks=(4,), backend="gloo").cases(RankHost(device="cuda", gpus=1))


def test_flags_make_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    grid = grid_from_texts(
        CommGrid, {"sizes": "1MB, 1GB,1MiB", "ranks": "6", "dtype": "bf16", "collective": "broadcast,broadcast"}
    )
    cases = grid.cases(RankHost(device="cpu"))
    assert [case.message_bytes for case in cases] == [MB, 1000 * MB, 2**20]
    assert {(case.collective, case.ranks, case.dtype, case.interface) for case in cases} == {
        ("broadcast", 6, "bf16", "eth1")
    }


def test_message_is_rounded_down_to_equal_parts_for_all_ranks() -> None:
    (case,) = CommGrid(collective=("all-gather",), sizes=(MB,), ranks=(6,)).cases(RankHost(device="cpu"))
    assert (case.message_bytes, case.moved_bytes) == (MB, 999_984)
    assert case.needed_bytes == 999_984 + 166_664


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"collective": "all-redcue"}, "unknown collective: `all-redcue`"),
        ({"sizes": "many"}, "not a memory size: `many`"),
        ({"sizes": "1MB,,2MB"}, "empty value"),
        ({"sizes": "0"}, "too small for"),
        ({"ranks": "0"}, "ranks must be at least 1, got `0`"),
        ({"ranks": "two"}, "`--ranks`: not an integer: `two`"),
        ({"backend": "mpi"}, "unknown backend: `mpi`"),
        ({"backend": "nccl", "device": "cpu"}, "backend `nccl` does not support device `cpu`"),
        ({"device": "cuda:1"}, "unknown device: `cuda:1`"),
        ({"dtype": "fp8"}, "unknown dtype: `fp8`"),
        ({"seconds": "-1"}, "seconds must be positive"),
        ({"seconds": "0"}, "seconds must be positive"),
        ({"repetitions": "0"}, "repetitions must be at least 1, got `0`"),
    ],
)
def test_invalid_flags_raise_before_anything_runs(texts: dict[str, str], said: str) -> None:
    with pytest.raises(StepscopeError, match=said):
        grid_from_texts(CommGrid, texts)
