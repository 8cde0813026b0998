"""The sharded optimizer: bitwise equal to the unsharded one, with a share of its state."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepscope.errors import StepscopeError
from stepscope.nn import AdamW
from stepscope.parallel import DDP, Communicator, ShardedOptimizer
from tests.cpu.accuracy import normal
from tests.cpu.parallel.checks import Outcome, run_checks
from tests.cpu.parallel.ranks import run_ranks
from tests.cpu.parallel.training import (
    ROWS_PER_RANK,
    batch_of,
    differentiate,
    language_model,
    loss_of,
    part_of,
    values_of,
)

# One is large enough to be broadcast in place.
SHAPES = ((300, 300), (5, 3), (7,), (), (2, 3, 4), (40, 40), (0, 2), (9,))
STEPS = 4

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    (AdamW, {"lr": 0.01}),
]


def _params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=index).to(dtype)) for index, shape in enumerate(SHAPES)]


def _set_gradients(params: list[nn.Parameter], step: int) -> None:
    """The second has none at first, the last one never."""
    for index, param in enumerate(params[:-1]):
        late = index == 1 and step < 2
        param.grad = None if late else normal(*param.shape, seed=100 * step + index).to(param.dtype)


def _train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        _set_gradients(params, step)
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"parameter {index}"


def _assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state)
        for key, value in state.items():
            other = ours["state"][index][key]
            assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, f"{index} {key}"


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim() > 0)


def every_optimizer_is_bitwise_the_plain_one(rank: int, world: int) -> None:
    for optimizer_cls, options in OPTIMIZERS:
        plain, ours = _params(), _params()
        plain_optimizer = optimizer_cls(plain, **options)
        sharded = ShardedOptimizer(ours, optimizer_cls, **options)
        _train(plain, plain_optimizer)
        _train(ours, sharded)
        _assert_same(ours, plain)
        state = sharded.state_dict(to=None)
        _assert_same_state(state, plain_optimizer.state_dict())
        assert len(sharded.state) < len(plain_optimizer.state)


def other_dtypes_and_layouts_are_shared(rank: int, world: int) -> None:
    def make() -> list[nn.Parameter]:
        conv = nn.Parameter(normal(64, 64, 5, 5).float().to(memory_format=torch.channels_last))
        return [*_params(torch.bfloat16)[:-1], conv, nn.Parameter(normal(3, 5).t()), _params()[-1]]

    plain, ours = make(), make()
    _train(plain, torch.optim.AdamW(plain))
    _train(ours, ShardedOptimizer(iter(ours), torch.optim.AdamW))
    _assert_same(ours, plain)
    assert ours[-3].is_contiguous(memory_format=torch.channels_last)


def state_is_a_share_of_the_whole(rank: int, world: int) -> None:
    model = language_model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    shares = Communicator.default().share_objects(_state_bytes(optimizer), "bytes of state")
    sizes = [2 * param.nbytes for param in model.parameters()]
    assert sum(shares) == sum(sizes)
    assert max(shares) <= sum(sizes) / world + max(sizes)
    assert min(shares) > 0


def gradients_stay_where_they_are(rank: int, world: int) -> None:
    params = _params()
    optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    _set_gradients(params, 0)
    before = [param.grad for param in params]
    optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, before, strict=True))
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is None or not param.grad.any() for param in params)


def memory_that_others_look_at_stays_where_it_is(rank: int, world: int) -> None:
    plain, ours = _params(), _params()
    array = np.zeros(SHAPES[5], dtype=np.float32)
    watched = torch.zeros(24)
    for params in (plain, ours):
        params[5] = nn.Parameter(torch.from_numpy(array.copy() if params is plain else array))
        params[4] = nn.Parameter((watched.clone() if params is plain else watched).view(2, 3, 4))
    flat = torch.zeros(16)
    ours[2], plain[2] = nn.Parameter(flat[:7]), nn.Parameter(flat[:7].clone())
    sharded = ShardedOptimizer(ours, torch.optim.AdamW)
    plain_optimizer = torch.optim.AdamW(plain)
    addresses = [param.data_ptr() for param in ours]
    _train(ours, sharded)
    assert [param.data_ptr() for param in ours] == addresses
    assert len({param.untyped_storage().data_ptr() for param in ours[:2]}) <= world
    if rank == 1:
        # A parameter is moved away on one rank only.
        ours[0].data = ours[0].data.clone()
        ours[1].data = ours[1].data.clone()
    _train(plain, plain_optimizer, range(2 * STEPS))
    _train(ours, sharded, range(STEPS, 2 * STEPS))
    _assert_same(ours, plain)
    assert torch.equal(flat[:7], plain[2])
    assert torch.equal(watched.view(2, 3, 4), plain[4])
    assert torch.equal(torch.from_numpy(array), plain[5])


def parameters_of_one_owner_lie_together(rank: int, world: int) -> None:
    params = _params()
    ShardedOptimizer(params, torch.optim.AdamW)
    memories = {param.untyped_storage().data_ptr() for param in params if param.numel()}
    assert len(memories) == world
    assert all(param.data_ptr() % 64 == 0 for param in params)


def groups_keep_their_options(rank: int, world: int) -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": iter(params[:2]), "lr": 0.5}, {"params": params[2], "weight_decay": 0.3}]

    plain, ours = _params(), _params()
    plain_optimizer = torch.optim.AdamW(groups(plain), lr=0.01)
    sharded = ShardedOptimizer(groups(ours), torch.optim.AdamW, lr=0.01)
    for params, optimizer in ((plain, plain_optimizer), (ours, sharded)):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        _train(params, optimizer, range(2))
        schedule.step()
        optimizer.add_param_group({"params": params[3:], "lr": 0.2})
        optimizer.param_groups[1]["weight_decay"] = 0.7
        _train(params, optimizer, range(2, 5))
    _assert_same(ours, plain)
    assert sharded.param_groups is sharded._optimizer.param_groups
    _assert_same_state(sharded.state_dict(to=None), plain_optimizer.state_dict())
    again = _params()
    resumed = ShardedOptimizer(groups(again), torch.optim.AdamW)
    resumed.add_param_group({"params": again[3:]})
    resumed.load_state_dict(sharded.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in sharded.param_groups]


def schedulers_change_what_the_step_uses(rank: int, world: int) -> None:
    plain, ours = _params(), _params()
    for params, optimizer in (
        (plain, torch.optim.SGD(plain, lr=1.0, momentum=0.5)),
        (ours, ShardedOptimizer(ours, torch.optim.SGD, lr=1.0, momentum=0.5)),
    ):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
        for step in range(6):
            _train(params, optimizer, range(step, step + 1))
            schedule.step()
    _assert_same(ours, plain)


def a_closure_gives_its_loss(rank: int, world: int) -> None:
    params = _params()
    optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = params[0].square().sum()
        differentiate(loss)
        return loss.item()

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def names_come_along(rank: int, world: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def states_go_to_the_rank_that_asks(rank: int, world: int) -> None:
    params = _params()
    optimizer = ShardedOptimizer(params, torch.optim.AdamW)
    _train(params, optimizer)
    for to in range(world):
        state = optimizer.state_dict(to=to)
        assert len(state["state"]) == (len(SHAPES) - 1 if rank == to else 0)
        assert len(state["param_groups"][0]["params"]) == len(SHAPES)
    with pytest.raises(ValueError, match="`to` must be None or a rank below"):
        optimizer.state_dict(to=world)
    kept = optimizer.state_dict(to=None)
    before = copy.deepcopy(kept)
    _train(params, optimizer)
    _assert_same_state(kept, before)


def a_state_is_loaded_from_whoever_has_it(rank: int, world: int) -> None:
    plain = _params()
    plain_optimizer = torch.optim.AdamW(plain, lr=0.01)
    _train(plain, plain_optimizer)
    whole = plain_optimizer.state_dict()
    nothing = {**whole, "state": {}}
    states = [copy.deepcopy(whole if rank in having else nothing) for having in (range(world), [0], [world - 1])]
    start = copy.deepcopy(plain)
    _train(plain, plain_optimizer, range(STEPS, 2 * STEPS))
    for state in states:
        ours = copy.deepcopy(start)
        sharded = ShardedOptimizer(ours, torch.optim.AdamW, lr=3.0)
        sharded.load_state_dict(state)
        assert sharded.param_groups[0]["lr"] == 0.01
        assert _state_bytes(sharded) < _state_bytes(plain_optimizer)
        _train(ours, sharded, range(STEPS, 2 * STEPS))
        _assert_same(ours, plain)
        back = torch.optim.AdamW(copy.deepcopy(ours))
        back.load_state_dict(sharded.state_dict(to=None))
        _assert_same_state(back.state_dict(), plain_optimizer.state_dict())
    with pytest.raises(ValueError, match=r"`state_dict` has param groups of \[8\]"):
        ShardedOptimizer(_params()[:2], torch.optim.AdamW).load_state_dict(whole)


def training_under_ddp_is_bitwise_unsharded_training(rank: int, world: int) -> None:
    results = []
    for sharded in (False, True):
        model = language_model(tied=True)
        ddp = DDP(model, bucket_mb=0.002)
        trained = list(model.parameters())
        optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(trained, torch.optim.AdamW) if sharded else torch.optim.AdamW(trained)
        )
        for step in range(4):
            inputs, target = part_of(batch_of(model, step, world * ROWS_PER_RANK), rank)
            differentiate(loss_of(ddp(inputs), target))
            ddp.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        results.append(values_of(model))
    assert torch.equal(results[0], results[1])


def what_cannot_be_optimized_is_refused(rank: int, world: int) -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    refused: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty parameter list"),
        ([a, b, a], ValueError, "numbers 0 and 2"),
        ([{"params": [a]}, {"params": [b, a]}], ValueError, "numbers 0 and 2"),
        ([a, b * 2], ValueError, "number 1 is not a leaf"),
        ([a, 3], TypeError, "number 1 is int"),
        ({a, b}, TypeError, "ordered iterable.*got set"),
        (a, TypeError, "ordered iterable.*got Parameter"),
        ([{"params": {a, b}}], TypeError, "a set"),
        ([{"lr": 1}], ValueError, "without the key `params`"),
    ]
    for params, error, message in refused:
        with pytest.raises(error, match=message):
            ShardedOptimizer(params, torch.optim.AdamW)
    with pytest.raises(ValueError, match="LBFGS"):
        ShardedOptimizer([a], torch.optim.LBFGS)
    with pytest.raises(TypeError, match="`optimizer_cls`"):
        ShardedOptimizer([a], "AdamW")  # type: ignore[arg-type]
    optimizer = ShardedOptimizer([a], torch.optim.AdamW)
    with pytest.raises(ValueError, match="more than one parameter group: number 1 of `param_group`"):
        optimizer.add_param_group({"params": [b, a]})
    with pytest.raises(StepscopeError, match="optimizer mismatch: rank `1`"):
        ShardedOptimizer([a], torch.optim.AdamW, lr=1.0 if rank == 1 else 2.0)


CHECKS = [
    every_optimizer_is_bitwise_the_plain_one,
    other_dtypes_and_layouts_are_shared,
    state_is_a_share_of_the_whole,
    gradients_stay_where_they_are,
    memory_that_others_look_at_stays_where_it_is,
    parameters_of_one_owner_lie_together,
    groups_keep_their_options,
    schedulers_change_what_the_step_uses,
    a_closure_gives_its_loss,
    names_come_along,
    states_go_to_the_rank_that_asks,
    a_state_is_loaded_from_whoever_has_it,
    training_under_ddp_is_bitwise_unsharded_training,
    what_cannot_be_optimized_is_refused,
]
WITH_FOUR_RANKS = [state_is_a_share_of_the_whole, every_optimizer_is_bitwise_the_plain_one]


@pytest.fixture(scope="module")
def checked() -> dict[int, Outcome]:
    return {2: run_checks(CHECKS, 2), 4: run_checks(WITH_FOUR_RANKS, 4)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Callable[[int, int], None], checked: dict[int, Outcome]) -> None:
    checked[2].require(check)


@pytest.mark.parametrize("check", WITH_FOUR_RANKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check: Callable[[int, int], None], checked: dict[int, Outcome]) -> None:
    checked[4].require(check)


def _save_or_resume(rank: int, world: int, saved: bytes | None) -> bytes:
    """Train and save; or load that, continue, and return the parameters."""
    params = _params()
    optimizer = ShardedOptimizer(params, torch.optim.AdamW)
    file = io.BytesIO(saved or b"")
    if saved is None:
        _train(params, optimizer)
        torch.save({"params": [param.detach() for param in params], "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()
    state = torch.load(file)
    for param, value in zip(params, state["params"], strict=True):
        param.data.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    _train(params, optimizer, range(STEPS, 2 * STEPS))
    return repr([param.tolist() for param in params]).encode()


def test_saved_state_loads_on_another_number_of_ranks() -> None:
    saved = run_ranks(_save_or_resume, 2, None)[0]
    plain = _params()
    _train(plain, torch.optim.AdamW(plain), range(2 * STEPS))
    expected = repr([param.tolist() for param in plain]).encode()
    for world in (1, 3):
        assert run_ranks(_save_or_resume, world, saved) == [expected] * world
