"""The clock of a profile, the clock of the rules, and the columns of decoded names."""

import pytest

from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.trace.names import NAME_COLUMNS
from stepscope.explain.trace.profile import Profile
from stepscope.recording.store import Overhead
from tests.unit.recordings import ADD, GEMM_BF16, Timeline

US = 1_000


def two_steps(plain_us: int | None = None) -> Profile:
    """300 µs of kernels per step, 100 µs of which overlap with others."""
    timeline = Timeline(host_us=5)
    for _ in range(2):
        with timeline.step(), timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 200, op="aten::mm")
            timeline.launch(ADD, 100, stream=9)
            timeline.wait()
    overhead = Overhead(plain_ns=plain_us * US) if plain_us is not None else None
    return timeline.profile(overhead=overhead)


def test_a_recorded_step_is_the_window_over_its_steps() -> None:
    profile = two_steps()
    clock = profile.clock
    assert clock.num_steps == 2
    assert clock.step_ns == clock.plain_step_ns == clock.recorded_step_ns == profile.wall_ns / 2
    assert clock.is_recorded
    assert clock.busy_step_ns < 300 * US
    assert clock.idle_share == pytest.approx(1 - clock.busy_step_ns / clock.step_ns)


def test_unprofiled_step_counts_if_the_kernels_fit_into_it() -> None:
    clock = two_steps(plain_us=250).clock
    assert clock.step_ns == clock.plain_step_ns == 250 * US
    assert not clock.is_recorded
    short = two_steps(plain_us=100).clock
    assert short.busy_step_ns > 100 * US
    assert short.step_ns == short.recorded_step_ns
    assert short.plain_step_ns == 100 * US
    assert short.idle_share_of(short.plain_step_ns) == 0


def test_rules_use_the_unprofiled_clock_if_there_is_one() -> None:
    assert StepEvidence(profile=two_steps(plain_us=100)).step_ns == 100 * US
    recorded = two_steps()
    evidence = StepEvidence(profile=recorded)
    assert evidence.clock.busy_step_ns == recorded.clock.busy_step_ns
    assert evidence.step_ns == recorded.step_ns


def test_names_are_decoded_into_columns() -> None:
    kernels = two_steps().kernels
    assert set(NAME_COLUMNS) <= set(kernels.columns)
    product = kernels.row(0, named=True)
    assert (product["class"], product["dtype"], product["tensor_cores"]) == ("GEMM", "bf16", True)
    assert product["tile_m"]
    assert product["tile_n"]
    assert not kernels["is_fused"].any()
