"""SS020: copies between CPU and GPU, and what to do about them by what they carry."""

import pytest

from stepscope.findings import Finding
from tests.unit.explain.test_rules_host import found, saving_us
from tests.unit.recordings import GEMM_BF16, TO_DEVICE, TO_DEVICE_PINNED, TO_HOST, Timeline

TO_HOST_PINNED = TO_HOST.replace("Pageable", "Pinned")


def copied(timeline: Timeline) -> Finding:
    finding = found(timeline.profile(), "SS020")
    assert finding is not None
    return finding


def layers(timeline: Timeline, phases: tuple[str, ...] = ("forward", "backward")) -> None:
    for phase in phases:
        with timeline.phase(phase):
            for _ in range(10):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")


@pytest.mark.parametrize("copy", [TO_DEVICE, TO_DEVICE_PINNED])
def test_batch_is_copied_one_step_ahead(copy: str) -> None:
    timeline = Timeline()
    for _ in range(3):
        with timeline.step():
            timeline.launch(copy, 500, op="aten::copy_", call="cudaMemcpyAsync", bytes=10_000_000)
            layers(timeline)
    finding = copied(timeline)
    assert "they carry the input" in finding.evidence
    assert "next_x = next(batches)" in finding.fix
    assert (".pin_memory()" in finding.fix) == (copy == TO_DEVICE)
    assert saving_us(timeline.profile(), "SS020") == pytest.approx(500, rel=0.02)


def test_copies_inside_a_step_are_not_its_input() -> None:
    timeline = Timeline()
    for _ in range(3):
        with timeline.step():
            layers(timeline, ("forward",))
            timeline.launch(TO_DEVICE_PINNED, 500, op="aten::copy_", bytes=10_000_000)
            layers(timeline, ("backward",))
    assert "next_x" not in copied(timeline).fix


def test_checkpoint_in_one_step() -> None:
    timeline = Timeline()
    for step in range(10):
        with timeline.step():
            layers(timeline)
            if step == 5:
                for _ in range(20):
                    timeline.launch(TO_HOST, 500, op="aten::copy_", call="cudaMemcpyAsync", bytes=8_000_000)
                    timeline.wait(call="cudaMemcpyAsync")
    finding = copied(timeline)
    assert finding.title == "Copies to the CPU take 10 ms in 1 of 10 steps"
    assert "async_save" in finding.fix
    assert finding.saving_ns is None
    assert finding.about == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize(("optimizer", "fix"), [("DeepSpeedCPUAdam", "offload_optimizer"), ("Mine", "on the GPU")])
def test_optimizer_on_the_cpu_needs_the_gradients(optimizer: str, fix: str) -> None:
    timeline = Timeline()
    for _ in range(3):
        with timeline.step():
            layers(timeline)
            timeline.launch(TO_HOST_PINNED, 2000, op="aten::copy_", call="cudaMemcpyAsync", bytes=50_000_000)
            timeline.wait()
            with timeline.range(f"Optimizer.step#{optimizer}.step"):
                timeline.host(5000)
            timeline.launch(TO_DEVICE_PINNED, 2000, op="aten::copy_", call="cudaMemcpyAsync", bytes=50_000_000)
    profile, finding = timeline.profile(), copied(timeline)
    assert found(profile, "SS002") is None
    assert found(profile, "SS019") is None
    assert finding.title == "Optimizer on the CPU: 9 ms per step in copies and the update"
    assert "after it waited for the gradients" in finding.evidence
    assert fix in finding.fix
    # The GPU updates 25 million parameters in 0.16 ms.
    assert saving_us(profile, "SS020") == pytest.approx(9000 - 164, rel=0.02)
