"""AdamW and clipping against PyTorch's own; the schedule against a table computed by hand."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stepscope.nn import AdamW, clip_grad_norm, cosine_schedule
from tests.cpu.accuracy import assert_as_accurate, normal

SHAPES = ((5, 3), (7,), (), (2, 3, 4))
STEPS = 12


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=index).to(dtype)) for index, shape in enumerate(SHAPES)]


def _set_gradients(params: list[nn.Parameter], step: int) -> None:
    """A new gradient each step; the second parameter has none at first, the last one never."""
    for index, param in enumerate(params[:-1]):
        late = index == 1 and step < 3
        param.grad = None if late else normal(*param.shape, seed=100 * step + index).to(param.dtype)


def _train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> list[nn.Parameter]:
    for step in steps:
        _set_gradients(params, step)
        optimizer.step()
    return params


SETTINGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    {"lr": 0.01, "weight_decay": 0.0},
    {"lr": 0.0},
]


# Not fp16: squares of small gradients vanish there and eps rounds to zero, in torch's AdamW as in ours.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kwargs", SETTINGS, ids=str)
def test_adamw_is_as_accurate_as_torch(kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    def torch_result(dtype_: torch.dtype) -> list[nn.Parameter]:
        params = [nn.Parameter(p.detach().to(dtype_)) for p in _parameters(dtype)]
        optimizer = torch.optim.AdamW(params, foreach=False, **kwargs)
        for step in range(STEPS):
            # The truth sees the gradients that the low dtype sees.
            rounded = _parameters(dtype)
            _set_gradients(rounded, step)
            for param, source in zip(params, rounded, strict=True):
                param.grad = None if source.grad is None else source.grad.to(dtype_)
            optimizer.step()
        return params

    ours = _parameters(dtype)
    _train(ours, AdamW(ours, **kwargs), range(STEPS))
    for index, values in enumerate(zip(ours, torch_result(dtype), torch_result(torch.float64), strict=True)):
        assert_as_accurate(*values, name=f"parameter {index}")


def test_adamw_in_float64_follows_torch_to_the_last_digits() -> None:
    ours, theirs = _parameters(torch.float64), _parameters(torch.float64)
    _train(ours, AdamW(ours, lr=0.05, weight_decay=0.2), range(STEPS))
    _train(theirs, torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.2), range(STEPS))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_adamw_skips_a_parameter_without_gradient() -> None:
    params = _parameters(torch.float32)
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5)
    _train(params, optimizer, range(STEPS))
    assert torch.equal(params[-1], _parameters(torch.float32)[-1])
    assert params[-1] not in optimizer.state
    # A parameter that joined late has its own bias correction.
    assert [optimizer.state[p]["step"] for p in params[:-1]] == [STEPS, STEPS - 3, STEPS]


def test_adamw_decays_weights_separately_from_the_gradient() -> None:
    param = nn.Parameter(torch.tensor([2.0, -4.0]))
    param.grad = torch.zeros(2)
    AdamW([param], lr=0.1, weight_decay=0.5).step()
    assert param.tolist() == pytest.approx([2.0 * 0.95, -4.0 * 0.95])


def test_first_adamw_step_is_the_learning_rate_for_any_gradient() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    param.grad = torch.tensor([1e-3, -5.0, 1e4], dtype=torch.float64)
    AdamW([param], lr=0.1, weight_decay=0.0).step()
    assert param.tolist() == pytest.approx([-0.1, 0.1, -0.1], rel=1e-4)


def test_adamw_gives_each_group_its_own_settings() -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "lr": 0.2}]

    ours, theirs = _parameters(torch.float64), _parameters(torch.float64)
    _train(ours, AdamW(groups(ours), lr=0.05), range(STEPS))
    _train(theirs, torch.optim.AdamW(groups(theirs), lr=0.05), range(STEPS))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_adamw_resumes_from_its_state_dict_as_if_never_stopped() -> None:
    through, stopped = _parameters(torch.float32), _parameters(torch.float32)
    _train(through, AdamW(through, lr=0.1), range(STEPS))

    first = AdamW(stopped, lr=0.1)
    _train(stopped, first, range(5))
    resumed = AdamW(stopped, lr=99.0)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    _train(stopped, resumed, range(5, STEPS))
    for a, b in zip(through, stopped, strict=True):
        assert torch.equal(a, b)


def test_adamw_updates_in_place_and_its_state_has_the_parameters_dtype() -> None:
    params = _parameters(torch.bfloat16)
    pointers = [p.data_ptr() for p in params]
    optimizer = AdamW(params)
    _train(params, optimizer, range(4))
    assert [p.data_ptr() for p in params] == pointers
    assert {optimizer.state[p][name].dtype for p in params[:-1] for name in ("exp_avg", "exp_avg_sq")} == {
        torch.bfloat16
    }


def test_adamw_runs_a_closure_with_gradients_and_returns_its_loss() -> None:
    param = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        torch.autograd.backward(loss)
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert param.item() == pytest.approx(2.9)
    assert optimizer.step() is None


@pytest.mark.parametrize(
    "kwargs",
    [{"lr": -1.0}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}],
    ids=str,
)
def test_adamw_rejects_invalid_settings(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        AdamW(_parameters(torch.float32), **kwargs)


def _with_gradients(dtype: torch.dtype) -> list[nn.Parameter]:
    params = _parameters(dtype)
    _set_gradients(params, 5)
    return params


def _gradients(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e4])
def test_clipping_is_as_accurate_as_torch(dtype: torch.dtype, max_norm: float) -> None:
    ours, plain = _with_gradients(dtype), _with_gradients(dtype)
    truth = [nn.Parameter(p.detach().double()) for p in ours]
    for exact, param in zip(truth, ours, strict=True):
        exact.grad = None if param.grad is None else param.grad.double()
    true_norm = nn.utils.clip_grad_norm_(truth, max_norm)
    plain_norm = nn.utils.clip_grad_norm_(plain, max_norm)
    # torch's norm of bf16 gradients is bf16; ours is fp32, so only its value is compared.
    assert_as_accurate(clip_grad_norm(ours, max_norm).to(dtype), plain_norm, true_norm, name="norm")
    for index, values in enumerate(zip(_gradients(ours), _gradients(plain), _gradients(truth), strict=True)):
        assert_as_accurate(*values, name=f"gradient {index}")


def test_clipping_returns_the_norm_before_and_leaves_max_norm() -> None:
    params = _with_gradients(torch.float64)
    before = math.sqrt(sum(grad.square().sum().item() for grad in _gradients(params)))
    assert clip_grad_norm(iter(params), 0.5).item() == pytest.approx(before)
    assert clip_grad_norm(params, 0.5).item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_in_float64_follows_torch_to_the_last_digits() -> None:
    ours, theirs = _with_gradients(torch.float64), _with_gradients(torch.float64)
    torch.testing.assert_close(clip_grad_norm(ours, 0.1), nn.utils.clip_grad_norm_(theirs, 0.1), rtol=1e-14, atol=0)
    for a, b in zip(_gradients(ours), _gradients(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_small_gradients_are_unchanged() -> None:
    params, untouched = _with_gradients(torch.float32), _with_gradients(torch.float32)
    clip_grad_norm(params, 1e3)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(params), _gradients(untouched), strict=True))


def test_the_norm_of_fp16_gradients_does_not_overflow() -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert clip_grad_norm([param], 1.0).item() == pytest.approx(120000.0)
    assert param.grad.tolist() == pytest.approx([0.5] * 4, rel=1e-3)


def test_zero_and_missing_gradients_have_norm_zero() -> None:
    param = nn.Parameter(torch.ones(3))
    assert clip_grad_norm([param], 1.0).item() == 0
    param.grad = torch.zeros(3)
    assert clip_grad_norm([param], 1.0).item() == 0
    assert param.grad.tolist() == [0, 0, 0]


def test_clipping_rejects_a_non_positive_norm() -> None:
    with pytest.raises(ValueError, match="max_norm must be positive, but got 0"):
        clip_grad_norm([], 0.0)


# By hand for max 1, min 0.1, 4 warm-up steps of 12: 0.1 + 0.9 * (1 + cos(pi * (step - 4) / 8)) / 2.
SCHEDULE = {
    0: 0.0,
    1: 0.25,
    3: 0.75,
    4: 1.0,
    6: 0.868198,
    8: 0.55,
    10: 0.231802,
    11: 0.134254,
    12: 0.1,
    13: 0.1,
    1000: 0.1,
}


@pytest.mark.parametrize(("step", "rate"), SCHEDULE.items())
def test_schedule_follows_the_table(step: int, rate: float) -> None:
    ours = cosine_schedule(step, max_lr=1.0, min_lr=0.1, warmup_steps=4, total_steps=12)
    assert ours == pytest.approx(rate, abs=1e-6)


def test_schedule_without_rise_or_without_decay() -> None:
    assert cosine_schedule(0, max_lr=2.0, min_lr=1.0, warmup_steps=0, total_steps=10) == 2.0
    assert cosine_schedule(2, max_lr=2.0, min_lr=1.0, warmup_steps=4, total_steps=4) == 1.0
    assert cosine_schedule(4, max_lr=2.0, min_lr=1.0, warmup_steps=4, total_steps=4) == 1.0


@settings(deadline=None, derandomize=True, max_examples=60)
@given(warmup=st.integers(0, 20), decay=st.integers(1, 50), step=st.integers(0, 100), floor=st.floats(0, 1))
def test_schedule_rises_then_falls_and_stays_in_range(warmup: int, decay: int, step: int, floor: float) -> None:
    def rate(at: int) -> float:
        return cosine_schedule(at, max_lr=1.0, min_lr=floor, warmup_steps=warmup, total_steps=warmup + decay)

    assert 0 <= rate(step) <= 1
    if step < warmup:
        assert rate(step) < rate(step + 1) or step + 1 == warmup
    else:
        assert rate(step) >= rate(step + 1) >= floor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step must not be negative"),
        ({"warmup_steps": 13}, "warmup_steps must be between 0 and total_steps .12., but got 13"),
        ({"min_lr": 2.0}, "min_lr must be between 0 and max_lr .1.0., but got 2.0"),
    ],
)
def test_schedule_rejects_invalid_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "step": 0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "warmup_steps": 4,
        "total_steps": 12,
    }
    with pytest.raises(ValueError, match=message):
        cosine_schedule(**(arguments | changes))
