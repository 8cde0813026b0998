"""The words, tables and pictures of `stepscope plan`."""

import msgspec
import pytest

from stepscope.explain.experiments.plan_tables import (
    TABLES,
    fit_figure,
    fit_page,
    limits_table,
    plan_page,
    plan_timeline,
    plans_table,
    proposals_table,
    say_fit,
    say_step_time,
    say_verdict,
    say_workload,
)
from stepscope.jobs.plan_search import find_fit
from stepscope.recording.rows.plan_result import FitResult, PlannedRanks, PlannedTimeline
from stepscope.render.drawing import draw_part
from stepscope.render.terminal import render_page
from stepscope.spec import Workload
from stepscope.units import GIB
from tests.unit.plans import Formula, plan_of, workload

FITS = plan_of(workload(), allocated=10 * GIB, reserved=(11 * GIB, 12 * GIB))


def search(gb: int) -> FitResult:
    def allocated(one: Workload) -> int:
        return GIB * one.micro_batch * (6 if one.checkpoint == "none" else 2)

    def step_ns(one: Workload) -> int:
        return 10**7 + 10**6 * (one.checkpoint != "none") + 2 * 10**6 * (one.passes - 1)

    planner = Formula(gb * 10**9, allocated, step_ns)
    return find_fit(workload(), planner, "stepscope plan")


def test_verdict_has_the_margin_with_context_and_the_most_that_may_be_reserved() -> None:
    assert FITS.margin_bytes == 141 * 10**9 - 12 * GIB - FITS.context_bytes
    assert say_verdict(FITS).startswith("It fits: 11 GiB to 12 GiB reserved and 512 MiB of CUDA context")
    assert "118.8 GiB to spare" in say_verdict(FITS)


@pytest.mark.parametrize(
    ("memory", "verdict"), [(13 * 10**9, "It may fit"), (12 * 10**9, "It does not fit"), (14 * 10**9, "It fits")]
)
def test_range_of_reserved_memory_decides_between_three_verdicts(memory: int, verdict: str) -> None:
    result = plan_of(workload(), allocated=10 * GIB, reserved=(11 * GIB, 12 * GIB), memory=memory)
    assert say_verdict(result).startswith(verdict)
    assert result.fits == (verdict == "It fits")


def test_time_comes_with_its_interval_bound_and_utilization() -> None:
    said = say_step_time(FITS)
    for part in ("10 ms (9 ms to 11 ms)", "bound by launch", "102,400 tokens/s", "MFU"):
        assert part in said


def test_without_a_table_of_the_gpu_there_is_no_time() -> None:
    result = plan_of(workload(), allocated=GIB, step_ns=None)
    assert (result.step_ns, result.step_ns_interval, result.mfu, result.tokens_per_s) == (None, None, None, None)
    assert "stepscope calibrate" in say_step_time(result)


def test_a_table_that_lacks_an_operation_is_named_as_the_reason() -> None:
    result = plan_of(workload(), allocated=GIB, step_ns=None)
    result = msgspec.structs.replace(result, assumptions=("No step time: the calibration has no times of `scan`.",))
    assert say_step_time(result) == "Step time: not predicted; the calibration has no times of `scan`."


def test_page_has_every_part() -> None:
    text = render_page(plan_page(FITS), width=100)
    for part in ("parameters", "activations", "forward", "blocks.0", "SDPA takes cuDNN's kernel", "10.0 GiB"):
        assert part in text


def test_categories_add_up_to_the_peak() -> None:
    *rows, total = TABLES["categories"](FITS).rows
    assert total == ("total", FITS.peak_allocated_bytes, 1.0)
    assert sum(row[1] for row in rows if isinstance(row[1], int)) == FITS.peak_allocated_bytes
    assert sum(row[2] for row in rows if isinstance(row[2], float)) == pytest.approx(1)


def test_timeline_is_drawn_with_its_phases() -> None:
    drawn = draw_part(plan_timeline(FITS))
    assert "forward" in drawn
    assert "activations" in drawn


def test_timeline_needs_a_value_per_slice() -> None:
    with pytest.raises(ValueError, match="one value per slice"):
        PlannedTimeline(areas={"parameters": (1,), "gradients": (1, 2)})


def test_several_predictions_are_one_table() -> None:
    other = plan_of(workload(batch=8), allocated=200 * GIB)
    rows = plans_table([FITS, other]).rows
    assert [row[1] for row in rows] == ["fits", "does not fit"]


def test_search_says_which_change_makes_it_fit() -> None:
    found = search(16)
    assert not found.start.fits
    assert say_fit(found).startswith("Fits with checkpoint every")
    text = render_page(fit_page(found), width=None)
    assert "--checkpoint" in text
    assert "saves" in text


def test_search_says_what_is_the_largest_if_it_fits() -> None:
    assert say_fit(search(80)).startswith("Largest that fits: batch 12, context")


def test_search_says_if_nothing_fits() -> None:
    found = search(1)
    said = "Nothing that was tried fits into 1 GB."
    assert say_fit(found).endswith(f"parameters, gradients and optimizer state alone take 12 GiB. {said}")
    small = tuple(msgspec.structs.replace(one, bytes=1) for one in found.start.categories)
    start = msgspec.structs.replace(found.start, categories=small)
    assert say_fit(msgspec.structs.replace(found, start=start)) == said
    assert all(row[1] is None for row in limits_table(search(1)).rows)


def test_proposals_have_saving_and_cost_compared_with_the_start() -> None:
    rows = {row[0]: row for row in proposals_table(search(80)).rows}
    checkpointed = rows["checkpoint every block"]
    assert checkpointed[3] == 16 * GIB
    assert checkpointed[7] == 1.0
    assert rows["as it is"][3] == 0


def test_front_is_drawn_through_its_points() -> None:
    found = search(80)
    figure = fit_figure(found)
    front = [point for point in figure.points if point.series == "front"]
    assert len(front) == sum(one.on_front for one in found.proposals) > 1
    (limit,) = {point.x for point in figure.points if point.series == "memory: 80 GB"}
    assert limit == 80e9 / GIB
    assert "checkpoint 1" in draw_part(figure)


def test_several_gpus_are_named_with_their_communication() -> None:
    ranks = PlannedRanks(count=8, strategy="bucketed", shard_optimizer=True)
    assert FITS.time is not None
    time = msgspec.structs.replace(FITS.time, communication_ns=4_000_000, exposed_ns=1_000_000)
    result = msgspec.structs.replace(FITS, ranks=ranks, time=time)
    assert "on bucketed with a sharded optimizer over 8 × H200 SXM" in say_workload(result)
    assert "1 ms of 4 ms communication exposed" in say_step_time(result)
