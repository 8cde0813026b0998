"""The dtypes in use, errors against a real truth, and autocast's lists as PyTorch registers them."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import StepscopeError
from stepscope.explain.precision.autocast import LISTS, REFUSED, explain_dtype, find_policy
from stepscope.measure.precision.accumulation import ALL, INVERSE, ONCE, RUNNING, add_up, measure_norm_parts
from stepscope.measure.precision.comparison import compare_precisions
from stepscope.recording.rows.precision_report import PrecisionComparison, PrecisionRun
from stepscope.spec import Precision, Scalar, build_case

TINY: dict[str, Scalar] = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab": 50, "context": 8}


def compare(*precisions: Precision, **settings: object) -> PrecisionComparison:
    case = build_case({"device": "cpu", "batch": 2, **settings})  # type: ignore[dict-item]
    return compare_precisions(case, precisions, torch.device("cpu"), on_stage=lambda _: None)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PrecisionComparison]:
    """Compares a model that the test defines: `own(build, "bf16")`."""

    def compare_own(build: Callable[..., object], *precisions: Precision) -> PrecisionComparison:
        module = ModuleType("made_by_a_test")
        module.build = build  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return compare(*precisions, model="made_by_a_test:build")

    return compare_own


def dtypes(run: PrecisionRun) -> dict[str, str]:
    assert run.logits is not None
    return {one.name: one.dtype for one in (*run.outputs, run.logits, run.loss)}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_dtypes_of_the_toy_model_on_a_cpu(low: Precision) -> None:
    wide, narrow = compare("fp32", low, model="stepscope.step.toy:build").runs
    assert set(dtypes(wide).values()) == {"fp32"}
    expected = dict.fromkeys(("fc1", "relu", "ln", "fc2", "logits"), str(low)) | {"loss": "fp32"}
    assert dtypes(narrow) == expected
    assert narrow.parameter_dtypes == narrow.gradient_dtypes == ("fp32",)
    assert all(one.gradient_dtype == one.dtype for one in narrow.outputs)
    mean = compare(low, model="stepscope.step.toy:build", set={"loss": "mean"}).runs[0]
    assert (mean.loss.dtype, mean.loss.operation) == (low, "mean")


def test_unknown_loss_raises() -> None:
    with pytest.raises(StepscopeError, match="unknown loss: `meen`") as caught:
        compare("fp32", model="stepscope.step.toy:build", set={"loss": "meen"})
    assert caught.value.hint == "--set loss=mean"


def test_built_in_model_is_seen_through_views_and_casts() -> None:
    run = compare("bf16", **TINY).runs[0]
    found = {one.name: (one.dtype, one.operation) for one in run.outputs}
    assert found["embedding"] == ("fp32", "index_select")
    assert found["blocks.1.attention"] == ("bf16", "matmul")
    assert found["blocks.0"] == ("fp32", "add")
    reasons = {one.name: explain_dtype(one, device="cpu", precision="bf16") for one in (*run.outputs, run.loss)}
    assert "rms_norm converts to fp32" in reasons["final_norm"]
    assert "cross_entropy converts to fp32" in reasons["loss"]
    assert "type promotion of fp32 and bf16" in reasons["blocks.0"]


def test_fewer_bits_cost_accuracy_and_the_truth_beats_fp32() -> None:
    comparison = compare("fp32", "bf16", "fp16", **TINY)
    errors = {run.precision: run.gradient_error or 0.0 for run in comparison.runs}
    assert 1e-8 < errors["fp32"] < 1e-6
    assert 1e-4 < errors["fp16"] < 3e-3
    assert 2 * errors["fp16"] < errors["bf16"] < 3e-2
    assert comparison.truth.narrowed == ()
    for run in comparison.runs:
        assert {one.module for one in run.gradients} >= {"embedding", "lm_head", "blocks.1.ffn.up", "final_norm"}


def test_truth_is_float64_even_if_a_model_asks_for_fp32(own: Callable[..., PrecisionComparison]) -> None:
    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).to(torch.float32).float() / (
                torch.full((8,), 3.3) + torch.zeros(8, dtype=torch.float32)
            )

    def loss(output: Tensor) -> Tensor:
        return output.float().exp().sum()

    def build(batch: int) -> object:
        return Narrowing(), torch.linspace(0, 1, 8).repeat(batch, 1), loss

    comparison = own(build, "fp32")
    weight, x = torch.linspace(0.1, 1, 8).double(), torch.linspace(0, 1, 8).double()
    assert comparison.truth.loss == pytest.approx(2 * (x * weight / 3.3).exp().sum().item(), rel=1e-15)
    assert comparison.truth.narrowed == ()
    assert comparison.runs[0].loss_error != 0


def test_narrow_dtypes_in_the_truth_are_reported(own: Callable[..., PrecisionComparison]) -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.type("torch.FloatTensor").to(x))

    def build(batch: int) -> object:
        return nn.Sequential(nn.Linear(4, 4), Odd(4, 4)), torch.randn(batch, 4), lambda output: output.sum()

    assert own(build, "fp32").truth.narrowed == ("1",)


def test_different_weights_or_inputs_raise(own: Callable[..., PrecisionComparison]) -> None:
    numbers = count()

    def other_weights(batch: int) -> object:
        model = nn.Linear(4, 4)
        nn.init.constant_(model.bias, next(numbers))
        return model, torch.randn(batch, 4), lambda output: output.sum()

    def other_inputs(batch: int) -> object:
        return nn.Linear(4, 4), torch.full((batch, 4), float(next(numbers))), lambda output: output.sum()

    with pytest.raises(StepscopeError, match="gave different weights"):
        own(other_weights, "fp32")
    with pytest.raises(StepscopeError, match="gave different inputs"):
        own(other_inputs, "fp32")


def test_dropout_is_disabled_and_calls_are_counted(own: Callable[..., PrecisionComparison]) -> None:
    class Twice(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)
            self.dropout = nn.Dropout(dropout)
            self.unused = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.dropout(self.inside(self.inside(x)))}

    def build(batch: int, dropout: float = 0.5) -> object:
        return Twice(dropout), torch.randn(batch, 8), lambda output: output["out"].square().mean()

    comparison = own(build, "fp32")
    assert comparison.truth.loss == own(partial(build, dropout=0.0), "fp32").truth.loss
    run = comparison.runs[0]
    assert run.gradient_error is not None
    assert run.gradient_error < 1e-6
    assert {one.name: one.calls for one in run.outputs} == {"inside": 2, "dropout": 1}
    # A dropout that does nothing is not the origin of its output.
    assert next(one.operation for one in run.outputs if one.name == "dropout") == "linear"


def test_small_gradients_underflow_in_fp16_unless_the_loss_is_scaled(own: Callable[..., PrecisionComparison]) -> None:
    def build(batch: int) -> object:
        return nn.Linear(16, 16), torch.ones(batch, 16), lambda output: output.float().mean() * 1e-7

    bf16, fp16 = own(build, "bf16", "fp16").runs
    shares = {one.scale: one.total.parameters_zero / one.total.parameters for one in fp16.backwards}
    assert shares == {1.0: 1.0, 2.0**8: 0.0, 2.0**16: 0.0, 2.0**20: 0.0, 2.0**24: 0.0}
    assert bf16.backwards[0].total.parameters_zero == 0
    assert fp16.loss_scale == 2.0**16


def test_overflow_is_counted_and_its_scale_not_chosen(own: Callable[..., PrecisionComparison]) -> None:
    def build(batch: int) -> object:
        return nn.Linear(16, 16), torch.ones(batch, 16), lambda output: output.mean()  # an fp16 loss

    fp16 = own(build, "fp16").runs[0]
    overflowing = {one.scale for one in fp16.backwards if one.total.parameters_not_finite}
    assert overflowing == {2.0**16, 2.0**20, 2.0**24}
    assert fp16.loss_scale == 2.0**8
    assert fp16.backwards[-1].gradient_error is None
    assert fp16.gradient_error is not None


def test_rounding_error_of_float64_is_not_a_gradient() -> None:
    """The first token attends only to itself: its query's true gradient is zero, and nothing can be lost there."""
    run = compare("fp32", **TINY, attention="sdpa").runs[0]
    queries = next(one for one in run.backwards[0].modules if one.module == "blocks.0.attention.q_proj")
    assert queries.outputs <= 2 * 7 * 16
    assert run.backwards[0].total.outputs_zero == 0


def test_model_without_gradients_raises(own: Callable[..., PrecisionComparison]) -> None:
    def build(batch: int) -> object:
        return nn.Identity(), torch.ones(batch, 4, requires_grad=True), lambda output: output.sum()

    with pytest.raises(StepscopeError, match="nothing to compare with"):
        own(build, "fp32")


def test_sums_follow_ieee_arithmetic() -> None:
    found = [f"{one.result:.4f}" for one in add_up()]
    assert found == ["10.0001", "9.9531", "10.0021", "10.0021", "4.0000", "10.0098"]
    assert add_up()[2].stored_term == 0.01000213623046875
    assert add_up()[4].stopped_at == 350


def test_fp16_norms_fail_by_range_and_bf16_norms_by_precision() -> None:
    found = {(one.norm, one.part, one.dtype, one.input_scale): one.error or 0 for one in measure_norm_parts(768)}
    for norm in ("RMSNorm", "LayerNorm"):
        for part in (RUNNING, ONCE, INVERSE, ALL):
            assert found[norm, part, "fp16", 300.0] > 0.5
            assert found[norm, part, "bf16", 300.0] < 0.1
        assert found[norm, RUNNING, "bf16", 1.0] > 20 * found[norm, ONCE, "bf16", 1.0]
        assert found[norm, RUNNING, "bf16", 1.0] > 10 * found[norm, RUNNING, "fp16", 1.0]


@pytest.mark.parametrize(("device", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_lists_match_what_pytorch_registers(device: str, key: str) -> None:
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    assert registered == set(LISTS[device]) | set(REFUSED.get(device, ()))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, x),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "prelu": lambda x: functional.prelu(x, x.new_ones(1)),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(4)),
    "nll_loss": lambda x: functional.nll_loss(x, torch.arange(4)),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "prod": torch.prod,
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "rms_norm": lambda x: functional.rms_norm(x, (4,)),
    "softmax": partial(functional.softmax, dim=-1),
    "log_softmax": partial(functional.log_softmax, dim=-1),
    "gelu": functional.gelu,
    "sum": torch.sum,
    "mean": torch.mean,
    "exp": torch.exp,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_cpu_follows_its_list(name: str) -> None:
    policy = find_policy(name, "cpu")
    for given in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = OPERATIONS[name](torch.eye(4, dtype=given)).dtype
        assert found == {"lower": torch.bfloat16, "fp32": torch.float32}.get(policy or "", given)
