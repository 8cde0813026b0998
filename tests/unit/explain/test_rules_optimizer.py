"""SS007: updates of many kernels, what a fused one would take, and advice for the optimizer that the run has."""

import pytest

from stepscope.explain.rules.evidence import BANDWIDTH_SHARE
from stepscope.findings import Finding
from stepscope.spec import build_case
from tests.unit.explain.test_rules_host import found, saving_us
from tests.unit.recordings import ADD, FOREACH, FUSED_ADAM, GEMM_BF16, Timeline

H200_BYTES = 4.8e12


def update(kernel: str, *ops: str, count: int = 50, optimizer: str = "") -> Timeline:
    """Two steps; the kernels of the update are shared among these operators."""
    timeline = Timeline()
    for _ in range(2):
        with timeline.step():
            with timeline.phase("forward"):
                for _ in range(20):
                    timeline.launch(GEMM_BF16, 100, op="aten::mm")
            with timeline.range(f"Optimizer.step#{optimizer}.step" if optimizer else "phase:optimizer"):
                for number in range(count):
                    timeline.launch(kernel, 40, op=ops[number % len(ops)])
    return timeline


def advice(timeline: Timeline) -> Finding:
    finding = found(timeline.profile(), "SS007")
    assert finding is not None
    return finding


def test_unfused_optimizer_compared_with_one_pass_over_the_weights() -> None:
    parameters = 100_000_000
    case = build_case({"size": "small"})
    profile = update(FOREACH, "aten::_foreach_addcdiv_").profile(parameters=parameters, case=case)
    expected = 50 * 40 - 28 * parameters / (H200_BYTES * BANDWIDTH_SHARE) * 1e6
    assert saving_us(profile, "SS007") == pytest.approx(expected, rel=0.01)
    finding = found(profile, "SS007")
    assert finding is not None
    assert finding.title == "Optimizer launches 50 kernels per step"
    assert "`--optimizer adamw-fused`" in finding.action
    assert finding.fix == "stepscope profile --size small --context 128 --optimizer adamw-fused"
    plain_sgd = build_case({"size": "small", "optimizer": "sgd"})
    profile = update(FOREACH, "aten::_foreach_add_").profile(parameters=parameters, case=plain_sgd)
    expected = 50 * 40 - 12 * parameters / (H200_BYTES * BANDWIDTH_SHARE) * 1e6
    assert saving_us(profile, "SS007") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("optimizer", "bytes_per_parameter"), [("AdamW", 28), ("Adam", 28), ("SGD", 12)])
def test_saving_for_a_factory_optimizer_follows_from_its_class(optimizer: str, bytes_per_parameter: int) -> None:
    parameters = 100_000_000
    timeline, case = update(FOREACH, "aten::_foreach_add_"), build_case({"model": "mine:build"})
    profile = timeline.profile(parameters=parameters, case=case, optimizer=optimizer)
    expected = 50 * 40 - bytes_per_parameter * parameters / (H200_BYTES * BANDWIDTH_SHARE) * 1e6
    assert saving_us(profile, "SS007") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "ops", "saved"),
    [
        ("", ("addcdiv_", "mul_"), 1 - 28 / 80),
        ("SGD", ("mul_", "add_", "add_"), 1 - 20 / 32),
        ("SGD", ("add", "mul_", "add_", "add_"), 1 - 20 / 44),
        ("Adagrad", ("addcmul_", "sqrt", "add_", "addcdiv_"), 1 - 20 / 48),
    ],
)
def test_saving_without_a_parameter_count(optimizer: str, ops: tuple[str, ...], saved: float) -> None:
    timeline = update(FOREACH, *(f"aten::_foreach_{op}" for op in ops), optimizer=optimizer)
    assert saving_us(timeline.profile(), "SS007") == pytest.approx(2000 * saved)


def test_update_in_one_pass_has_no_finding() -> None:
    for optimizer in ("", "SGD", "NAdam"):
        assert found(update(FOREACH, "aten::_foreach_add_", optimizer=optimizer).profile(), "SS007") is None


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizer_is_the_one_that_the_run_has(optimizer: str) -> None:
    finding = advice(update(FOREACH, "aten::_foreach_mul_", "aten::_foreach_addcdiv_", optimizer=optimizer))
    assert finding.fix.startswith(f"optimizer = torch.optim.{optimizer}(model.parameters(), lr=lr, fused=True)")


def test_unknown_optimizer_is_not_replaced() -> None:
    finding = advice(update(FOREACH, "aten::_foreach_mul_", "aten::_foreach_addcdiv_"))
    assert "fused=True" in finding.fix
    assert "torch.optim" not in finding.fix


@pytest.mark.parametrize(
    ("optimizer", "kernel", "fix"),
    [
        ("NAdam", ADD, "torch.optim.NAdam(model.parameters(), lr=lr, foreach=True)"),
        ("NAdam", FOREACH, "torch.compile(optimizer.step)"),
        ("Lion", ADD, "torch.compile(optimizer.step)"),
    ],
)
def test_optimizer_without_a_fused_version(optimizer: str, kernel: str, fix: str) -> None:
    finding = advice(update(kernel, "aten::mul_", "aten::add_", optimizer=optimizer))
    assert fix in finding.fix
    assert "fused=True" not in finding.action + finding.fix
    assert finding.saving_ns is None
    assert finding.about == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("classes", "fix"), [(("Muon", "AdamW"), "AdamW"), (("Adam", "SGD"), "fused=True")])
def test_several_optimizers(classes: tuple[str, str], fix: str) -> None:
    timeline = update(FOREACH, "aten::_foreach_mul_", "aten::_foreach_addcdiv_", optimizer=classes[0])
    with timeline.range(f"Optimizer.step#{classes[1]}.step"):
        timeline.host(1)
    assert fix in advice(timeline).fix


def test_several_optimizers_without_a_fused_version() -> None:
    timeline = update(FOREACH, "aten::_foreach_mul_", "aten::_foreach_addcdiv_", optimizer="Muon")
    with timeline.range("Optimizer.step#DistAdam.step"):
        timeline.host(1)
    finding = advice(timeline)
    assert finding.action.endswith("not an argument of DistAdam and Muon")
    assert finding.saving_ns is None


def test_update_with_an_unknown_fused_version_may_be_too_short_to_report() -> None:
    assert found(update(ADD, "aten::mul_", "aten::add_", count=2, optimizer="NAdam").profile(), "SS007") is None


@pytest.mark.parametrize(
    ("kernel", "op", "share"), [(ADD, "aten::addcdiv_", 0.12), (FOREACH, "aten::_foreach_addcdiv_", 1.0)]
)
def test_fused_optimizer_still_walks_over_the_tensors(kernel: str, op: str, share: float) -> None:
    """Kernels per tensor, or for many tensors each, launched more slowly than they run. The fused one comes last."""
    timeline = Timeline(host_us=50)
    with timeline.step(), timeline.phase("optimizer"):
        for _ in range(100):
            timeline.launch(kernel, 40, op=op)
    fused = 100 * 40 * 28 / 80
    expected = max(0.0, 100 * 50 + 40 - (100 * 50 * share + fused))
    if expected:
        assert saving_us(timeline.profile(), "SS007") == pytest.approx(expected, rel=0.02, abs=10)
    else:
        assert found(timeline.profile(), "SS007") is None


def test_fused_optimizer_has_no_finding() -> None:
    profile = update(FUSED_ADAM, "aten::_fused_adamw_").profile(parameters=1_000_000)
    assert found(profile, "SS007") is None
