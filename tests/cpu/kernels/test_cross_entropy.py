"""`cross_entropy` without a GPU: the operators, the reference and its gradient, and the arguments."""

# N targets, V vocabulary.

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.kernels import cross_entropy
from stepscope.nn import functional
from tests.cpu.accuracy import assert_three_way, normal

SETTINGS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"softcap": 2.0},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.02, "ignore_index": 4},
]
every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def make_targets(*shape: int, vocab: int = 50) -> Tensor:
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))
    targets.view(-1)[1], targets.view(-1)[2] = -100, 4
    return targets


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reference_matches_torch(reduction: Any, label_smoothing: float) -> None:
    logits, targets = normal(6, 50), make_targets(6)
    ours = functional.cross_entropy(
        logits, targets, ignore_index=-100, reduction=reduction, label_smoothing=label_smoothing
    )
    torch.testing.assert_close(
        ours, F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=label_smoothing)
    )


def test_z_loss_of_the_reference_is_the_mean_square_of_the_log_sum_exp() -> None:
    logits, targets = normal(6, 50), torch.arange(6)
    extra = functional.cross_entropy(logits, targets, z_loss=0.5) - functional.cross_entropy(logits, targets)
    torch.testing.assert_close(extra, 0.5 * logits.logsumexp(-1).square().mean())


@every_setting
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradient_match_the_reference(settings: dict[str, Any], dtype: torch.dtype) -> None:
    targets = make_targets(2, 3)
    if "ignore_index" in settings:
        targets = targets.clamp(min=0)
    assert_three_way(
        lambda x: cross_entropy(x, targets, **settings),
        lambda x: functional.cross_entropy(x, targets, **({"ignore_index": -100} | settings)),
        [normal(2, 3, 50, std=3.0)],
        dtype=dtype,
    )


@every_setting
def test_operators_pass_opcheck(settings: dict[str, Any]) -> None:
    ignore_index, mean = settings.get("ignore_index", -100), settings.get("reduction") != "sum"
    numbers = [settings.get(name, 0.0) for name in ("softcap", "label_smoothing", "z_loss")]
    logits, targets = normal(4, 20).float(), torch.tensor([1, 4, 5, 19])
    forward = torch.ops.stepscope.cross_entropy.default
    torch.library.opcheck(forward, (logits.requires_grad_(), targets, ignore_index, mean, *numbers))
    loss, lse, scale = forward(logits.detach(), targets, ignore_index, mean, *numbers)
    backward = torch.ops.stepscope.cross_entropy_backward.default
    rest = (logits.detach(), targets, lse, scale, ignore_index, mean, *numbers)
    torch.library.opcheck(backward, (torch.ones_like(loss), *rest))


def test_compiles_without_a_graph_break_and_matches() -> None:
    targets = make_targets(2, 3)
    weight = normal(50, 8).float().requires_grad_()
    x = normal(2, 3, 8, seed=1).float()

    def step(weight: Tensor) -> Tensor:
        return cross_entropy(x @ weight.T, targets, softcap=5.0)

    expected = torch.autograd.grad(step(weight), weight)[0]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(weight), weight)[0], expected)


def test_gradient_of_a_padded_vocabulary_keeps_its_layout() -> None:
    padded = normal(2, 3, 64).float()
    logits, targets = padded[..., :50].requires_grad_(), make_targets(2, 3)
    gradient = torch.autograd.grad(cross_entropy(logits, targets), logits)[0]
    expected = torch.autograd.grad(functional.cross_entropy(logits, targets, ignore_index=-100), logits)[0]
    torch.testing.assert_close(gradient, expected)
    assert gradient.stride() == logits.stride()


def test_double_backward_is_refused() -> None:
    logits = normal(4, 20).requires_grad_()
    gradient = torch.autograd.grad(cross_entropy(logits, torch.arange(4)), logits, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(gradient.sum(), logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "expected targets of shape"),
        ({"targets": torch.zeros(4)}, "int64 or int32"),
        ({"logits": torch.zeros(4, 20, dtype=torch.int64)}, "floating-point"),
        ({"reduction": "none"}, "reduction"),
        ({"softcap": 0.0}, "softcap"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"ignore_index": 2**40}, "ignore_index"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"logits": torch.zeros(4, 20), "targets": torch.zeros(4, dtype=torch.int64)} | changes
    with pytest.raises(ValueError, match=message):
        cross_entropy(**arguments)
