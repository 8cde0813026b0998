"""The kernels of the norms in Triton's interpreter, called through the operators, with their autograd.

`test_triton_attention.py` runs this file in its own process. On a CPU the operators call the formulas of `norms.py`; a
fixture replaces these with the launchers, so everything but the choice between the two is as on a GPU.
"""

# M the width of a row.

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from stepscope.kernels import add_layer_norm, add_rms_norm, layer_norm, norms, norms_launch, rms_norm
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.interpreter import prepare
from tests.cpu.kernels.mixed_dtypes import assert_results_as_accurate, run_with_gradients

prepare()

EPS = 1e-5
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# x, branch, weight, y: an fp32 residual stream between bf16 layers first.
DTYPES = [(FP32, BF16, FP32, BF16), (BF16, BF16, BF16, BF16), (FP32, FP32, FP32, FP32), (FP16, FP16, FP32, FP32)]
DTYPES += [(BF16, FP32, BF16, FP16)]
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
# Whole blocks and several rows of a tile; a ragged width and count; one row; wider than a warp.
SHAPES = [(2, 33, 128), (3, 7, 40), (1, 1, 768), (5, 2100)]
every_kind = pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])

Norm = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_plain_forward", norms_launch.forward)
    monkeypatch.setattr(norms, "_plain_backward", norms_launch.backward)
    # So few that every program takes several tiles.
    monkeypatch.setattr(norms_launch, "num_multiprocessors", lambda _: 1)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill memory with NaN, so that reads of unwritten memory are noticed."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def plain_norm(total: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, dtype: torch.dtype) -> Tensor:
    """The reference, which rounds to the dtype of y once."""
    wide = total.to(torch.promote_types(total.dtype, FP32))
    y = functional.rms_norm(wide, weight, EPS) if kind == "rms" else functional.layer_norm(wide, weight, bias, EPS)
    return y if total.dtype == torch.float64 else y.to(dtype)


def make_parameters(width: int, kind: str, dtype: torch.dtype) -> list[Tensor]:
    weight, bias = 1 + normal(width, seed=3, std=0.5), normal(width, seed=4)
    return [x.to(dtype) for x in ((weight, bias) if kind == "layer" else (weight,))]


@every_dtype
@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_addition_and_norm_match_the_reference(
    shape: tuple[int, ...], kind: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    x, branch = normal(*shape, seed=1, std=2).to(dtypes[0]), normal(*shape, seed=2).to(dtypes[1])

    def ours(x: Tensor, branch: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "rms":
            return add_rms_norm(x, branch, weight, EPS, out_dtype=dtypes[3])
        return add_layer_norm(x, branch, weight, *bias, eps=EPS, out_dtype=dtypes[3])

    def plain(x: Tensor, branch: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, plain_norm(total, weight, bias[0] if bias else None, kind=kind, dtype=dtypes[3])

    inputs = [x, branch, *make_parameters(shape[-1], kind, dtypes[2])]
    assert_results_as_accurate(ours, plain, inputs)
    # The sum is not used otherwise: its gradient is None.
    assert_results_as_accurate(ours, plain, inputs, num_used=1)


@every_dtype
@every_kind
def test_norm_matches_the_reference(kind: str, dtypes: tuple[torch.dtype, ...]) -> None:
    def ours(x: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor]:
        if kind == "rms":
            return (rms_norm(x, weight, EPS, out_dtype=dtypes[3]),)
        return (layer_norm(x, weight, *bias, eps=EPS, out_dtype=dtypes[3]),)

    def plain(x: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor]:
        return (plain_norm(x, weight, bias[0] if bias else None, kind=kind, dtype=dtypes[3]),)

    x = normal(2, 9, 130, seed=1, std=2).to(dtypes[0])
    assert_results_as_accurate(ours, plain, [x, *make_parameters(130, kind, dtypes[2])])


def test_shifted_rows_keep_their_variance() -> None:
    """A variance from the mean square would cancel."""

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (functional.layer_norm(x, weight, None, EPS),)

    x = (normal(3, 100, seed=1) + 3000).float()
    assert_results_as_accurate(lambda x, weight: (layer_norm(x, weight),), plain, [x, torch.ones(100)])


@every_kind
@pytest.mark.parametrize("layout", ["rows far apart", "columns first", "broadcast"])
def test_strides_do_not_change_the_results(layout: str, kind: str) -> None:
    add_norm = add_rms_norm if kind == "rms" else add_layer_norm
    tensors = [_lay_out(normal(6, 40, seed=seed).float(), layout) for seed in range(4)]
    ours = _gradients(add_norm, [*tensors[:2], torch.ones(40)], tensors[2:])
    copies = [x.contiguous() for x in tensors]
    expected = _gradients(add_norm, [*copies[:2], torch.ones(40)], copies[2:])
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "rows far apart":
        wide = torch.full((x.shape[0], 3, 2 * x.shape[1]), torch.nan)
        strided = wide[:, 1, : x.shape[1]].copy_(x)
        assert norms_launch._as_rows(strided).data_ptr() == strided.data_ptr()
        return strided
    return x.T.contiguous().T if layout == "columns first" else x[:1].expand(x.shape)


@every_kind
def test_norm_is_that_of_the_rounded_sum(kind: str) -> None:
    """Backward reads the sum as it was stored."""
    x, branch, weight = normal(4, 300, seed=1).bfloat16(), normal(4, 300, seed=2).bfloat16(), torch.ones(300)
    if kind == "rms":
        assert torch.equal(
            add_rms_norm(x, branch, weight, out_dtype=FP32)[1], rms_norm(x + branch, weight, out_dtype=FP32)
        )
    else:
        total, y = add_layer_norm(x, branch, weight, out_dtype=FP32)
        assert torch.equal(y, layer_norm(total, weight, out_dtype=FP32))


def _gradients(
    norm: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], upstream: list[Tensor]
) -> list[Tensor]:
    """As `run_with_gradients`, which copies its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = norm(*leaves)
    return [*results, *torch.autograd.grad(results, leaves, upstream)]


def test_number_of_programs_changes_only_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [normal(40, 96, seed=1).float(), torch.ones(96)]
    upstream = [normal(40, 96, seed=2).float()]

    def run() -> list[Tensor]:
        return run_with_gradients(lambda x, weight: (rms_norm(x, weight),), inputs, upstream)

    few = run()
    monkeypatch.setattr(norms_launch, "num_multiprocessors", lambda _: 132)
    many = run()
    assert all(torch.equal(a, b) for a, b in zip(few[:2], many[:2], strict=True))
    torch.testing.assert_close(few[2], many[2])


def test_nan_is_never_lost() -> None:
    x = normal(3, 50).float()
    x[1, 7] = torch.nan
    y = rms_norm(x, torch.ones(50))
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@every_kind
def test_no_rows_give_zero_gradients_of_parameters(kind: str) -> None:
    x, weight = torch.empty(0, 40, requires_grad=True), torch.ones(40, requires_grad=True)
    y = rms_norm(x, weight) if kind == "rms" else layer_norm(x, weight)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 40)
    assert torch.equal(torch.zeros(40), weight.grad if weight.grad is not None else weight)


def test_parameters_without_a_gradient_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    x = normal(3, 40).float().requires_grad_()
    expected = torch.autograd.grad(layer_norm(x, torch.ones(40)).square().sum(), x)
    monkeypatch.setattr(norms_launch, "norm_sum_partials", fail)
    assert torch.equal(torch.autograd.grad(layer_norm(x, torch.ones(40)).square().sum(), x)[0], expected[0])


def test_too_wide_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 65536 elements"):
        rms_norm(torch.ones(1, 65537), torch.ones(65537))
