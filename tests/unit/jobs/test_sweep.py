"""The engine of every sweep: what is kept when a case fails, is rejected, or was run before."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.experiments.sweep import BenchExperiment, Planned, Sweep
from stepscope.jobs.workers.messages import Failed, MeasureStep, OutOfMemory, Result, StepMeasured
from stepscope.jobs.workers.process import Died, Ended, Workers
from stepscope.recording.rows.bench import BenchRow, Retry
from stepscope.recording.rows.results_file import read_rows
from tests.unit.jobs.test_attention_job import Silent
from tests.unit.rows import ENVIRONMENT
from tests.unit.rows import row as make_row

REFUSED = Failed(message="building `my_model` raised", bad_input=True)
CRASHED = Died(status="crash", reason="crashed with SIGSEGV while timing")


def plan(*seeds: int) -> list[Planned]:
    case = make_row().case
    workloads = [msgspec.structs.replace(case.workload, seed=seed) for seed in seeds]
    cases = [msgspec.structs.replace(case, workload=workload) for workload in workloads]
    return [Planned(case=one, environment=ENVIRONMENT, source=None) for one in cases]


class Answers:
    """Replaces the workers. `by_seed` says how cases end that are not measured."""

    def __init__(self, **by_seed: Result | Died) -> None:
        self._by_seed = by_seed
        self.asked: list[int] = []

    def run(self, request: MeasureStep, **_: Any) -> Ended:
        seed = request.case.workload.seed
        self.asked.append(seed)
        measurement = make_row().measurement
        assert measurement is not None
        measured = StepMeasured(measurement=measurement, doubts=())
        return Ended(answer=self._by_seed.get(f"seed_{seed}", measured), log=b"what it printed")


def run(folder: Path, answers: Answers, *seeds: int, **how: Any) -> tuple[BenchRow, ...]:
    sweep = Sweep(experiment=BenchExperiment(), folder=folder, command="stepscope bench", **how)
    return sweep.run_planned(plan(*seeds), cast(Workers, answers), Silent())


def statuses(folder: Path) -> list[tuple[int, str]]:
    """The rows in file order."""
    return [(row.case.workload.seed, row.status) for row in read_rows(folder / "results.jsonl", BenchRow)[0]]


def test_failed_case_is_a_row_with_its_log_and_the_others_run(tmp_path: Path) -> None:
    rows = run(tmp_path, Answers(seed_1=CRASHED, seed_2=OutOfMemory(reason="out of memory")), 0, 1, 2, 3)
    assert [row.status for row in rows] == ["ok", "crash", "oom", "ok"]
    assert statuses(tmp_path) == [(0, "ok"), (1, "crash"), (2, "oom"), (3, "ok")]
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {rows[1].key, rows[2].key}


def test_rejected_input_is_a_row_if_another_case_ran(tmp_path: Path) -> None:
    rows = run(tmp_path, Answers(seed_0=REFUSED), 0, 1)
    assert [row.status for row in rows] == ["error", "ok"]
    assert statuses(tmp_path) == [(1, "ok"), (0, "error")]
    assert not (tmp_path / "logs").exists()


def test_input_rejected_everywhere_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="building `my_model` raised"):
        run(tmp_path, Answers(seed_0=REFUSED, seed_1=REFUSED), 0, 1)
    assert list(tmp_path.iterdir()) == []


def test_share_of_a_grid_keeps_rejected_cases_as_rows(tmp_path: Path) -> None:
    run(tmp_path, Answers(seed_0=REFUSED), 0, keeps_refusals=True)
    assert statuses(tmp_path) == [(0, "error")]


def test_only_cases_without_a_final_row_are_run(tmp_path: Path) -> None:
    run(tmp_path, Answers(seed_1=CRASHED), 0, 1)
    for how, asked in (({}, [2]), ({"retry": Retry.FAILED}, [1]), ({"fresh": True}, [0, 1, 2])):
        answers = Answers()
        rows = run(tmp_path, answers, 0, 1, 2, **how)
        assert answers.asked == asked
        assert [row.case.workload.seed for row in rows] == [0, 1, 2]
