"""What only a GPU can show: events against the CPU clock, tf32, the allocator's limit, a sweep from end to end."""

from pathlib import Path

import pytest
import torch

from stepscope.measure import nvml
from stepscope.measure.bench import measure
from stepscope.measure.flops import count_forward_flops
from stepscope.measure.memory.limits import limit_memory
from stepscope.measure.timing import time_steps
from stepscope.spec import Case, ModelShape, Scalar, build_case
from stepscope.step import build
from tests.cli.command import rows, stepscope

CUDA = torch.device("cuda", 0)
TINY: dict[str, Scalar] = {
    "d_model": 128,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "vocab": 500,
    "device": "cuda:0",
}


def case(**settings: Scalar) -> Case:
    return build_case(TINY | settings)


def test_weights_are_created_on_the_device() -> None:
    step = build(case().workload, CUDA)
    assert {parameter.device for parameter in step.module.parameters()} == {CUDA}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash"])
def test_training_lowers_the_loss(precision: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.step.builder.LEARNING_RATE", 1e-2)
    step = build(case(precision=precision, attention=attention).workload, CUDA)
    losses = []
    for _ in range(10):
        step.run()
        assert step._loss is not None
        losses.append(float(step._loss.detach()))
    assert losses[-1] < losses[0] - 0.3


def test_fp32_is_fp32_and_tf32_is_not() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 512, 512, device=CUDA)
    truth = a.double() @ b.double()

    def error() -> float:
        return float(((a @ b).double() - truth).norm() / truth.norm())

    build(case(precision="fp32").workload, CUDA)
    assert error() < 1e-6
    build(case(precision="tf32").workload, CUDA)
    assert 1e-5 < error() < 1e-2
    build(case(precision="fp32").workload, CUDA)
    assert error() < 1e-6


def test_phases_add_up_on_the_device_and_events_agree_with_the_cpu_clock() -> None:
    step = build(case(d_model=1024, num_heads=16, d_ff=4096, context=512).workload, CUDA)
    time_steps(step, 3)
    found = time_steps(step, 5)
    for index, total in enumerate(found.step_ns):
        phases = sum(values[index] for values in found.phases_ns.values())
        assert abs(phases - total) < 20_000  # events tick in half microseconds
        assert found.enqueue_ns[index] <= found.host_step_ns[index]
        assert total <= found.host_step_ns[index] + 50_000


def test_measurement_reads_the_allocator() -> None:
    measurement, _ = measure(case(), CUDA, on_stage=lambda _: None)
    assert measurement.clock == "cuda events"
    assert measurement.peak_kind == "cuda allocator"
    assert measurement.reserved_bytes is not None
    # Weights, gradients and two moments in fp32 are the least that a training step holds.
    assert 16 * measurement.parameters <= measurement.peak_bytes <= measurement.reserved_bytes


def test_counting_halves_causal_attention_in_every_fused_kernel() -> None:
    for precision in ("fp32", "bf16"):
        step = build(case(attention="sdpa", precision=precision).workload, CUDA)
        model = step.workload.model
        assert isinstance(model, ModelShape)
        from stepscope import cost

        assert count_forward_flops(step) == cost.forward_flops(model, batch=4, context=128)


def test_driver_answers() -> None:
    assert nvml.driver_version()
    clocks = nvml.clocks(CUDA)
    assert clocks is not None
    assert 0 < clocks.sm_mhz <= clocks.max_sm_mhz
    assert nvml.throttle_reasons(CUDA) is not None
    assert nvml.other_processes(CUDA) == ()


def test_limit_above_the_device_memory_raises() -> None:
    with pytest.raises(Exception, match="exceeds the device's memory"):
        limit_memory(CUDA, 10**15)


def test_sweep_with_an_oom_row(tmp_path: Path) -> None:
    small = ["--size", "nano", "--steps", "2", "--warmup", "1", "--device", "cuda"]
    done = stepscope(tmp_path, "bench", *small, "--context", "64,2048", "--memory-limit", "700MB")
    assert done.returncode == 0, done.stderr
    assert {r["case"]["workload"]["context"]: r["status"] for r in rows(tmp_path)} == {64: "ok", 2048: "oom"}
    (oom,) = (r for r in rows(tmp_path) if r["status"] == "oom")
    assert "CUDA out of memory" in oom["reason"]


def test_transformers_model_runs_compiled(tmp_path: Path) -> None:
    arguments = ["--hf", "gpt2", "--set", "n_layer=2", "--set", "n_embd=128", "--set", "n_head=4"]
    done = stepscope(
        tmp_path, "bench", *arguments, "--precision", "bf16", "--compile", "--steps", "3", "--device", "cuda"
    )
    assert done.returncode == 0, done.stderr
    assert [r["status"] for r in rows(tmp_path)] == ["ok"]
