"""`stepscope plan --fit`: everything that is called fitting was simulated exactly so, with few simulations."""

from collections.abc import Sequence

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.plan_search import Setting, find_fit, find_limits, list_changes, mark_front, rank
from stepscope.recording.rows.plan_result import Limit, PlanResult, Proposal, Verdict
from stepscope.spec import Workload
from stepscope.units import GIB, MIB
from tests.unit.plans import Formula, workload


def by_batch(one: Workload) -> int:
    return GIB + 300 * MIB * one.micro_batch


def start_of(planner: Formula, **settings: int | str) -> PlanResult:
    (start,) = planner.predict_all([workload(**settings)])
    assert isinstance(start, PlanResult)
    return start


def search_limit(setting: Setting, start: PlanResult, planner: Formula) -> Limit:
    (limit,) = find_limits((setting,), start, planner)
    return limit


@pytest.mark.parametrize("batch", [1, 4, 64, 500])
def test_largest_batch_is_found_with_few_simulations_from_anywhere(batch: int) -> None:
    planner = Formula(24 * 10**9, by_batch)
    limit = search_limit("batch", start_of(planner, batch=batch), planner)
    fitting = (24 * 10**9 - GIB - 512 * MIB) // (300 * MIB)
    assert (limit.value, limit.beyond) == (fitting, fitting + 1)
    assert planner.simulations <= 5


def test_both_sides_of_a_limit_were_simulated() -> None:
    planner = Formula(24 * 10**9, lambda one: GIB + 17 * MIB * one.batch + 90_000 * one.batch**2)
    limit = search_limit("batch", start_of(planner, batch=2), planner)
    asked = {one.batch for one in planner.asked}
    assert {limit.value, limit.beyond} <= asked
    assert limit.beyond == (limit.value or 0) + 1
    assert f"--batch {limit.value}" in limit.command


def test_quadratic_memory_of_a_context_converges() -> None:
    planner = Formula(24 * 10**9, lambda one: GIB + 2**20 * one.context + 2048 * one.context**2)
    limit = search_limit("context", start_of(planner), planner)
    assert limit.value is not None
    assert limit.beyond is not None
    assert limit.beyond - limit.value == 32
    assert {limit.value, limit.beyond} <= {one.context for one in planner.asked}


def test_batch_stays_a_multiple_of_the_micro_batches() -> None:
    planner = Formula(24 * 10**9, by_batch)
    limit = search_limit("batch", start_of(planner, batch=8, grad_accumulation=4), planner)
    assert limit.value is not None
    assert limit.value % 4 == 0
    assert all(one.batch % 4 == 0 for one in planner.asked)


def test_nothing_fits_if_the_smallest_batch_does_not() -> None:
    planner = Formula(10**9, by_batch)
    limit = search_limit("batch", start_of(planner), planner)
    assert (limit.value, limit.beyond, limit.command) == (None, 1, "")


def test_a_model_without_more_positions_is_the_limit() -> None:
    planner = Formula(24 * 10**9, lambda one: GIB + MIB * one.context, refuses=lambda one: one.context > 1024)
    limit = search_limit("context", start_of(planner), planner)
    assert limit.value == 1024
    assert limit.is_cap


def test_workload_that_fits_gets_limits_and_single_changes() -> None:
    planner = Formula(80 * 10**9, by_batch)
    found = find_fit(workload(), planner, "stepscope plan")
    assert found.start.fits
    assert [limit.setting for limit in found.limits] == ["batch", "context"]
    assert all(len(one.changes) <= 1 for one in found.proposals)
    assert found.simulations == planner.simulations


def test_changes_are_combined_if_none_is_enough_alone() -> None:
    def allocated(one: Workload) -> int:
        size = 40 * 10**9
        size -= 8 * 10**9 * (one.precision == "bf16")
        size -= 8 * 10**9 * (one.attention == "flash")
        return size - 8 * 10**9 * (one.checkpoint != "none")

    planner = Formula(24 * 10**9, allocated)
    found = find_fit(workload(), planner, "stepscope plan")
    fitting = found.fitting
    assert fitting
    assert {"precision", "attention", "checkpoint"} <= fitting[0].changes.keys()
    assert found.proposals[0] == fitting[0]
    for flag in ("--precision bf16", "--attention flash", "--checkpoint"):
        assert flag in fitting[0].command


def test_workload_that_cannot_be_simulated_is_refused() -> None:
    planner = Formula(24 * 10**9, by_batch, refuses=lambda _: True)
    with pytest.raises(StepscopeError, match="too many positions"):
        find_fit(workload(), planner, "stepscope plan")


def test_a_change_that_cannot_be_simulated_keeps_the_others() -> None:
    planner = Formula(80 * 10**9, by_batch, refuses=lambda one: one.checkpoint != "none")
    found = find_fit(workload(), planner, "stepscope plan")
    refused = [one for one in found.proposals if one.refused]
    assert refused
    assert found.proposals[-len(refused) :] == tuple(refused)
    assert any(one.fits for one in found.proposals)


def test_changes_fit_the_workload() -> None:
    titles = [title for title, _ in list_changes(workload(precision="bf16", attention="flash", mode="inference"))]
    assert titles == []
    trained = dict(list_changes(workload(batch=6)))
    assert trained["2 micro-batches"] == {"grad_accumulation": 2}
    assert trained["6 micro-batches"] == {"grad_accumulation": 6}
    assert trained["checkpoint every block"] == {"checkpoint": "1"}
    assert "fused AdamW" not in dict(list_changes(workload(optimizer="sgd")))


def proposal(title: str, gib: int, ms: int, *, fits: bool = True) -> Proposal:
    size = gib * GIB
    verdict: Verdict = "fits" if fits else "does not fit"
    return Proposal(
        title=title, changes={}, command="", fits=fits, verdict=verdict, reserved_bytes=(size, size),
        margin_bytes=10 * GIB - size, step_ns=ms * 1_000_000,
    )  # fmt: skip


def test_front_has_what_nothing_else_beats() -> None:
    made = [proposal("a", 10, 10), proposal("b", 5, 20), proposal("c", 6, 25), proposal("d", 12, 10)]
    assert [one.title for one in mark_front(made) if one.on_front] == ["a", "b"]


def test_what_fits_is_ranked_by_time_and_the_rest_by_what_is_missing() -> None:
    made = [
        proposal("far", 30, 1, fits=False),
        proposal("slow", 4, 30),
        proposal("near", 11, 5, fits=False),
        proposal("quick", 8, 10),
    ]
    assert [one.title for one in rank(made)] == ["quick", "slow", "near", "far"]


def test_what_fits_only_because_cached_memory_is_given_back_is_found() -> None:
    class Releasing(Formula):
        def _answer(self, one: Workload) -> PlanResult | StepscopeError:
            found = super()._answer(one)
            assert isinstance(found, PlanResult)
            reserved = round(1.1 * found.peak_allocated_bytes)
            return msgspec.structs.replace(found, reserved_bytes=(reserved, reserved))

    planner = Releasing(24 * 10**9, lambda one: GIB + 30 * MIB * one.batch)
    limit = search_limit("batch", start_of(planner), planner)
    fitting = (24 * 10**9 - GIB - 512 * MIB) // (30 * MIB)
    assert (limit.value, limit.beyond) == (fitting, fitting + 1)


def test_step_that_does_not_fit_is_tried_on_as_many_gpus_as_needed() -> None:
    planner = Formula(24 * 10**9, lambda one: 12 * GIB * one.batch // 4 * (1 + (one.batch < 16)))
    found = find_fit(workload(batch=4), planner, "stepscope plan")
    assert not found.start.fits
    tried = [(ranks.strategy, ranks.count) for ranks in planner.shared]
    assert tried[:4] == [("bucketed", 8), ("fsdp", 2), ("fsdp", 4), ("fsdp", 8)]
    sharded = next(one for one in found.proposals if one.title == "FSDP over 4 GPUs")
    assert "stepscope train" in sharded.command
    assert sharded.command.endswith("--ranks 4 --strategy fsdp")
    assert "--batch 16" in sharded.command


def test_more_gpus_than_needed_are_not_proposed() -> None:
    planner = Formula(24 * 10**9, lambda one: 30 * GIB if one.batch == 4 else GIB)
    found = find_fit(workload(batch=4), planner, "stepscope plan")
    assert {one.changes["ranks"] for one in found.proposals if "ranks" in one.changes} == {2, 8}


def test_nothing_is_tried_on_one_gpu_that_cannot_hold_the_parameters() -> None:
    planner = Formula(24 * 10**9, lambda one: 48 * GIB if one.attention == "naive" or one.batch < 16 else 20 * GIB)
    found = find_fit(workload(batch=4), planner, "stepscope plan")
    assert planner.asked == [found.start.workload]
    assert all(one.value is one.beyond is None for one in found.limits)
    assert found.fitting[0].title == "bf16 + flash attention + fused AdamW + FSDP over 4 GPUs"
    assert "--attention flash" in found.fitting[0].command


def test_what_fits_on_one_gpu_comes_before_what_needs_several() -> None:
    several = msgspec.structs.replace(proposal("several", 2, 5), changes={"ranks": 2})
    made = [several, proposal("one", 4, 30), proposal("smaller", 3, 40)]
    assert [one.title for one in rank(made)] == ["one", "smaller", "several"]
    assert [one.title for one in mark_front(made) if one.on_front] == ["one", "smaller"]


def test_limits_are_searched_for_at_the_same_time() -> None:
    class Counting(Formula):
        def predict_all(self, workloads: Sequence[Workload]) -> list[PlanResult | StepscopeError]:
            together.append(len(workloads))
            return super().predict_all(workloads)

    together: list[int] = []
    planner = Counting(24 * 10**9, lambda one: GIB + 100_000 * one.batch * one.context)
    batch, context = find_limits(("batch", "context"), start_of(planner, batch=4), planner)
    assert together[1] == 2, "after the start, one of each"
    assert batch == search_limit("batch", start_of(planner, batch=4), planner)
    assert context == search_limit("context", start_of(planner, batch=4), planner)
