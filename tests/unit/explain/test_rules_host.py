"""Rules about the CPU: recordings in which each fires, and similar ones in which it does not."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.rules import RULES, find
from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Finding
from stepscope.recording.store import Overhead
from tests.unit.recordings import ADD, BF16, FOREACH, GEMM_BF16, SOFTMAX, TO_HOST, Timeline

US = 1000


def _all(profile: Profile) -> list[Finding]:
    """The findings, including those that are part of another."""
    return [one for finding in find(profile) for one in (finding, *finding.also)]


def found(profile: Profile, code: str) -> Finding | None:
    return next((finding for finding in _all(profile) if finding.code == code), None)


def saving_us(profile: Profile, code: str) -> float:
    finding = found(profile, code)
    assert finding is not None
    assert finding.saving_ns is not None
    return finding.saving_ns / US


def products(
    host_us: float, kernel_us: float, *, count: int = 100, steps: int = 2, phases: tuple[str, ...] = ("forward",)
) -> Timeline:
    timeline = Timeline(host_us=host_us)
    for _ in range(steps):
        with timeline.step():
            for phase in phases:
                with timeline.phase(phase):
                    for _ in range(count // len(phases)):
                        timeline.launch(GEMM_BF16, kernel_us, op="aten::mm")
        timeline.wait()
    return timeline


def test_replay_without_changes_reproduces_the_recording() -> None:
    for timeline in (products(20, 5), products(5, 20)):
        evidence = StepEvidence(profile=timeline.profile())
        start, end = evidence.window
        assert evidence.replayed_ns == pytest.approx(end - start, rel=0.01)


def test_launch_bound_step_is_found() -> None:
    # A launch every 20 µs for kernels of 2 µs: compiled, every 5 µs, in training every 9.
    assert saving_us(products(20, 2).profile(), "SS001") == pytest.approx(100 * 15, rel=0.02)
    training = products(20, 2, phases=("forward", "backward")).profile()
    assert saving_us(training, "SS001") == pytest.approx(100 * 11, rel=0.02)
    # With kernels of 16 µs and 1 µs between them, the step becomes GPU-bound before that.
    assert saving_us(products(20, 16).profile(), "SS001") == pytest.approx(100 * 3, rel=0.02)
    assert found(products(5, 20).profile(), "SS001") is None


def test_cpu_slowed_down_by_the_profiler_is_not_blamed() -> None:
    timeline = products(20, 15)
    assert found(timeline.profile(), "SS001") is not None
    without = timeline.profile(overhead=Overhead(plain_ns=100 * 15 * US + 20 * US))
    assert found(without, "SS001") is None


@pytest.mark.parametrize(
    ("host_us", "kernel_us", "plain_us", "expected"),
    [
        (20, 5, 10, 0.5),  # CPU-bound, and half as fast under the profiler
        (40, 20, 21, 0.53),  # GPU-bound: the slowest CPU speed that keeps up
        (30, 20, 21, 0.6),  # hardly behind even when profiled, so not as slow as that
        (20, 20, 20, 1.0),  # the profiler made no difference
        (20, 10, 5, 1.0),  # the kernels do not fit into an unprofiled step: the profiled ones are the clock
    ],
)
def test_speed_of_the_unprofiled_cpu(host_us: float, kernel_us: float, plain_us: float, expected: float) -> None:
    overhead = Overhead(plain_ns=round(400 * plain_us * US))
    evidence = StepEvidence(profile=products(host_us, kernel_us, count=400).profile(overhead=overhead))
    assert evidence.host_scale == pytest.approx(expected, abs=0.03)


def waiting(host_us: float, kernel_us: float, *, waits: bool = True) -> Timeline:
    """A wait in the middle of a step, by a copy to the CPU."""
    timeline = Timeline(host_us=host_us)
    for _ in range(3):
        with timeline.step(), timeline.phase("forward"):
            for half in range(2):
                for _ in range(50):
                    timeline.launch(GEMM_BF16, kernel_us, op="aten::mm")
                if not half and waits:
                    timeline.launch(TO_HOST, 2, op="aten::copy_", call="cudaMemcpyAsync")
                    timeline.wait(op="aten::_local_scalar_dense")
                    timeline.host(200)  # CPU work with the value, while the GPU is idle
        timeline.wait()
    return timeline


def test_a_wait_inside_a_step_is_seen_and_one_between_steps_is_not() -> None:
    profile = waiting(5, 20).profile()
    finding = found(profile, "SS002")
    assert finding is not None
    assert "aten::_local_scalar_dense" in finding.evidence
    assert "once per step" in finding.title
    assert saving_us(profile, "SS002") == pytest.approx(200, rel=0.15)
    assert found(waiting(5, 20, waits=False).profile(), "SS002") is None


def test_wait_costs_nothing_in_a_cpu_bound_step() -> None:
    assert found(waiting(60, 2).profile(), "SS002") is None


def test_wait_at_the_end_of_a_step_has_its_own_code() -> None:
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step(), timeline.phase("forward"):
            timeline.host(100)
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait(op="aten::item")
    profile = timeline.profile()
    assert found(profile, "SS002") is None
    # Two of three steps begin with an empty queue.
    assert saving_us(profile, "SS018") == pytest.approx(100 * 2 / 3, rel=0.2)
    assert found(products(5, 20).profile(), "SS018") is None
    assert found(waiting(5, 20).profile(), "SS018") is None


def ending(*, waits_in: int, backward: bool = True, rows: int = 4096) -> Timeline:
    """Ten steps; the first of them end with a wait."""
    timeline = Timeline(host_us=5)
    for step in range(10):
        with timeline.step():
            timeline.host(100)
            for phase in ("forward", "backward") if backward else ("forward",):
                with timeline.phase(phase):
                    for _ in range(25):
                        shapes = [[rows, 1024], [1024, 1024]]
                        timeline.launch(GEMM_BF16, 20, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16])
                        timeline.launch(SOFTMAX, 1, op="aten::_softmax")
            if step < waits_in:
                timeline.wait(op="aten::item")
                timeline.host(300)
    return timeline


@pytest.mark.parametrize(
    ("waits_in", "when", "fix"),
    [(10, "each step", "step % 100"), (9, "each step", ""), (3, "3 of 10 steps", "Event()")],
)
def test_steps_that_end_with_a_wait_are_counted(waits_in: int, when: str, fix: str) -> None:
    finding = found(ending(waits_in=waits_in).profile(), "SS018")
    assert finding is not None
    assert finding.title == f"CPU waits for the GPU at the end of {when}"
    assert fix in finding.fix


def test_stalls_in_few_steps_are_counted() -> None:
    timeline = ending(waits_in=0)
    with timeline.step():
        timeline.wait()
        timeline.host(5000)
        timeline.launch(GEMM_BF16, 20, op="aten::mm")
    finding = found(timeline.profile(), "SS019")
    assert finding is not None
    assert finding.evidence.startswith("in 1 of 11 steps the CPU launches nothing")


@pytest.mark.parametrize(("rows", "decodes"), [(1, True), (4096, False)])
def test_a_token_depends_on_the_one_before_it(rows: int, decodes: bool) -> None:
    finding = found(ending(waits_in=10, backward=False, rows=rows).profile(), "SS018")
    assert finding is not None
    assert ("results.append" in finding.fix) != decodes
    assert ("each token depends" in finding.evidence) == decodes
    assert (finding.saving_ns is None) == decodes
    assert ("reduce-overhead" in finding.fix) == decodes


def test_one_query_per_sequence_is_decoding() -> None:
    timeline = ending(waits_in=10, backward=False)
    with timeline.step():
        for keys, query in ((100, 1), (200, 1), (64, 64)):
            shapes = [[8, 16, query, 64], [8, 16, keys, 64], [8, 16, keys, 64]]
            timeline.launch(SOFTMAX, 1, op="aten::scaled_dot_product_attention", shapes=shapes)
    finding = found(timeline.profile(), "SS018")
    assert finding is not None
    assert "each token depends" in finding.evidence


@pytest.mark.parametrize(("device", "fix"), [("NVIDIA H200", "torch.bfloat16"), ("Tesla V100-SXM2-16GB", "fused=True")])
def test_gradient_scaler_is_named(device: str, fix: str) -> None:
    timeline = Timeline(host_us=5, device=device)
    for _ in range(3):
        with timeline.step():
            with timeline.phase("backward"):
                for _ in range(50):
                    timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.launch(FOREACH, 20, op="aten::_amp_foreach_non_finite_check_and_unscale_")
            timeline.wait(op="aten::_local_scalar_dense")
            timeline.host(200)
            with timeline.phase("optimizer"):
                for _ in range(50):
                    timeline.launch(ADD, 20, op="aten::add_")
    finding = found(timeline.profile(), "SS002")
    assert finding is not None
    assert "GradScaler" in finding.evidence
    assert fix in finding.fix
    assert ".item()" not in finding.fix


def test_waits_before_gradients_are_unscaled_are_not_of_the_scaler() -> None:
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait(op="aten::_local_scalar_dense")
            timeline.host(100)
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.launch(FOREACH, 20, op="aten::_amp_foreach_non_finite_check_and_unscale_")
    finding = found(timeline.profile(), "SS002")
    assert finding is not None
    assert "GradScaler" not in finding.evidence


@pytest.mark.parametrize("loader", [True, False])
def test_input_is_blamed_only_inside_a_loader(loader: bool) -> None:
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            # A loader inside a loader is one wait.
            name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__" if loader else "other"
            with timeline.range(name), timeline.range(name):
                timeline.host(500)
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait()
    profile = timeline.profile()
    if loader:
        assert saving_us(profile, "SS012") == pytest.approx(500, rel=0.05)
    else:
        assert found(profile, "SS012") is None


@pytest.mark.parametrize("away_us", [5000, 500])
def test_cpu_stalls_are_not_launch_overhead(away_us: float) -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        for half in range(2):
            for _ in range(200):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            if not half:
                timeline.host(3000 + away_us)  # 3 ms of work are queued by now
    profile = timeline.profile()
    if away_us > 1000:
        assert saving_us(profile, "SS019") == pytest.approx(away_us, rel=0.01)
        assert found(profile, "SS001") is None
    else:
        assert found(profile, "SS019") is None


def test_stall_at_the_end_of_a_step_counts() -> None:
    """Writing a log after the optimizer: the next kernel belongs to the next step."""
    timeline = Timeline(host_us=5)
    for _ in range(4):
        with timeline.step():
            for _ in range(200):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait()
            timeline.host(5000)
    # No kernel follows the stall of the last step.
    assert saving_us(timeline.profile(), "SS019") == pytest.approx(5000 * 3 / 4, rel=0.05)


@pytest.mark.parametrize("source", ["user", "module"])
def test_stacks_are_not_asked_for_if_the_trace_has_them(source: str) -> None:
    timeline = Timeline()
    with timeline.range("nn.Module: Block_0"):
        timeline.launch(GEMM_BF16, 20, op="aten::mm")
    recording = timeline.record()
    profile = make_profile(replace(recording, ranges=recording.ranges.with_columns(source=pl.lit(source))))
    look_up = RULES["SS019"].look_up
    assert look_up is not None
    command = look_up(profile)
    assert (command is not None and "with_stack" in command.text) == (source == "user")


def test_faster_kernel_does_not_help_a_cpu_bound_step() -> None:
    """The same recomputation in a GPU-bound and in a CPU-bound step."""

    def recomputing(host_us: float) -> Profile:
        timeline = Timeline(host_us=host_us)
        with timeline.step():
            with timeline.phase("forward"):
                for _ in range(100):
                    timeline.launch(GEMM_BF16, 20, op="aten::mm")
            with timeline.node(), timeline.module("block"):
                for _ in range(50):
                    timeline.launch(ADD, 20, op="aten::add")
        return timeline.profile()

    assert saving_us(recomputing(5), "SS013") == pytest.approx(50 * 20, rel=0.02)
    # Kernels that are not launched save CPU time: 50 launches of 100 µs.
    assert saving_us(recomputing(100), "SS013") == pytest.approx(50 * 100, rel=0.03)


def test_full_launch_queue_does_not_make_the_cpu_slow() -> None:
    """The CPU runs ahead until the queue is full, and then waits in each launch. With less work it would wait less."""
    timeline = Timeline(host_us=5, queue=600)
    with timeline.step():
        with timeline.phase("forward"):
            for _ in range(1000):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
        with timeline.node(), timeline.module("block"):
            for _ in range(1000):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
    profile = timeline.profile()
    assert StepEvidence(profile=profile).waits["kind"].unique().to_list() == ["queue"]
    assert saving_us(profile, "SS013") == pytest.approx(1000 * 20, rel=0.01)
    assert found(profile, "SS001") is None
    assert found(profile, "SS002") is None


def test_compiling_does_not_save_launches_of_the_optimizer() -> None:
    def updating(phase: str) -> Timeline:
        timeline = Timeline(host_us=20)
        with timeline.step(), timeline.phase(phase):
            for _ in range(100):
                timeline.launch(GEMM_BF16, 5, op="aten::mm")
        return timeline

    assert found(updating("backward").profile(), "SS001") is not None
    assert found(updating("optimizer").profile(), "SS001") is None


def test_work_that_waits_for_another_stream_moves_with_it() -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
        with timeline.node(), timeline.module("block"):
            timeline.launch(ADD, 300, op="aten::add")
        timeline.launch(GEMM_BF16, 100, op="aten::mm", stream=9, after=7)
    assert saving_us(timeline.profile(), "SS013") == pytest.approx(300, rel=0.01)
