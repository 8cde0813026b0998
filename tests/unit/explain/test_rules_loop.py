"""Findings about a training script: input first, with the arguments of its own loader, and lines of code."""

from typing import Any

import pytest

from stepscope.explain.rules import find
from stepscope.explain.trace.loop.loop_time import INPUT_PARTS, measure_loop
from stepscope.findings import Finding
from tests.unit.explain.test_rules_host import found
from tests.unit.loop_recordings import LoopPlan, profile_loop, record_loop
from tests.unit.recordings import FOREACH, GEMM_BF16, Timeline


def first(plan: LoopPlan) -> Finding:
    return find(profile_loop(plan))[0]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_input_that_takes_a_third_of_the_step_comes_first(on_cpu: bool, num_workers: int) -> None:
    """Small kernels on a slow CPU: compiling would save more."""
    loading_us = 330 if on_cpu else 1_300
    plan = LoopPlan(
        on_cpu=on_cpu,
        num_workers=num_workers,
        loading_us=loading_us,
        micro_batches=1,
        num_kernels=10 if on_cpu else 60,
        kernel_us=10,
        host_us=20,
        reads_loss=False,
    )
    finding = first(plan)
    assert finding.code == "SS012"
    assert 0.25 < (finding.about or 0.0) < 0.5


def test_input_time_on_a_cpu_is_that_of_unprofiled_steps() -> None:
    profile = profile_loop(LoopPlan(on_cpu=True, collating_us=100, unprofiled=0.5))
    loop, finding = measure_loop(profile), find(profile)[0]
    assert loop is not None
    assert (finding.about or 0.0) * profile.clock.step_ns == pytest.approx(loop.time_of(*INPUT_PARTS), rel=1e-6)
    assert finding.saving_ns == pytest.approx(1_000_000, rel=0.01)
    assert finding.joint_ns == finding.saving_ns


def test_loading_that_the_gpu_hides_is_not_a_finding() -> None:
    plan = LoopPlan(loading_us=900, num_kernels=40, kernel_us=200, micro_batches=1, reads_loss=False)
    assert found(profile_loop(plan), "SS012") is None


@pytest.mark.parametrize(
    ("loader", "expected", "unexpected"),
    [
        ({"num_workers": 0}, ["num_workers=6,  # was 0", "persistent_workers=True"], ["prefetch_factor"]),
        ({"num_workers": 4}, ["# was 4", "prefetch_factor=4", "pin_memory=True,  # was False"], []),
        ({"num_workers": 4, "prefetch_factor": 3}, ["prefetch_factor=6,  # was 3"], []),
        ({"pin_memory": True}, ["pin_memory=True,\n"], ["pin_memory=True,  # was"]),
        ({"batch_size": None}, ["dataset,  # TokenDataset"], ["batch_size"]),
        ({"batch_size": 12}, ["batch_size=12,\n"], []),
    ],
)
def test_fix_has_the_arguments_of_the_loader(
    loader: dict[str, Any], expected: list[str], unexpected: list[str]
) -> None:
    plan = LoopPlan(loading_us=3_000, num_workers=loader.get("num_workers", 0), loader=loader)
    fix = first(plan).fix
    assert all(text in fix for text in expected), fix
    assert not any(text in fix for text in unexpected), fix
    compile(fix, "fix", "exec")


def test_number_of_workers_keeps_up_with_the_step() -> None:
    """Loading takes ten times as long as the rest of the step."""
    finding = first(LoopPlan(on_cpu=True, loading_us=12_800, micro_batches=1, unprofiled=1.0))
    assert finding.action == "Load batches in 16 worker processes"


def test_workers_share_an_iterable_dataset() -> None:
    for num_workers in (0, 2):
        plan = LoopPlan(loading_us=3_000, num_workers=num_workers, loader={"is_iterable": True})
        assert (", each with its share of `" in first(plan).action) == (not num_workers)


def test_trainer_of_transformers_gets_its_own_arguments() -> None:
    timeline = Timeline(host_us=5)
    for _ in range(2):
        with timeline.step():
            with timeline.phase("input"):
                timeline.host(2_000)
            with timeline.line("transformers/trainer.py:2345"):
                timeline.launch(GEMM_BF16, 300, op="aten::mm")
            timeline.wait()
    loop = record_loop(LoopPlan()).manifest.loop
    assert "dataloader_num_workers=" in find(timeline.profile(loop=loop))[0].fix


# --- Lines ------------------------------------------------------------------------------------------------------------


def test_waits_name_the_line() -> None:
    plan = LoopPlan(loading_us=0, host_us=20, kernel_us=40, num_kernels=3, micro_batches=1, unprofiled=None)
    finding = found(profile_loop(plan), "SS018")
    assert finding is not None
    assert "at train.py:50" in finding.evidence


def test_copies_and_longest_kernels_name_their_lines() -> None:
    findings = {one.code: one for lead in find(profile_loop(LoopPlan())) for one in (lead, *lead.also)}
    assert "train.py:40" in findings["SS020"].evidence
    assert "they carry the input" in findings["SS020"].evidence
    assert "mostly launched at model.py:12" in findings["SS014"].evidence


def test_clipping_that_waits_has_its_own_advice() -> None:
    timeline = Timeline(host_us=20)
    for _ in range(3):
        with timeline.step():
            for _ in range(3):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
            with timeline.phase("clipping"), timeline.line("train.py:45"):
                timeline.host(1)
                timeline.wait(op="aten::_local_scalar_dense")
            for _ in range(3):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
    finding = found(timeline.profile(), "SS002")
    assert finding is not None
    assert finding.action == "Clip gradients without reading their norm"
    assert "at train.py:45" in finding.evidence


# --- Rules about the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_gradients_filled_with_zeros(sets_to_none: bool) -> None:
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            for _ in range(10):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
            with timeline.range("Optimizer.zero_grad#AdamW.zero_grad"), timeline.line("train.py:47"):
                if not sets_to_none:
                    timeline.launch(FOREACH, 80, op="aten::_foreach_zero_")
            timeline.wait()
    finding = found(timeline.profile(), "SS027")
    assert (finding is None) == sets_to_none
    if finding is not None:
        assert finding.saving_ns == pytest.approx(80_000, rel=0.1)
        assert "train.py:47" in finding.evidence


def test_gradients_filled_with_zeros_on_a_cpu() -> None:
    """An operator takes the time of the step itself."""
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            for _ in range(10):
                timeline.compute("aten::mm", 100)
            timeline.compute("aten::add", 2)
            with timeline.range("Optimizer.zero_grad#AdamW.zero_grad"):
                timeline.compute("aten::zero_", 80)
    finding = found(timeline.profile(device="AMD EPYC"), "SS027")
    assert finding is not None
    assert finding.saving_ns == pytest.approx(80_000, rel=0.1)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_checkpoint_in_the_recorded_steps_is_a_remark(on_cpu: bool) -> None:
    finding = found(profile_loop(LoopPlan(on_cpu=on_cpu, checkpoint_us=300)), "SS028")
    assert finding is not None
    assert finding.is_remark
    assert finding.title == "A checkpoint is saved in 3 of 3 recorded steps"
    assert found(profile_loop(LoopPlan(on_cpu=on_cpu)), "SS028") is None


@pytest.mark.parametrize(("skipped", "is_found"), [(0, False), (1, False), (5, True)])
def test_scaler_that_skips_many_steps_is_a_remark(skipped: int, is_found: bool) -> None:
    profile = profile_loop(LoopPlan(), uses_scaler=True, skipped_steps=skipped, steps_seen=13)
    finding = found(profile, "SS029")
    assert (finding is not None) == is_found
    if finding is not None:
        assert finding.title == "GradScaler skipped 5 of 13 steps"
