"""What would silently train wrongly raises: two wrappers, shards passed as whole parameters, updates too early."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stepscope.errors import StepscopeError
from stepscope.parallel import DDP, FSDP, Communicator, ShardedOptimizer
from tests.cpu.parallel.ranks import run_ranks


def _make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _refuse_all(rank: int, world: int) -> None:
    wraps: tuple[Callable[[nn.Module], nn.Module], ...] = (DDP, FSDP)
    for outer in wraps:
        for inner in wraps:
            module = _make()
            held = inner(module)
            with pytest.raises(ValueError, match=r"is already wrapped in (DDP|FSDP)"):
                outer(held)
            with pytest.raises(ValueError, match=r"is already wrapped in (DDP|FSDP)"):
                outer(nn.Sequential(module))
    module = _make()
    DDP(module)  # freed immediately
    DDP(module)
    sharded = FSDP(_make())
    with pytest.raises(ValueError, match="number 0 is a shard of an FSDP model"):
        ShardedOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    for model in (sharded, sharded.module):
        with pytest.raises(StepscopeError, match=r"state_dict\(\) is not supported"):
            model.state_dict()
    _update_too_early(sharded)
    Communicator.default().barrier("the end")  # gradients are still being sent, which needs both ranks


def _update_too_early(sharded: FSDP) -> None:
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(torch.ones(2, 8)).sum().backward()
    sharded(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(StepscopeError, match="updated before the gradients of the last backward pass were averaged"):
        sharded(torch.ones(2, 8))


def test_silent_training_errors_raise() -> None:
    run_ranks(_refuse_all, 2)
