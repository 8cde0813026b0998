"""AdamW in one launch, without a GPU: the same steps in plain PyTorch, and everything around them."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from stepscope.kernels import Accumulator, AdamWUpdates, Hyper, OneLaunchAdamW, ParameterUpdate
from tests.cpu.accuracy import assert_as_accurate, normal
from tests.cpu.kernels.parameter_lists import MIXED, check_list, make_list

SETTINGS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.2}


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
def test_plain_steps_match_torch(clip: bool) -> None:
    check_list(AdamWUpdates.launch, clip=clip)


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + index, std=0.3))
    return model


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    matrices, vectors = ([x for x in parameters if x.dim() == dims] for dims in (2, 1))
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.01}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, max_norm: float | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = normal(8, 12, seed=step).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_optimizer_matches_torch_with_groups_and_a_scheduler() -> None:
    results = []
    for dtype in (torch.float64, torch.float32):
        model = make_model(dtype)
        optimizer = torch.optim.AdamW(make_groups(model), **SETTINGS)
        scheduler = CosineAnnealingLR(optimizer, 6)
        for step in range(6):
            train(model, optimizer, range(step, step + 1), max_norm=3.0)
            scheduler.step()
        results.append(values(model))
    ours = make_model(torch.float32)
    one_launch = OneLaunchAdamW(make_groups(ours), **SETTINGS, max_norm=3.0)
    scheduler = CosineAnnealingLR(one_launch, 6)
    for step in range(6):
        train(ours, one_launch, range(step, step + 1))
        scheduler.step()
    truth, plain = results
    assert_as_accurate(values(ours), plain, truth, name="parameters")
    assert one_launch.grad_norm is not None
    assert one_launch.grad_norm > 0


Build = Callable[..., torch.optim.Optimizer]


@pytest.mark.parametrize("second", [torch.optim.AdamW, OneLaunchAdamW], ids=["to torch", "to ours"])
@pytest.mark.parametrize("first", [torch.optim.AdamW, OneLaunchAdamW], ids=["from torch", "from ours"])
def test_either_optimizer_continues_from_the_state_of_the_other(first: Build, second: Build) -> None:
    whole = make_model()
    train(whole, torch.optim.AdamW(make_groups(whole), **SETTINGS), range(6))
    model = make_model()
    optimizer = first(make_groups(model), **SETTINGS)
    train(model, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    continued = second(make_groups(model), lr=123.0)
    continued.load_state_dict(torch.load(buffer))
    train(model, continued, range(3, 6))
    torch.testing.assert_close(values(model), values(whole), rtol=1e-12, atol=1e-12)


def test_state_dict_can_be_loaded_without_a_copy() -> None:
    """Torch's optimizers count steps in place, once per parameter: it must not be the same tensor for all."""
    whole, model = make_model(), make_model()
    train(whole, torch.optim.AdamW(whole.parameters(), **SETTINGS), range(6))
    optimizer = OneLaunchAdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, range(3))
    continued = torch.optim.AdamW(model.parameters(), **SETTINGS, foreach=False)
    continued.load_state_dict(optimizer.state_dict())
    train(model, continued, range(3, 6))
    torch.testing.assert_close(values(model), values(whole), rtol=1e-12, atol=1e-12)


def test_parameters_without_a_gradient_are_skipped_and_count_fewer_steps() -> None:
    models = [make_model(), make_model()]
    for model, build in zip(models, (torch.optim.AdamW, OneLaunchAdamW), strict=True):
        optimizer = build(model.parameters(), **SETTINGS)
        frozen = model[0].weight  # type: ignore[index]
        train(model, optimizer, range(2))
        frozen.requires_grad = False
        before = frozen.detach().clone()
        train(model, optimizer, range(2, 5))
        assert torch.equal(frozen, before)
        frozen.requires_grad = True
        train(model, optimizer, range(5, 7))
        steps = [optimizer.state[parameter]["step"].item() for parameter in model.parameters()]
        assert steps == [4, 7, 7, 7]
    torch.testing.assert_close(values(models[1]), values(models[0]), rtol=1e-12, atol=1e-12)


def test_a_step_without_gradients_does_nothing() -> None:
    model = make_model()
    optimizer = OneLaunchAdamW(model.parameters(), **SETTINGS)
    before = values(model)
    optimizer.step()
    assert torch.equal(values(model), before)
    assert not optimizer.state


def test_gradients_are_not_kept_alive() -> None:
    model = make_model()
    optimizer = OneLaunchAdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, range(1))
    assert optimizer._updates is not None
    assert optimizer._updates._list.gradients == ()


def test_optimizer_can_be_copied() -> None:
    model = make_model()
    optimizer = OneLaunchAdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, range(2))
    both = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2, 4))
    train(*both, range(2, 4))
    assert torch.equal(values(model), values(both[0]))


def test_closure_is_called_with_gradients_enabled() -> None:
    model = make_model()
    optimizer = OneLaunchAdamW(model.parameters(), **SETTINGS)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(normal(8, 12)).square().sum()
        loss.backward()
        return float(loss.detach())

    before = values(model)
    assert optimizer.step(closure) > 0
    assert not torch.equal(values(model), before)


@pytest.mark.parametrize("message", ["sparse", "complex"])
def test_gradients_that_are_not_supported_are_refused(message: str) -> None:
    if message == "sparse":
        place, value = torch.tensor([[0]]), torch.tensor([1.0])
        gradient = torch.sparse_coo_tensor(place, value, (4,), check_invariants=True)
    else:
        gradient = torch.ones(4, dtype=torch.complex64)
    parameter = torch.zeros(4, dtype=gradient.dtype, requires_grad=True)
    parameter.grad = gradient
    with pytest.raises(ValueError, match=message):
        OneLaunchAdamW([parameter]).step()


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}, {"max_norm": 0.0}], ids=str
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        OneLaunchAdamW([torch.zeros(4, requires_grad=True)], **settings)


def test_state_of_other_algorithms_is_refused() -> None:
    parameter = torch.zeros(4, requires_grad=True)
    state = torch.optim.AdamW([parameter], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad"):
        OneLaunchAdamW([parameter]).load_state_dict(state)


def test_lists_that_do_not_fit_together_are_refused() -> None:
    made = make_list(MIXED[:2])
    updates = AdamWUpdates(made.updates, [Hyper(lr=0.1)])
    with pytest.raises(ValueError, match="expected 2 gradients, but got 1"):
        updates.bind(made.gradients[:1])
    with pytest.raises(ValueError, match="tensor 1 has 130 elements"):
        updates.bind([made.gradients[0], made.gradients[0]])
    with pytest.raises(ValueError, match="contiguous"):
        updates.bind([torch.zeros(130, 70).T, made.gradients[1]])
    with pytest.raises(ValueError, match="1 groups"):
        updates.set_hypers([Hyper(lr=0.1), Hyper(lr=0.1)])
    with pytest.raises(ValueError, match="group 1 is out of range"):
        AdamWUpdates(make_list().updates, [Hyper(lr=0.1)])
    update = ParameterUpdate(master=torch.zeros(4), exp_avg=torch.zeros(4), exp_avg_sq=torch.zeros(4).double())
    with pytest.raises(ValueError, match="dtype of the master"):
        AdamWUpdates([update], [Hyper(lr=0.1)])


def test_unchanged_addresses_and_hyperparameters_write_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_list()
    updates = AdamWUpdates(made.updates, [Hyper(lr=0.1), Hyper(lr=0.2)])
    updates.bind(made.gradients)
    written: list[object] = []
    monkeypatch.setattr(Tensor, "copy_", lambda *arguments: written.append(arguments))
    updates.bind(made.gradients)
    updates.set_hypers([Hyper(lr=0.1), Hyper(lr=0.2)])
    assert not written
    updates.set_hypers([Hyper(lr=0.1), Hyper(lr=0.3)])
    assert len(written) == 1


def test_gradient_sums_are_fp32_and_the_first_overwrites() -> None:
    sums = Accumulator([(3, 5), (7,)], device="cpu")
    sums.sums[0].fill_(torch.nan)
    gradients = [normal(3, 5).bfloat16(), normal(7, seed=1).float()]
    for micro_batch in range(3):
        sums.add(gradients, overwrite=micro_batch == 0)
    for total, gradient in zip(sums.sums, gradients, strict=True):
        torch.testing.assert_close(total, 3 * gradient.float())
