"""The attention sweep: its cases, and what a case that ends its process costs the others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.experiments import sweep as job
from stepscope.jobs.experiments.attention_sweep import AttentionExperiment
from stepscope.jobs.experiments.flag_grids import AttentionGrid, grid_from_texts
from stepscope.jobs.experiments.sweep import PlannedCase, Sweep
from stepscope.jobs.workers.messages import (
    AttentionDone,
    AttentionMeasured,
    Failed,
    MeasureAttention,
    ProbeCases,
    Probed,
    ProbedModel,
    Result,
)
from stepscope.jobs.workers.process import Died, Ended
from stepscope.recording.rows.attention_case import AttentionCase, AttentionOutcome, AttentionRow
from stepscope.recording.rows.bench import Retry, Row
from tests.unit.rows import ENVIRONMENT

GRID = AttentionGrid(implementation=("naive", "triton"), head_dim=(64,), length=(256, 512, 1024))


class Silent:
    """A listener that only counts."""

    def __init__(self) -> None:
        self.waiting: list[object] = []
        self.done = 0

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None:
        self.waiting = [one.case for one in planned]
        self.done = len(done)
        assert repaired_bytes == 0

    def start(self, planned: PlannedCase[Any]) -> None:
        assert planned.expected_s > 0

    def stage(self, name: str) -> None:
        pass

    def finish(self, row: Row) -> None:
        pass


class Workers:
    """Replaces the processes. `end` says how a case ends its process, if it does."""

    def __init__(self, end: Callable[[AttentionCase], Result | Died | None], at_last: Result | Died | None) -> None:
        self._end, self._at_last = end, at_last
        self.requests: list[MeasureAttention] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, request: Any, *, on_part: Callable[[AttentionMeasured], None] = lambda _: None, **_: object) -> Ended:
        if isinstance(request, ProbeCases):
            builtin = ProbedModel(source=None, takes_context=True)
            return Ended(answer=Probed(environment=ENVIRONMENT, models=(builtin,)), log=b"")
        self.requests.append(request)
        for case in request.cases:
            if (ended := self._end(case)) is not None:
                return Ended(answer=ended, log=b"what it said")
            on_part(AttentionMeasured(outcome=AttentionOutcome(status="ok")))
        return Ended(answer=self._at_last or AttentionDone(), log=b"")


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[AttentionCase], Result | Died | None] = lambda _: None,
    at_last: Result | Died | None = None,
    **more: Any,
) -> tuple[tuple[AttentionRow, ...], Workers, Silent]:
    workers, listener = Workers(end, at_last), Silent()
    monkeypatch.setattr(job, "Workers", lambda: workers)
    experiment = AttentionExperiment(grid=GRID)
    rows = Sweep(experiment=experiment, folder=folder, command="stepscope attention", **more).run(listener)
    return rows, workers, listener


def test_one_process_per_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, workers, _ = run(tmp_path, monkeypatch)
    assert [row.status for row in rows] == ["ok"] * 6
    assert [[case.implementation for case in request.cases] for request in workers.requests] == [
        ["naive"] * 3,
        ["triton"] * 3,
    ]


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (Died(status="crash", reason="crashed with SIGSEGV while timing"), "crash"),
        (Failed(message="RuntimeError: an illegal memory access was encountered"), "error"),
        (Died(status="oom", reason="killed by the kernel's out-of-memory killer while checking"), "oom"),
    ],
)
def test_case_that_ends_its_process_is_a_row_and_another_process_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Result | Died, status: str
) -> None:
    rows, workers, _ = run(
        tmp_path, monkeypatch, lambda case: ended if (case.implementation, case.length) == ("naive", 512) else None
    )
    assert [row.status for row in rows] == ["ok", status, "ok", "ok", "ok", "ok"]
    assert [[case.length for case in request.cases] for request in workers.requests] == [
        [256, 512, 1024],
        [1024],
        [256, 512, 1024],
    ]
    log = tmp_path / "logs" / f"{rows[1].key}.log"
    assert log.exists() == (status != "oom")


@pytest.mark.parametrize(
    "ended", [Failed(message="RuntimeError: an old error"), Died(status="crash", reason="at exit")]
)
def test_process_that_fails_after_its_last_case_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Result | Died
) -> None:
    rows, _, _ = run(tmp_path, monkeypatch, at_last=ended)
    assert [row.status for row in rows] == ["ok"] * 6


def test_bad_input_found_by_a_worker_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Failed(message="memory limit exceeds the device's memory", bad_input=True)
    with pytest.raises(StepscopeError, match="exceeds the device's memory"):
        run(tmp_path, monkeypatch, lambda _: refused)
    assert list(tmp_path.iterdir()) == []


def test_finished_cases_are_not_rerun_unless_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Died(status="timeout", reason="timed out after 1 s")
    run(tmp_path, monkeypatch, lambda case: fails if case.length == 1024 else None)
    _, workers, listener = run(tmp_path, monkeypatch)
    assert (workers.requests, listener.waiting, listener.done) == ([], [], 6)
    rows, workers, listener = run(tmp_path, monkeypatch, retry=Retry.FAILED)
    assert len(listener.waiting) == 2
    assert [row.status for row in rows] == ["ok"] * 6
    _, _, listener = run(tmp_path, monkeypatch, fresh=True)
    assert len(listener.waiting) == 6


def test_interrupt_keeps_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(case: AttentionCase) -> None:
        if case.length == 1024:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch, interrupt)
    _, _, listener = run(tmp_path, monkeypatch)
    assert (listener.done, len(listener.waiting)) == (2, 4)


# --- The grid -------------------------------------------------------------------------------------------------------


def test_unset_axes_use_the_defaults_of_the_device() -> None:
    on_cuda, on_cpu = AttentionGrid().cases("cuda:0"), AttentionGrid().cases("cpu")
    assert {case.precision for case in on_cuda} == {"bf16"}
    assert {case.precision for case in on_cpu} == {"fp32"}
    assert {case.head_dim for case in on_cuda} == {16, 32, 64, 128}
    assert (min(case.length for case in on_cuda), max(case.length for case in on_cuda)) == (256, 65536)
    assert len(on_cpu) < 30 < len(on_cuda)
    assert all((case.batch, case.heads, case.causal) == (8, 1, True) for case in (*on_cuda, *on_cpu))


def test_tiled_stops_early_unless_named() -> None:
    def longest(grid: AttentionGrid) -> int:
        return max(case.length for case in grid.cases("cuda:0") if case.implementation == "tiled")

    assert longest(AttentionGrid()) == 8192
    assert longest(AttentionGrid(implementation=("tiled",))) == 65536


def test_flags_make_a_grid() -> None:
    grid = grid_from_texts(
        AttentionGrid,
        {
            "implementation": "triton, naive,naive",
            "length": "1_024,2048",
            "head_dim": "64",
            "causal": "no",
            "seconds": "0.5",
        },
    )
    cases = grid.cases("cuda:0")
    assert [case.implementation for case in cases] == ["triton", "triton", "naive", "naive"]
    assert {case.length for case in cases} == {1024, 2048}
    assert not any(case.causal for case in cases)
    assert {case.seconds for case in cases} == {0.5}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"implementation": "trito"}, "unknown implementation: `trito`"),
        ({"length": "many"}, "`--length`: not an integer: `many`"),
        ({"length": "1,,2"}, "empty value"),
        ({"length": "0"}, "length must be at least 1, got `0`"),
        ({"precision": "fp12"}, "unknown precision"),
        ({"precision": "tf32", "device": "cpu"}, "`tf32` is unsupported on device `cpu`"),
        ({"seconds": "-1"}, "seconds must be positive"),
        ({"seconds": "0"}, "seconds must be positive"),
        ({"seed": "99999999999999999999999"}, "too large"),
        ({"memory_limit": "much"}, "not a memory size: `much`"),
    ],
)
def test_invalid_flags_raise_before_anything_runs(texts: dict[str, str], said: str) -> None:
    with pytest.raises(StepscopeError, match=said):
        grid_from_texts(AttentionGrid, texts)
