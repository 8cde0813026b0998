"""DDP with all four strategies, whatever a rank skips, accumulates or runs twice. All on two ranks, in one start."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepscope.errors import StepscopeError
from stepscope.parallel import DDP, Communicator
from stepscope.parallel.ddp import STRATEGIES
from tests.cpu.accuracy import normal
from tests.cpu.parallel.checks import Outcome, run_checks
from tests.cpu.parallel.training import (
    ROWS_PER_RANK,
    WIDTH,
    batch_of,
    differentiate,
    language_model,
    loss_of,
    part_of,
    routed,
)

# Small enough that these models have several buckets.
BUCKET_MB = 0.002


def _wrap(module: nn.Module, strategy: str = "bucketed") -> DDP:
    return DDP(module, strategy, bucket_mb=BUCKET_MB)


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def _assert_equal(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    for name, grad in ours.items():
        other = theirs[name]
        if grad is None or other is None:
            assert grad is other, f"{name}: {grad} and {other}"
        else:
            assert torch.equal(grad, other), f"{name}: {grad} and {other}"


def _assert_close(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    """For sums that one process computes in another order."""
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], msg=f"{name}: {grad} and {theirs[name]}")


def _run_alone(
    passes: Callable[[nn.Module, int], None], world: int, make: Callable[[], nn.Module] = routed
) -> dict[str, Tensor | None]:
    """One process that runs the backward passes of all ranks; the average is exact for two ranks."""
    module = make()
    for rank in range(world):
        passes(module, rank)
    for param in module.parameters():
        if param.grad is not None:
            param.grad /= world
    return _gradients(module)


def _backward(model: nn.Module, rank: int, *, step: int = 0) -> None:
    inner = model.module if isinstance(model, DDP) else model
    inputs, target = part_of(batch_of(inner, step, 2 * ROWS_PER_RANK), rank)
    differentiate(loss_of(model(inputs), target))


def _backward_twice(model: nn.Module, rank: int, *, second: int) -> None:
    _backward(model, rank)
    _backward(model, rank, step=second)


def gradient_nobody_has_stays_none(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        ddp = _wrap(routed(), strategy)
        # Step 2: each rank has an expert to itself.
        for step in (0, 1, 2, 2):
            _backward(ddp, rank, step=step)
            ddp.finish_gradient_synchronization()
            _assert_equal(_gradients(ddp.module), _run_alone(partial(_backward, step=step), world))
            ddp.zero_grad()


def accumulated_gradients_are_sent_once(rank: int, world: int) -> None:
    def accumulate(model: nn.Module, rank_: int) -> None:
        for step in range(3):
            _backward(model, rank_, step=step)

    for strategy in STRATEGIES:
        ddp = _wrap(routed(), strategy)
        for set_to_none in (True, False, True):
            issued = _count_messages(ddp)
            with ddp.no_sync():
                for step in range(2):
                    _backward(ddp, rank, step=step)
            assert issued() == 0
            _backward(ddp, rank, step=2)
            ddp.finish_gradient_synchronization()
            assert issued() == len(ddp._averager.buckets)
            expected = _run_alone(accumulate, world)
            _assert_close(_gradients(ddp.module), expected)
            ddp.zero_grad(set_to_none=set_to_none)
        assert ddp.module.get_parameter("experts.2.weight").grad is None


def _count_messages(ddp: DDP) -> Callable[[], int]:
    """All-reduces since this was called; what is sent only once, after the first step, does not count."""
    ddp._communicator.take_time()
    return lambda: ddp._communicator.take_time().issued


class Shared(nn.Module):
    """One layer used three times, each under a checkpoint."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def _stack() -> nn.Module:
    torch.manual_seed(0)
    return Shared(reentrant=None)


def several_backward_passes_add_up(rank: int, world: int) -> None:
    """Two losses of one forward pass, a third only on rank 0, and not all reach all parameters."""

    def passes(model: nn.Module, rank_: int) -> None:
        inner = model.module if isinstance(model, DDP) else model
        inputs, target = part_of(batch_of(inner, 0, 2 * ROWS_PER_RANK), rank_)
        output = model(inputs)
        differentiate(loss_of(output, target), retain_graph=True)
        differentiate(inner.get_submodule("first")(inputs).square().mean())
        if rank_ == 0:
            differentiate(output.mean())

    expected = _run_alone(passes, world, _stack)
    for strategy, (_, overlapped) in STRATEGIES.items():
        ddp = DDP(_stack(), strategy, bucket_mb=1e-4)
        for step in range(3):
            issued = _count_messages(ddp)
            passes(ddp, rank)
            ddp.finish_gradient_synchronization()
            _assert_close(_gradients(ddp.module), expected)
            # The first time it is not known that more gradients will come, and all buckets are reduced twice.
            rounds = 2 if overlapped and step == 0 else 1
            assert issued() == rounds * len(ddp._averager.buckets), (strategy, step)
            ddp.zero_grad()


def what_one_rank_alone_has_late_is_not_lost(rank: int, world: int) -> None:
    def passes(model: nn.Module, rank_: int) -> None:
        inputs, target = part_of(batch_of(nn.Linear(1, 1), 0, 2 * ROWS_PER_RANK), rank_)
        output = model(inputs)
        differentiate(loss_of(output, target), retain_graph=True)
        if rank_ == 1:
            differentiate(output.mean())

    expected = _run_alone(passes, world, _stack)
    for strategy in STRATEGIES:
        ddp = DDP(_stack(), strategy, bucket_mb=1e-4)
        passes(ddp, rank)
        ddp.finish_gradient_synchronization()
        _assert_close(_gradients(ddp.module), expected)


def a_pass_in_no_sync_after_one_outside_is_not_lost(rank: int, world: int) -> None:
    expected = _run_alone(partial(_backward_twice, second=1), world, _stack)
    for strategy in STRATEGIES:
        ddp = DDP(_stack(), strategy, bucket_mb=1e-4)
        inputs = [part_of(batch_of(ddp.module, step, 2 * ROWS_PER_RANK), rank) for step in range(2)]
        losses = [loss_of(ddp(x), y) for x, y in inputs]
        differentiate(losses[0])
        with ddp.no_sync():
            differentiate(losses[1])
        ddp.finish_gradient_synchronization()
        _assert_close(_gradients(ddp.module), expected)


def checkpointing_changes_nothing(rank: int, world: int) -> None:
    def make(reentrant: bool | None) -> Shared:
        torch.manual_seed(0)
        return Shared(reentrant=reentrant)

    expected = _run_alone(_backward, world, lambda: make(None))
    for reentrant in (True, False):
        for strategy in STRATEGIES:
            ddp = _wrap(make(reentrant), strategy)
            messages = []
            for _ in range(2):
                issued = _count_messages(ddp)
                _backward(ddp, rank)
                ddp.finish_gradient_synchronization()
                messages.append(issued())
                _assert_close(_gradients(ddp.module), expected)
                ddp.zero_grad()
            # Reentrant checkpoints give a shared layer's gradient in three parts. After the first step that is known.
            assert messages[-1] == len(ddp._averager.buckets), messages


def a_whole_model_can_be_recomputed(rank: int, world: int) -> None:
    expected = _run_alone(partial(_backward_twice, second=0), world)
    for reentrant in (True, False):
        ddp = _wrap(routed())
        inputs, target = part_of(batch_of(ddp.module, 0, 2 * ROWS_PER_RANK), rank)
        inputs.requires_grad = True
        outputs = [checkpoint(ddp, inputs, use_reentrant=reentrant) for _ in range(2)]
        differentiate(loss_of(outputs[0], target) + loss_of(outputs[1], target))
        ddp.finish_gradient_synchronization()
        _assert_close(_gradients(ddp.module), expected)


def gradients_on_the_side_are_nobodys_business(rank: int, world: int) -> None:
    expected = _run_alone(_backward, world)
    for strategy in STRATEGIES:
        ddp = _wrap(routed(), strategy)
        inputs, target = part_of(batch_of(ddp.module, 0, 2 * ROWS_PER_RANK), rank)
        loss = loss_of(ddp(inputs), target)
        torch.autograd.grad(loss, ddp.module.get_parameter("scale"), retain_graph=True)
        differentiate(loss)
        ddp.finish_gradient_synchronization()
        _assert_equal(_gradients(ddp.module), expected)


def gradients_with_a_graph_are_averaged(rank: int, world: int) -> None:
    ddp = _wrap(nn.Linear(WIDTH, 1))
    with pytest.warns(UserWarning, match="create_graph"):
        differentiate((ddp(torch.ones(1, WIDTH)) * (rank + 1)).square().sum(), create_graph=True)
    ddp.finish_gradient_synchronization()
    grad = ddp.module.get_parameter("weight").grad
    assert grad is not None
    values = Communicator.default().share_objects(grad.tolist(), "gradients")
    assert values[0] == values[1]


def a_rank_without_a_backward_pass_takes_part(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        ddp = DDP(routed(), strategy, bucket_mb=BUCKET_MB, check_inputs=False)
        for _ in range(2):
            if rank == 0:
                _backward(ddp, 0)
            ddp.finish_gradient_synchronization()
            expected = _run_alone(lambda m, r: _backward(m, 0) if r == 0 else None, world)
            _assert_equal(_gradients(ddp.module), expected)
            ddp.zero_grad()
        ddp.finish_gradient_synchronization()
        assert all(param.grad is None for param in ddp.parameters())


def finishing_twice_changes_nothing(rank: int, world: int) -> None:
    ddp = _wrap(routed())
    _backward(ddp, rank)
    ddp.finish_gradient_synchronization()
    before = _gradients(ddp.module)
    ddp.finish_gradient_synchronization()
    _assert_equal(_gradients(ddp.module), before)


def a_forward_pass_before_finishing_is_refused(rank: int, world: int) -> None:
    ddp = _wrap(routed())
    x, _ = part_of(batch_of(ddp.module, 0, 2 * ROWS_PER_RANK), rank)
    ddp(x)
    _backward(ddp, rank)
    with torch.no_grad():
        ddp(x)
    with pytest.raises(StepscopeError, match="before the gradients") as caught:
        ddp(x)
    assert "finish_gradient_synchronization" in caught.value.hint
    ddp.finish_gradient_synchronization()
    ddp(x)
    with ddp.no_sync():
        _backward(ddp, rank)
        ddp(x)
        with pytest.raises(StepscopeError, match="no_sync"):
            ddp.finish_gradient_synchronization()


def orders_of_use_that_differ_do_not_hang(rank: int, world: int) -> None:
    """Rank 1 uses layers in the reverse order. From the second step on, buckets are in rank 0's order."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            for index in order:
                x = self.layers[index](x)
            return x

    orders = ([3, 1, 5, 0, 2, 4], [4, 2, 0, 5, 1, 3])

    def passes(model: nn.Module, rank_: int) -> None:
        differentiate(model(normal(2, WIDTH, seed=rank_).float(), orders[rank_]).square().mean())

    expected = _run_alone(passes, world, Either)
    for strategy in STRATEGIES:
        ddp = DDP(Either(), strategy, bucket_mb=WIDTH * WIDTH * 4 / 2**20)
        for _ in range(3):
            passes(ddp, rank)
            ddp.finish_gradient_synchronization()
            _assert_equal(_gradients(ddp.module), expected)
            ddp.zero_grad()
        if STRATEGIES[strategy].overlapped:
            in_order = [slot.index for bucket in ddp._averager.buckets for slot in bucket.slots]
            assert in_order == orders[0][::-1]


def buckets_leave_during_the_backward_pass(rank: int, world: int) -> None:
    for strategy, (_, overlapped) in STRATEGIES.items():
        ddp = _wrap(language_model(), strategy)
        issued = _count_messages(ddp)
        _backward(ddp, rank)
        assert issued() == (len(ddp._averager.buckets) - 1 if overlapped else 0), strategy
        ddp.finish_gradient_synchronization()
        assert issued() == (1 if overlapped else len(ddp._averager.buckets)), strategy
        counts = {"naive": len(ddp._averager.slots), "flat": 1, "overlap": len(ddp._averager.slots)}
        assert len(ddp._averager.buckets) == counts.get(strategy, len(ddp._averager.buckets))
        assert len(ddp._averager.buckets) >= 2 or strategy == "flat"


def gradients_are_parts_of_their_buckets(rank: int, world: int) -> None:
    for set_to_none in (True, False):
        ddp = DDP(language_model(), "flat")
        for _ in range(2):
            ddp.zero_grad(set_to_none=set_to_none)
            _backward(ddp, rank)
            assert all(param.grad is None for param in ddp.parameters())
            ddp.finish_gradient_synchronization()
            storages = {param.grad.untyped_storage().data_ptr() for param in ddp.parameters() if param.grad is not None}
            assert len(storages) == 1
        assert all(p.grad is slot.view for p, slot in zip(ddp.parameters(), ddp._averager.slots, strict=True))


def a_bucket_holds_one_dtype(rank: int, world: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in self.dtypes)
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            for layer, dtype in zip(self.layers, self.dtypes, strict=True):
                x = layer(x.to(dtype))
            image: Tensor = self.conv(torch.ones(1, 3, 4, 4))
            return x.float().sum() + image.square().sum() + self.empty.sum()

    def passes(model: nn.Module, rank_: int) -> None:
        differentiate(model(normal(2, WIDTH, seed=rank_)))

    expected = _run_alone(passes, world, Mixed)
    for strategy in STRATEGIES:
        ddp = _wrap(Mixed(), strategy)
        for _ in range(2):
            passes(ddp, rank)
            ddp.finish_gradient_synchronization()
            _assert_equal(_gradients(ddp.module), expected)
            ddp.zero_grad()
        (view,) = [slot.view for slot in ddp._averager.slots if slot.name == "conv.weight"]
        assert view is not None
        assert view.stride() == ddp.module.get_parameter("conv.weight").stride()
        assert strategy != "flat" or len(ddp._averager.buckets) == 4


def rank_0_gives_parameters_and_buffers(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 2).to(torch.bfloat16))
    module.register_buffer("strided", normal(4, 6, seed=rank).t())
    module.register_buffer("flag", torch.tensor([rank == 0]))
    mean = module.get_buffer("1.running_mean").fill_(rank + 1)
    ddp = DDP(module)
    for name, tensor in module.state_dict().items():
        received = Communicator.default().share_objects(tensor.tolist(), "values")
        assert received[0] == received[1], name
    assert module.get_buffer("flag").tolist() == [True]
    assert mean[0] == 1
    mean.fill_(rank + 5)
    ddp.broadcast_buffers()
    assert mean[0] == 5


def unlike_models_are_refused(rank: int, world: int) -> None:
    class Tied(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(2))
            self.b = self.a if tied else nn.Parameter(torch.zeros(2))

    def frozen(layer: nn.Module, *, freeze: bool) -> nn.Module:
        return layer.requires_grad_(not freeze)

    odd = rank == 1
    cases = {
        "float32 (2, 3)": nn.Linear(3 if odd else 2, 2),
        "float64": nn.Linear(2, 2, dtype=torch.float64 if odd else torch.float32),
        "frozen": frozen(nn.Linear(2, 2), freeze=odd),
        "the same as `a`": Tied(tied=odd),
        "nothing": nn.Linear(2, 2, bias=not odd),
        "strides": _transposed() if odd else _Holder(torch.zeros(3, 2)),
    }
    for expected, module in cases.items():
        with pytest.raises(StepscopeError, match="model mismatch: rank `1` differs from rank `0`") as caught:
            DDP(module)
        assert f"rank 1: {expected}" in caught.value.detail or expected in caught.value.detail.splitlines()[-1]


class _Holder(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def _transposed() -> nn.Module:
    return _Holder(torch.zeros(2, 3).t())


def unlike_inputs_are_refused(rank: int, world: int) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, pair: tuple[Tensor, int], *, mask: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.layer(pair[0]) * mask["m"]
            return out

    def step(ddp: nn.Module, x: Tensor, mask: dict[str, Tensor]) -> None:
        assert isinstance(ddp, DDP)
        ddp((x, 1), mask=mask).sum().backward()
        ddp.finish_gradient_synchronization()

    mask = {"m": torch.ones(1)}
    with pytest.raises(StepscopeError, match="input mismatch: rank `1` differs from rank `0`") as caught:
        step(DDP(Takes()), torch.zeros(2 + rank, WIDTH), mask)
    assert caught.value.detail.splitlines()[-1] == "rank 1: argument `0[0]`: float32 (3, 8)"
    with pytest.raises(StepscopeError, match="rank `1`"):
        step(DDP(Takes()), torch.zeros(2, WIDTH), {"m": torch.ones(1 + rank, 1)})
    step(DDP(Takes(), check_inputs=False), torch.zeros(2 + rank, WIDTH), mask)
    ddp = DDP(Takes())
    if rank == 0:
        # A rank that evaluates on its own waits for nobody.
        ddp.eval()(((torch.zeros(1, WIDTH)), 1), mask=mask)
    step(ddp.train(), torch.zeros(2, WIDTH), mask)
    ddp = DDP(Takes())
    if rank == 0:  # the other has no data in the first step
        ddp((torch.zeros(2, WIDTH), 1), mask=mask).sum().backward()
    ddp.finish_gradient_synchronization()


def training_what_was_frozen_is_refused(rank: int, world: int) -> None:
    module = routed()
    weight = module.inner.weight
    weight.requires_grad = False
    ddp = _wrap(module)
    _backward(ddp, rank)
    ddp.finish_gradient_synchronization()
    weight.requires_grad = True
    with pytest.raises(StepscopeError, match=r"`inner\.weight` was frozen"):
        _backward(ddp, rank)


def sparse_gradients_are_refused(rank: int, world: int) -> None:
    ddp = DDP(nn.Embedding(4, 3, sparse=True))
    with pytest.raises(StepscopeError, match="sparse"):
        differentiate(ddp(torch.tensor([1, 2])).sum())


def a_wrapper_that_is_gone_leaves_no_hooks(rank: int, world: int) -> None:
    module = routed()
    ddp = _wrap(module)
    _backward(ddp, rank)
    ddp.finish_gradient_synchronization()
    ddp.zero_grad()
    del ddp
    gc.collect()
    assert not module.inner.weight._post_accumulate_grad_hooks
    _backward(module, rank)
    assert module.inner.weight.grad is not None
    module.zero_grad()
    again = _wrap(module, "flat")
    _backward(again, rank)
    again.finish_gradient_synchronization()
    _assert_equal(_gradients(module), _run_alone(_backward, world))


def a_model_without_anything_to_train_passes_through(rank: int, world: int) -> None:
    ddp = DDP(nn.Linear(2, 2).requires_grad_(requires_grad=False))
    ddp(torch.zeros(1, 2))
    ddp.finish_gradient_synchronization()


CHECKS = [
    gradient_nobody_has_stays_none,
    accumulated_gradients_are_sent_once,
    several_backward_passes_add_up,
    what_one_rank_alone_has_late_is_not_lost,
    a_pass_in_no_sync_after_one_outside_is_not_lost,
    checkpointing_changes_nothing,
    a_whole_model_can_be_recomputed,
    gradients_on_the_side_are_nobodys_business,
    gradients_with_a_graph_are_averaged,
    a_rank_without_a_backward_pass_takes_part,
    finishing_twice_changes_nothing,
    a_forward_pass_before_finishing_is_refused,
    orders_of_use_that_differ_do_not_hang,
    buckets_leave_during_the_backward_pass,
    gradients_are_parts_of_their_buckets,
    a_bucket_holds_one_dtype,
    rank_0_gives_parameters_and_buffers,
    unlike_models_are_refused,
    unlike_inputs_are_refused,
    training_what_was_frozen_is_refused,
    sparse_gradients_are_refused,
    a_wrapper_that_is_gone_leaves_no_hooks,
    a_model_without_anything_to_train_passes_through,
]


@pytest.fixture(scope="module")
def checked() -> Outcome:
    return run_checks(CHECKS, 2)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ddp(check: Callable[[int, int], None], checked: Outcome) -> None:
    checked.require(check)
