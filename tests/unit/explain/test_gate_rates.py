"""How often the gate fails, by simulation: rarely when nothing changed, nearly always on a real regression."""

import statistics

import numpy as np
import pytest

from stepscope.explain.gate.noise import FALSE_ALARMS
from stepscope.explain.gate.verdict import judge_runs
from stepscope.explain.trace.compare import welch_margin
from tests.unit.explain.gate_runs import H200, baseline_of, simulate

TRIALS = 1_000
# Three standard errors of a rate of `FALSE_ALARMS` over all trials.
SLACK = 3 * (FALSE_ALARMS / TRIALS) ** 0.5


def rate(num_base: int, num_new: int, *, slower: float = 0.0, run_sd: float, step_sd: float, limit: float) -> float:
    """The share of builds that fail."""
    generator = np.random.default_rng(7)
    failed = 0
    for _ in range(TRIALS):
        base = simulate(generator, num_base, run_sd=run_sd, step_sd=step_sd)
        new = simulate(generator, num_new, step_ms=10 * (1 + slower), run_sd=run_sd, step_sd=step_sd)
        failed += judge_runs(baseline_of(*base), new, H200, name="main", limit=limit).outcome == "fail"
    return failed / TRIALS


@pytest.mark.parametrize(
    ("num_base", "num_new", "run_sd", "step_sd"),
    [
        (2, 1, 0.02, 0.005),
        (3, 1, 0.02, 0.03),
        (5, 1, 0.02, 0.03),
        (5, 1, 0.0, 0.02),
        (5, 3, 0.02, 0.005),
        (1, 3, 0.02, 0.03),
    ],
)
def test_unchanged_code_rarely_fails(num_base: int, num_new: int, run_sd: float, step_sd: float) -> None:
    """With a limit of zero only the noise protects the build; any real limit fails less."""
    assert rate(num_base, num_new, run_sd=run_sd, step_sd=step_sd, limit=0.0) <= FALSE_ALARMS + SLACK


def test_the_margin_is_not_wider_than_it_says() -> None:
    """Noise between runs only: the share of false alarms is the stated one, not far below it."""
    assert rate(5, 1, run_sd=0.02, step_sd=0.0, limit=0.0) == pytest.approx(FALSE_ALARMS, abs=SLACK)


def test_a_limit_makes_false_alarms_rarer() -> None:
    assert rate(5, 1, run_sd=0.01, step_sd=0.01, limit=0.03) <= FALSE_ALARMS / 2


@pytest.mark.parametrize(("num_base", "num_new"), [(5, 1), (3, 3)])
def test_a_regression_of_ten_percent_fails(num_base: int, num_new: int) -> None:
    assert rate(num_base, num_new, slower=0.10, run_sd=0.01, step_sd=0.02, limit=0.03) >= 0.95


def test_an_interval_over_the_steps_of_single_runs_would_fail_unchanged_code() -> None:
    """Why runs are the samples, and not steps."""
    generator = np.random.default_rng(7)
    failed = 0
    for _ in range(TRIALS):
        (a,), (b,) = (simulate(generator, 1, run_sd=0.02, step_sd=0.005) for _ in range(2))
        difference = statistics.fmean(b.step_ns) - statistics.fmean(a.step_ns)
        failed += difference > welch_margin([*map(float, a.step_ns)], [*map(float, b.step_ns)])
    assert failed / TRIALS > 0.4
