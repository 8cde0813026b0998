"""The cross entropy kernels in Triton's interpreter. `test_triton_attention.py` runs this file in its own process."""

# N targets, V vocabulary.

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from stepscope.kernels.cross_entropy import LossSettings, launch_backward, launch_forward, launch_rows
from stepscope.kernels.linear_cross_entropy import Wanted, compute, scale_gradient
from stepscope.nn import functional
from tests.cpu.accuracy import assert_as_accurate, assert_three_way, normal
from tests.cpu.kernels.interpreter import prepare

prepare()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# In registers; one block, shifted or not; several blocks, shifted or not.
SIZES = [(3, 160), (5, 37), (3, 4096), (5, 4500), (3, 8200)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
EXTRAS = [
    LossSettings(mean=False),
    LossSettings(softcap=2.0),
    LossSettings(label_smoothing=0.1),
    LossSettings(z_loss=0.01),
    LossSettings(softcap=3.0, label_smoothing=0.2, z_loss=0.02),
]


class _CrossEntropy(torch.autograd.Function):
    """The launchers, as autograd calls them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
        loss, lse, scale = launch_forward(logits, targets, settings)
        ctx.save_for_backward(logits, targets, lse, scale)
        ctx.settings = settings
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse, scale = ctx.saved_tensors
        return launch_backward(upstream, logits, targets, lse, scale, ctx.settings), None, None


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """What is outside a row is -inf, which a GPU takes silently."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        yield


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def make_targets(num_rows: int, vocab: int, *, ignored: bool = True) -> Tensor:
    targets = torch.randint(vocab, (num_rows,), generator=torch.Generator().manual_seed(3))
    targets[0], targets[-1] = vocab - 1, 0
    if ignored:
        targets[1] = -100
    return targets


def run(logits: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    return cast(Tensor, _CrossEntropy.apply(logits, targets, settings))  # type: ignore[no-untyped-call]


def reference(logits: Tensor, targets: Tensor, settings: LossSettings, ignore_index: int = -100) -> Tensor:
    return functional.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        reduction="mean" if settings.mean else "sum",
        softcap=settings.softcap or None,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
    )


def check(size: tuple[int, int], dtype: torch.dtype, settings: LossSettings) -> None:
    targets = make_targets(*size)
    logits = normal(*size, std=3.0)
    assert_three_way(
        lambda x: run(x, targets, settings), lambda x: reference(x, targets, settings), [logits], dtype=dtype
    )


@every_dtype
@every_size
def test_loss_and_gradient_match_the_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    check(size, dtype, LossSettings())


@every_dtype
@pytest.mark.parametrize("settings", EXTRAS, ids=str)
@pytest.mark.parametrize("size", [(3, 160), (5, 4500)], ids=str)
def test_extras_match_the_reference(size: tuple[int, int], settings: LossSettings, dtype: torch.dtype) -> None:
    check(size, dtype, settings)


@every_dtype
@every_size
@pytest.mark.parametrize("pad", [0, 8, 13])
def test_loss_and_gradient_in_one_launch_and_in_place(size: tuple[int, int], pad: int, dtype: torch.dtype) -> None:
    """As linear + cross entropy calls it. What is behind a row stays as it is."""
    settings = LossSettings(softcap=4.0)
    targets, bias = make_targets(*size), normal(size[1], seed=5).to(dtype)
    padded = torch.full((size[0], size[1] + pad), 7.0, dtype=dtype)
    logits = padded[:, : size[1]].copy_(normal(*size, std=3.0))
    before = logits.clone()
    losses = torch.empty(size[0])
    launch_rows(logits, targets, settings, gradient_NV=logits, losses_N=losses, bias_V=bias)
    assert torch.equal(padded[:, size[1] :], torch.full((size[0], pad), 7.0, dtype=dtype))

    def in_torch(kind: torch.dtype) -> list[Tensor]:
        leaf = before.to(kind).requires_grad_()
        loss = reference(leaf + bias.to(kind), targets, settings._replace(mean=False))
        return [loss, *torch.autograd.grad(loss, leaf)]

    for ours, plain, truth in zip((losses.sum(), logits), in_torch(dtype), in_torch(torch.float64), strict=True):
        assert_as_accurate(ours.detach(), plain.detach(), truth)
    assert losses[1] == 0
    assert not logits[1].any()


@pytest.mark.parametrize("shift", [0, 1])
def test_padded_and_shifted_logits_give_the_same_bits(shift: int) -> None:
    """Rows that start anywhere in memory, and a gradient in the same layout."""
    targets, settings = make_targets(4, 4500), LossSettings()
    values = normal(4, 4500).bfloat16()
    wide = torch.full((4, 4520), torch.nan, dtype=torch.bfloat16)
    part = wide[:, shift : shift + 4500].copy_(values)
    results = []
    for logits in (values, part):
        loss, lse, scale = launch_forward(logits, targets, settings)
        gradient = launch_backward(torch.tensor(2.0), logits, targets, lse, scale, settings)
        assert gradient.stride() == logits.stride()
        results.append((loss, lse, gradient))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 0, atol=0)


def test_logits_without_contiguous_rows_are_copied() -> None:
    targets, settings = make_targets(4, 40), LossSettings()
    logits = normal(4, 40).float()
    loss, lse, _ = launch_forward(logits, targets, settings)
    other_loss, other_lse, _ = launch_forward(logits.T.contiguous().T, targets, settings)
    assert torch.equal(loss, other_loss)
    assert torch.equal(lse, other_lse)


def test_extreme_logits_match_the_reference() -> None:
    """Large ones, -inf as of a masked vocabulary, and equal ones."""
    logits = normal(4, 4200).float()
    logits[0] += 1e4
    logits[1, 5:4100] = -torch.inf
    logits[2] = 0.0
    targets = torch.tensor([3, 2, 4199, 7])
    truth = functional.cross_entropy(logits.double(), targets)
    plain = functional.cross_entropy(logits, targets)
    loss, lse, scale = launch_forward(logits, targets, LossSettings())
    assert_as_accurate(loss, plain, truth)
    gradient = launch_backward(torch.ones(()), logits, targets, lse, scale, LossSettings())
    assert gradient.isfinite().all()
    assert not gradient[1, 5:4100].any()


@pytest.mark.parametrize("mean", [True, False])
def test_only_ignored_targets_have_no_gradient(mean: bool) -> None:
    settings = LossSettings(mean=mean)
    logits, targets = normal(3, 4500).float(), torch.full((3,), -100)
    loss, lse, scale = launch_forward(logits, targets, settings)
    assert loss.isnan() if mean else loss == 0  # as PyTorch
    assert scale == (0 if mean else 1)
    assert not launch_backward(torch.ones(()), logits, targets, lse, scale, settings).any()


def test_ignore_index_may_be_a_class() -> None:
    settings = LossSettings(ignore_index=3)
    targets = torch.tensor([3, 1, 3, 7])
    assert_three_way(
        lambda x: run(x, targets, settings),
        lambda x: reference(x, targets, settings, ignore_index=3),
        [normal(4, 50)],
        dtype=torch.float32,
    )


@pytest.mark.parametrize("target", [50, -1, 2**31 - 1])
def test_a_target_out_of_range_is_visible_and_reads_nothing_else(target: int) -> None:
    logits, targets = normal(3, 50).float(), torch.tensor([1, target, 2])
    loss, lse, scale = launch_forward(logits, targets, LossSettings())
    assert loss.isnan()
    gradient = launch_backward(torch.ones(()), logits, targets, lse, scale, LossSettings())
    assert gradient[1].isnan().all()
    assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [160, 4500])
def test_logits_that_are_not_finite_are_never_lost(vocab: int, value: float) -> None:
    logits = normal(3, vocab).float()
    logits[2, vocab // 2] = value
    loss, _, _ = launch_forward(logits, make_targets(3, vocab), LossSettings())
    assert loss.isnan()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int) -> Tensor:
        x, weight, bias = (y.detach() for y in (x, weight, bias))
        settings, wanted = LossSettings(softcap=5.0), Wanted(x=True, weight=True, bias=True)
        loss, *saved = compute(x, weight, bias, targets, settings, chunk, wanted, in_triton=True)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, *gradients = ctx.saved_tensors
        dtype = gradients[0].dtype
        return *(scale_gradient(gradient, upstream, scale, dtype) for gradient in gradients), None, None


@every_dtype
@pytest.mark.parametrize("vocab", [160, 333])
@pytest.mark.parametrize("chunk", [3, 7])
def test_linear_and_cross_entropy_match_the_reference(chunk: int, vocab: int, dtype: torch.dtype) -> None:
    targets = make_targets(7, vocab)

    def ours(*tensors: Tensor) -> Tensor:
        return cast(Tensor, _LinearCrossEntropy.apply(*tensors, targets, chunk))  # type: ignore[no-untyped-call]

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return reference(functional.linear(x, weight) + bias, targets, LossSettings(softcap=5.0))

    inputs = [normal(7, 24), normal(vocab, 24, seed=2, std=0.3), normal(vocab, seed=4)]
    assert_three_way(ours, plain, inputs, dtype=dtype)


def test_gradients_are_scaled_in_any_size() -> None:
    for count in (1, 2048, 5000):
        gradient = normal(count).float()
        scaled = scale_gradient(gradient, torch.tensor(3.0), torch.tensor(0.5), torch.bfloat16)
        assert torch.equal(scaled, (gradient * 1.5).bfloat16())
