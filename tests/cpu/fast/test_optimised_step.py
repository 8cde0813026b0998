"""`OptimisedStep` in a training loop: shapes, schedules, checkpoints, and what people pass to it."""

import copy
import gc
import logging
import warnings
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.fast.batches import call_with, loss_in, signature_of
from stepscope.fast.optimised_step import MOST_SHAPES, OptimisedStep, optimise
from stepscope.fast.program import Changes
from stepscope.fast.update import why_not_one_launch
from tests.cpu.fast.tiny import (
    ALL,
    MERGED,
    TwoLinears,
    distance,
    make_job,
    mean_square,
    normal,
    train_plainly,
    twins,
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, changes: Changes = MERGED, **settings: Any
) -> OptimisedStep:
    return OptimisedStep(make_job(model, (normal(3, 8),), optimizer=optimizer, **settings), changes, ())


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.01} | settings))


def step_counts(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.state_dict()["state"].values()}


def test_other_shapes_continue_where_the_last_one_stopped() -> None:
    model, twin = twins(TwoLinears(bias=True))
    optimizers = adamw(model), adamw(twin)
    step = make_step(model, optimizers[0])
    batches = [normal(3 + number % 3, 8, seed=number) for number in range(9)]
    losses = torch.stack([step(batch) for batch in batches])
    assert torch.equal(losses, train_plainly(twin, optimizers[1], batches))
    assert distance(model, twin) < 1e-6
    assert step_counts(optimizers[0]) == {9}


def test_more_shapes_than_are_kept() -> None:
    model, twin = twins(TwoLinears())
    optimizers = adamw(model), adamw(twin)
    step = make_step(model, optimizers[0])
    batches = [normal(number + 1, 8, seed=number) for number in range(MOST_SHAPES + 2)]
    with pytest.warns(UserWarning, match="more than 8 shapes of batches"):
        losses = torch.stack([step(batch) for batch in (*batches, *batches)])
    assert torch.equal(losses, train_plainly(twin, optimizers[1], batches * 2))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_learning_rate_schedules(as_tensor: bool) -> None:
    model, twin = twins(TwoLinears())
    rate = torch.tensor(0.1) if as_tensor else 0.1
    optimizers = [adamw(one, lr=copy.copy(rate)) for one in (model, twin)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    step = make_step(model, optimizers[0])
    for number in range(4):
        batch = normal(3, 8, seed=number)
        assert torch.equal(step(batch), train_plainly(twin, optimizers[1], [batch])[0])
        for schedule in schedules:
            schedule.step()
    assert distance(model, twin) < 1e-6


def test_optimizer_state_is_loaded_in_the_middle_of_training() -> None:
    """Into the running step, and into a plain loop from its checkpoint."""
    model, twin = twins(TwoLinears())
    optimizers = adamw(model), adamw(twin)
    batches = [normal(3, 8, seed=number) for number in range(9)]
    step = make_step(model, optimizers[0])
    for batch in batches[:3]:
        step(batch)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers[0].state_dict())
    for batch in batches[3:7]:
        step(batch)
    model.load_state_dict(weights)
    optimizers[0].load_state_dict(state)
    losses = torch.stack([step(batch) for batch in batches[3:]])
    twin.load_state_dict(weights)
    optimizers[1].load_state_dict(state)
    assert torch.equal(losses, train_plainly(twin, optimizers[1], batches[3:]))
    assert step_counts(optimizers[0]) == step_counts(optimizers[1]) == {9}
    assert distance(model, twin) < 1e-6
    for one, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        torch.testing.assert_close(one["exp_avg_sq"], other["exp_avg_sq"])


def test_an_empty_state_starts_again() -> None:
    model = TwoLinears()
    optimizer = adamw(model)
    empty = copy.deepcopy(optimizer.state_dict())
    step = make_step(model, optimizer)
    step(normal(3, 8))
    optimizer.load_state_dict(empty)
    assert step_counts(optimizer) == {0}
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())
    step(normal(3, 8))
    assert step_counts(optimizer) == {1}


def test_a_state_with_different_step_counts_is_refused() -> None:
    model = TwoLinears()
    optimizer = adamw(model)
    step = make_step(model, optimizer)
    step(normal(3, 8))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"].fill_(7)
    with pytest.raises(ValueError, match="the same number of times"):
        optimizer.load_state_dict(state)


def test_parameters_that_are_frozen_later() -> None:
    model, twin = twins(TwoLinears())
    optimizers = adamw(model), adamw(twin)
    step = make_step(model, optimizers[0])
    for is_trained in (True, False, True):
        for one in (model, twin):
            one.first.weight.requires_grad = is_trained  # type: ignore[union-attr]
        before = model.first.weight.detach().clone()  # type: ignore[union-attr, operator]
        loss = step(normal(3, 8))
        assert torch.equal(loss, train_plainly(twin, optimizers[1], [normal(3, 8)])[0])
        assert torch.equal(model.first.weight, before) is not is_trained  # type: ignore[union-attr, arg-type]


def test_modes_are_followed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    step = make_step(model, adamw(model, lr=0.0))
    drawn = {float(step(normal(3, 8))) for _ in range(4)}
    model.eval()
    assert len(drawn) > 1
    assert len({float(step(normal(3, 8))) for _ in range(4)}) == 1


def test_gradients_without_an_optimizer() -> None:
    model, twin = twins(TwoLinears())
    step = make_step(model, None, Changes())
    step(normal(3, 8))
    train_plainly(twin, torch.optim.SGD(twin.parameters(), lr=0.0), [normal(3, 8)])
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


# --- optimise ---


def build(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> OptimisedStep:
    defaults: dict[str, Any] = {"example": normal(3, 8), "loss": mean_square, "measure": False, "compiler": "eager"}
    return optimise(model, optimizer, **(defaults | settings))


def test_optimise_leaves_model_optimizer_and_random_numbers_alone() -> None:
    model = nn.Sequential(TwoLinears(bias=True), nn.BatchNorm1d(24), nn.Dropout(0.1))
    model[1].eval()
    optimizer = adamw(model)
    train_plainly(model, optimizer, [normal(3, 8)] * 3)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.get_rng_state()
    step = build(model, optimizer)
    after = model.state_dict(), optimizer.state_dict()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert after[1]["param_groups"] == before[1]["param_groups"]
    for number, state in before[1]["state"].items():
        assert all(torch.equal(after[1]["state"][number][name], value) for name, value in state.items())
    assert (model.training, model[1].training) == (True, False)
    step(normal(3, 8))
    assert step_counts(optimizer) == {4}


def test_a_new_optimizer_has_no_state_after_optimise() -> None:
    model = TwoLinears()
    optimizer = adamw(model)
    step = build(model, optimizer)
    assert optimizer.state_dict()["state"] == {}
    step(normal(3, 8))
    assert step_counts(optimizer) == {1}


def test_weights_survive_an_optimizer_that_ignores_the_learning_rate() -> None:
    class Stubborn(torch.optim.SGD):
        @torch.no_grad()
        def step(self, _closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.fill_(torch.nan)

    model, twin = twins(TwoLinears())
    build(model, Stubborn(model.parameters(), lr=0.1))
    assert distance(model, twin) == 0


def test_a_forward_that_fails_raises_its_own_error() -> None:
    class Broken(TwoLinears):
        def forward(self, _x: Tensor) -> Tensor:
            raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        build(Broken())


def test_a_model_with_graph_breaks(caplog: pytest.LogCaptureFixture) -> None:
    class Chatty(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            logging.getLogger("chatty").info("half way")
            result: Tensor = y[..., :8] + self.first(y[..., :8])
            return result

    caplog.set_level(logging.INFO, "chatty")
    model, twin = twins(Chatty())
    optimizers = adamw(model), adamw(twin)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        step = build(model, optimizers[0])
        batches = [normal(3, 8, seed=number) for number in range(3)]
        losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, train_plainly(twin, optimizers[1], batches), rtol=1e-2, atol=0)


def test_a_model_that_the_user_compiled() -> None:
    model = TwoLinears()
    step = build(torch.compile(model, backend="eager"), adamw(model))  # type: ignore[arg-type]
    assert [rung.name for rung in step.rungs if rung.status == "failed"] == []
    assert step(normal(3, 8)).isfinite()


def test_a_model_in_eval_mode_and_one_with_frozen_parts() -> None:
    model = nn.Sequential(TwoLinears(), nn.Dropout(0.5)).eval()
    model[0].first.weight.requires_grad = False  # type: ignore[union-attr]
    before = model[0].first.weight.detach().clone()  # type: ignore[union-attr, operator]
    step = build(model, adamw(model))
    assert step.rungs[-1].status == "kept"
    step(normal(3, 8))
    assert not model.training
    assert torch.equal(model[0].first.weight, before)  # type: ignore[union-attr, arg-type]


def test_channels_last_parameters_keep_their_optimizer() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert why_not_one_launch(adamw(model)) == "a parameter is not contiguous"


def test_programs_do_not_outlive_their_step() -> None:
    """The optimizer has hooks, which must not keep working weights."""
    model = TwoLinears()
    optimizer = adamw(model)
    step = make_step(model, optimizer)
    step(normal(3, 8))
    program = weakref.ref(step._last)
    del step
    torch.compiler.reset()
    gc.collect()
    assert program() is None


# --- Batches ---


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0, mode: str = "sum") -> dict[str, Tensor]:
        y = self.linear(x).float() * scale
        return {"loss": y.square().sum() if mode == "sum" else y.square().mean()}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_batches_are_mappings_with_other_things_than_tensors(kind: Any) -> None:
    """`BatchEncoding` of `transformers` is a `UserDict`."""
    model = Named()
    step = optimise(
        model, adamw(model, lr=0.0), example=kind(x=normal(3, 8), mode="sum"), measure=False, compiler="eager"
    )
    for batch in (
        {"x": normal(3, 8, seed=1), "mode": "sum"},
        {"x": normal(3, 8, seed=2), "mode": "mean", "scale": 2.0},
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(**batch)["loss"]
        torch.testing.assert_close(step(kind(batch)), expected.detach(), rtol=1e-2, atol=0)


def test_numbers_of_different_types_are_different_batches() -> None:
    assert signature_of((normal(2), 1)) != signature_of((normal(2), True))
    assert signature_of((normal(2), 1)) == signature_of((normal(2, seed=3), 1))
    with pytest.raises(ValueError, match="expected tensors, numbers and strings in a batch, but got a set"):
        signature_of((normal(2), {1}))


def test_losses_in_outputs() -> None:
    loss = torch.ones(())
    assert loss_in({"loss": loss, "logits": normal(3)}) is loss
    assert loss_in(type("Output", (), {"loss": loss})()) is loss
    assert call_with(lambda a, b: a + b, (1, 2)) == 3
    for output in ((loss, normal(3)), normal(3), {"logits": normal(3)}):
        with pytest.raises(ValueError, match="expected the model to return its loss"):
            loss_in(output)


def test_all_changes_are_kept_by_default() -> None:
    model = TwoLinears()
    step = build(model, adamw(model))
    assert step.changes.rewrites == ALL.rewrites
    assert step.changes.one_launch
