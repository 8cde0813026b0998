"""`stepscope bench --skip-oom`: cases that cannot fit do not run, and their rows say what was predicted."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.bench_tables import bench_table
from stepscope.jobs.experiments.sweep import BenchExperiment, Planned, Sweep
from stepscope.jobs.workers.messages import (
    Failed,
    Inspect,
    Inspected,
    MeasureStep,
    PredictStep,
    StepMeasured,
    StepPredicted,
)
from stepscope.jobs.workers.process import Ended, Workers
from stepscope.recording.rows.bench import BenchRow, DeviceState, Inspection, Retry
from stepscope.units import GIB
from tests.unit.jobs.test_attention_job import Silent
from tests.unit.plans import predict
from tests.unit.rows import ENVIRONMENT
from tests.unit.rows import row as make_row

GPU = DeviceState(
    name="NVIDIA H200",
    capability="9.0",
    free_bytes=139 * GIB,
    total_bytes=140 * GIB,
    sm_mhz=None,
    max_sm_mhz=None,
    throttled_by=None,
    other_processes=None,
)
MACHINE = Inspection(torch="2.11.0", torch_problem="", triton=None, cuda="13.0", driver=None, threads=1, devices=(GPU,))


class Machine:
    """Replaces the workers: a machine with a GPU, on which a sequence of the batch takes `gib` GiB."""

    def __init__(self, gib: int, *, can_predict: bool = True) -> None:
        self.gib, self.can_predict = gib, can_predict
        self.measured: list[int] = []

    def run(self, request: object, **_: Any) -> Ended:
        match request:
            case Inspect():
                return Ended(answer=Inspected(inspection=MACHINE), log=b"")
            case PredictStep(case=case, gpu=gpu) if self.can_predict:
                allocated = self.gib * GIB * case.workload.batch
                prediction = predict(case.workload, allocated=allocated, memory=gpu.memory_bytes)
                return Ended(answer=StepPredicted(predictions=(prediction,)), log=b"")
            case PredictStep():
                return Ended(answer=Failed(message="needs a value", bad_input=True), log=b"")
            case MeasureStep(case=case):
                self.measured.append(case.workload.batch)
                measurement = make_row().measurement
                assert measurement is not None
                return Ended(answer=StepMeasured(measurement=measurement, doubts=()), log=b"")
        raise AssertionError(request)


def plan(*batches: int, device: str = "cuda:0", **timing: int) -> list[Planned]:
    case = make_row().case
    case = msgspec.structs.replace(case, timing=msgspec.structs.replace(case.timing, **timing))
    workloads = [msgspec.structs.replace(case.workload, batch=batch, device=device) for batch in batches]
    environment = msgspec.structs.replace(ENVIRONMENT, device=device, driver_name="NVIDIA H200")
    return [
        Planned(case=msgspec.structs.replace(case, workload=one), environment=environment, source=None)
        for one in workloads
    ]


def run(folder: Path, machine: Machine, planned: list[Planned], **how: Any) -> tuple[BenchRow, ...]:
    sweep = Sweep(experiment=BenchExperiment(skips_oom=True), folder=folder, command="stepscope bench", **how)
    return sweep.run_planned(planned, cast(Workers, machine), Silent())


def test_case_that_cannot_fit_does_not_run(tmp_path: Path) -> None:
    machine = Machine(40)
    rows = run(tmp_path, machine, plan(1, 2, 4))
    assert machine.measured == [1, 2]
    assert [row.status for row in rows] == ["ok", "ok", "skipped"]
    assert rows[2].reason == "not run: predicted to allocate 160 GiB of 140 GiB"
    assert rows[2].predicted is not None
    assert rows[2].predicted.peak_allocated_bytes == 160 * GIB
    assert not (tmp_path / "logs").exists()


def test_a_memory_limit_counts(tmp_path: Path) -> None:
    machine = Machine(40)
    rows = run(tmp_path, machine, plan(1, 2, memory_limit=60 * GIB))
    assert [row.status for row in rows] == ["ok", "skipped"]


def test_skipped_case_runs_once_the_flag_is_gone(tmp_path: Path) -> None:
    run(tmp_path, Machine(40), plan(4))
    machine = Machine(40)
    sweep = Sweep(experiment=BenchExperiment(), folder=tmp_path, command="stepscope bench")
    rows = sweep.run_planned(plan(4), cast(Workers, machine), Silent())
    assert machine.measured == [4]
    assert rows[0].status == "ok"
    assert not msgspec.structs.replace(rows[0], status="skipped").is_settled(Retry.DOUBTFUL)


def test_case_that_cannot_be_predicted_runs(tmp_path: Path) -> None:
    machine = Machine(40, can_predict=False)
    rows = run(tmp_path, machine, plan(4))
    assert machine.measured == [4]
    assert rows[0].predicted is None


def test_nothing_is_predicted_for_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="nothing can be predicted") as error:
        run(tmp_path, Machine(40), plan(1, device="cpu"))
    assert "--skip-oom" in error.value.hint


def test_prediction_is_next_to_the_measurement(tmp_path: Path) -> None:
    table = bench_table(run(tmp_path, Machine(40), plan(1, 4)))
    keys = [column.key for column in table.columns]
    step, peak = keys.index("predicted_ms"), keys.index("predicted_bytes")
    assert [(row[step], row[peak]) for row in table.rows] == [(10.0, 40 * GIB), (10.0, 160 * GIB)]
    assert (
        keys.index("predicted_ms")
        < keys.index("tokens_per_s")
        < keys.index("peak_bytes")
        < keys.index("predicted_bytes")
    )
    errors = keys.index("predicted_step_error"), keys.index("predicted_peak_error")
    assert [table.rows[0][one] for one in errors] == pytest.approx([10 / 100 - 1, 40 - 1]), "100 ms and 1 GiB measured"
    assert [table.rows[1][one] for one in errors] == [None, None]
    assert table.rows[1][keys.index("remarks")] == "skipped"
