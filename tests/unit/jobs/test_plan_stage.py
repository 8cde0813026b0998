"""The stage of a report that predicts: what it tries, what it leaves out, and when it does not apply."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.story.sources import Materials
from stepscope.findings import Advice, Copyable, Finding
from stepscope.jobs.experiments.sweep import Planned
from stepscope.jobs.plan import Planner
from stepscope.jobs.plan_search import OutOfTimeError
from stepscope.jobs.plan_target import choose_gpu
from stepscope.jobs.report import plan_stage
from stepscope.jobs.report.plan_stage import PlanStage, choose_changes, find_target, search
from stepscope.jobs.report.stage import StageWork, UnavailableError
from stepscope.jobs.workers.process import Died, Ended, Workers
from stepscope.recording.rows.plan_result import PlanResult
from stepscope.spec import Scalar, Workload, build_case
from stepscope.units import GIB
from tests.unit.jobs.test_report_job import NoWorkers
from tests.unit.plans import Formula, plan_of, workload
from tests.unit.rows import ENVIRONMENT

SDPA = Advice(
    finding=Finding(code="SS004", title="t", evidence="e", fix="f"),
    fixes=(Copyable(label="l", text="stepscope report --size small --context 256 --attention sdpa"),),
)


def work_on(driver_name: str = "NVIDIA H200", folder: Path = Path("data"), **settings: Scalar) -> StageWork:
    case = build_case({"size": "small", "device": "cuda:0", **settings})
    environment = msgspec.structs.replace(ENVIRONMENT, device=case.workload.device, driver_name=driver_name)
    planned = Planned(case=case, environment=environment, source=None)
    return StageWork(
        folder=folder,
        command="stepscope report",
        planned=planned,
        other=planned,
        workers=cast(Workers, NoWorkers()),
        fresh=False,
        on_stage=lambda _: None,
    )


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_stage, "find_here", lambda _: None)


def memory_of(one: Workload) -> int:
    saved = GIB if one.checkpoint != "none" else 0
    return (2 + 3 * one.micro_batch) * GIB - saved


class Late(Formula):
    """Has time for `most` simulations."""

    def __init__(self, most: int) -> None:
        super().__init__(141 * 10**9, memory_of)
        self.most = most

    def predict_all(self, workloads: Sequence[Workload]) -> list[PlanResult | StepscopeError]:
        found: list[PlanResult | StepscopeError] = []
        for one in workloads:
            in_time = self.simulations < self.most
            found += super().predict_all([one]) if in_time else [OutOfTimeError("not simulated within 60 s")]
        return found


def start_of(planner: Formula, **settings: Scalar) -> PlanResult:
    (start,) = planner.predict_all([workload(**settings)])
    assert isinstance(start, PlanResult)
    return start


def titles_for(start: PlanResult, *advice: Advice) -> list[str]:
    return [title for title, _ in choose_changes(start, advice)]


def test_what_the_workload_has_is_not_tried() -> None:
    plain = plan_of(workload(batch=4), allocated=8 * GIB)
    assert titles_for(plain) == [
        "bf16",
        "flash attention",
        "checkpoint every 3 blocks",
        "checkpoint every block",
        "2 micro-batches",
    ]
    settings: dict[str, Scalar] = {"precision": "bf16", "attention": "flash", "checkpoint": "block", "batch": 1}
    assert titles_for(plan_of(workload(**settings), allocated=8 * GIB)) == []


def test_the_attention_of_the_findings_is_tried() -> None:
    start = plan_of(workload(), allocated=8 * GIB)
    assert "sdpa attention" in titles_for(start, SDPA)
    assert "flash attention" not in titles_for(start, SDPA)


def test_an_optimizer_is_tried_only_where_its_own_memory_is_the_peak() -> None:
    start = msgspec.structs.replace(plan_of(workload(), allocated=8 * GIB), peak_phase="optimizer")
    assert "fused AdamW" in titles_for(start)


def test_search_has_changes_and_the_largest_batch() -> None:
    planner = Formula(141 * 10**9, memory_of)
    start = start_of(planner, batch=4)
    found = search(start, list(choose_changes(start, ())), planner, lambda _: None)
    assert [one.value for one in found.limits] == [42]
    assert {one.title for one in found.proposals} >= {"as it is", "checkpoint every block", "2 micro-batches"}
    assert found.simulations <= 12
    assert not found.notes


def test_step_that_does_not_fit_gets_combinations() -> None:
    planner = Formula(5_500_000_000, memory_of)
    start = start_of(planner, batch=2)
    found = search(start, list(choose_changes(start, ())), planner, lambda _: None)
    assert found.fitting
    assert all({"checkpoint", "grad_accumulation"} <= one.changes.keys() for one in found.fitting)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_search_keeps_what_there_was_time_for(most: int) -> None:
    planner = Late(most)
    start = start_of(planner, batch=4)
    found = search(start, list(choose_changes(start, ())), planner, lambda _: None)
    assert found.limits == ()
    assert found.notes == ("The search stopped after 60 s.",)
    assert len([one for one in found.proposals if not one.refused]) == min(most, 6)


def test_simulation_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Slow:
        def run(self, *_: Any, timeout_s: float, **__: Any) -> Ended:
            limits.append(timeout_s)
            return Ended(answer=Died(status="timeout", reason="timed out"), log=b"")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(Planner, "_start", lambda *_: Slow())
    with Planner(choose_gpu("H200", None), limit_s=5.0) as planner:
        (found,) = planner.predict_all([workload(batch=1)])
        assert isinstance(found, OutOfTimeError)
    assert 0 < limits[0] <= 5
    with Planner(choose_gpu("H200", None), limit_s=0.0) as planner:
        (found,) = planner.predict_all([workload(batch=2)])
        assert isinstance(found, OutOfTimeError)
    assert len(limits) == 1, "nothing starts after the limit"


@pytest.mark.parametrize(
    ("settings", "limit_s", "expected_s"),
    [({}, 60, 30), ({"compile": True}, 180, 90), ({"preset": "fast"}, 180, 90), ({"graph": True}, 60, 30)],
)
def test_a_compiled_step_has_three_times_as_long(
    settings: dict[str, Scalar], limit_s: int, expected_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def start(*_: object, limit_s: float, **__: object) -> None:
        limits.append(limit_s)
        raise UnavailableError("nothing starts")

    monkeypatch.setattr(plan_stage, "Planner", start)
    with pytest.raises(UnavailableError, match="nothing starts"):
        PlanStage().run(work_on(**cast(Any, settings)), Materials(name="a"))
    assert limits == [limit_s]
    assert PlanStage().expected_s(work_on(**cast(Any, settings))) == expected_s
    assert PlanStage().expected_s(work_on(device="cpu")) == 0
    planner = Late(1)
    found = search(start_of(planner, batch=4, **settings), (), planner, lambda _: None)
    assert found.notes == (f"The search stopped after {limit_s} s.",)


def test_target_is_the_gpu_of_the_report() -> None:
    assert find_target(work_on()).planned.name == "H200 SXM"
    assert find_target(work_on(memory_limit=10**10)).planned.memory_bytes == 10**10


@pytest.mark.parametrize(
    ("driver_name", "device", "why"),
    [
        ("a CPU", "cpu", "only steps on a GPU can be predicted"),
        ("Some GPU", "cuda:0", "nothing is known about the memory and kernels of `Some GPU`"),
        ("AMD MI300X", "cuda:0", "memory on `MI300X` cannot be predicted"),
    ],
)
def test_device_that_cannot_be_predicted_is_a_plain_sentence(driver_name: str, device: str, why: str) -> None:
    with pytest.raises(UnavailableError, match=why) as raised:
        PlanStage().run(work_on(driver_name, device=device), Materials(name="a"))
    assert raised.value.hint.startswith("stepscope plan --size small")
    assert "--device" not in raised.value.hint
    assert ("--gpu H200" in raised.value.hint) == (device == "cpu")
