"""FSDP against one process on the whole batch: bitwise if the sums are the same, else as close to float64."""

from typing import Any

import pytest
import torch
from torch import nn

from stepscope.parallel import FSDP
from tests.cpu.accuracy import assert_as_accurate, typical_error
from tests.cpu.parallel.fsdp_cases import (
    KINDS,
    STEPS,
    Params,
    build,
    checkpoint_inside,
    checkpoint_outside,
    differing,
    make_adamw,
    make_momentum,
    params_of,
    train_alone,
    train_sharded,
)
from tests.cpu.parallel.ranks import run_ranks

CHECKPOINTS = (
    ("1", "built-in"),
    ("2", "frozen"),
    ("nested:2", "built-in"),
    ("reentrant", "tied"),
    ("whole", "built-in"),
)
FEW = 3
CASES_OF_FOUR = (("built-in", 1), ("tied", 2), ("frozen", 1), ("own", 1))


def _train(rank: int, world: int, model: FSDP, last: int = STEPS) -> Params:
    train_sharded(model, make_adamw(model.parameters()), rank, world, last=last)
    return model.gather_full_params()


def _compare_with_one_process(rank: int, world: int) -> dict[str, list[str]]:
    """For each case, the parameters that are not bitwise those of one process."""
    found = {}
    for kind in KINDS:
        # Another seed on other ranks: rank 0's parameters are used.
        ours = _train(rank, world, FSDP(build(kind, seed=rank)))
        found[kind] = differing(ours, train_alone(build(kind), world))
    few = {kind: train_alone(build(kind), world, last=FEW) for kind in ("built-in", "tied", "frozen")}
    for how, kind in CHECKPOINTS:
        model = FSDP(build(kind))
        checkpoint_outside(model, how)
        found[f"checkpoint {how}"] = differing(_train(rank, world, model, FEW), few[kind])
    inside = _train(rank, world, FSDP(checkpoint_inside(build("built-in"))), FEW)
    found["checkpoint inside"] = differing(inside, few["built-in"])
    found["module inside"] = differing(_train_inner(rank, world), few["built-in"])
    return found


def _train_inner(rank: int, world: int) -> Params:
    """Calling the module inside, as its own `loss` does, counts as calling the model."""
    model = FSDP(build("built-in"))
    optimizer = make_adamw(model.parameters())
    train_sharded(_Inner(model), optimizer, rank, world, last=FEW)  # type: ignore[arg-type]
    return model.gather_full_params()


class _Inner(nn.Module):
    def __init__(self, model: FSDP) -> None:
        super().__init__()
        self.no_sync = model.no_sync
        self.finish_gradient_synchronization = model.finish_gradient_synchronization
        self.forward = model.module.forward


def test_two_ranks_match_one_process_bitwise() -> None:
    for rank, found in enumerate(run_ranks(_compare_with_one_process, 2)):
        assert found == {case: [] for case in found}, f"rank {rank}"


def _train_four(rank: int, world: int) -> dict[str, dict[str, Any]]:
    trained: dict[str, dict[str, Any]] = {}
    for kind, micro in CASES_OF_FOUR:
        model = FSDP(build(kind))
        train_sharded(model, make_momentum(model.parameters()), rank, world, micro=micro)
        params = model.gather_full_params(to=2)
        assert bool(params) == (rank == 2)
        trained[kind] = {name: tensor.numpy() for name, tensor in params.items()}
    return trained


def _train_with_momentum(model: nn.Module, parts: int) -> Params:
    return train_alone(model, parts, make_momentum(model.parameters()))


def test_four_ranks_are_as_close_to_float64_as_one_process() -> None:
    trained = run_ranks(_train_four, 4)[2]
    for kind, micro in CASES_OF_FOUR:
        # One process on the whole batch at once, unless the batch's parts choose what is computed.
        parts = 4 * micro if kind == "own" else 1
        plain, truth = (_train_with_momentum(model, parts) for model in (build(kind), build(kind).double()))
        untrained = params_of(build(kind))
        assert trained[kind].keys() == truth.keys()
        for name, true_value in truth.items():
            ours = torch.from_numpy(trained[kind][name])
            assert_as_accurate(ours, plain[name], true_value, name=f"{kind}: {name}", measure=typical_error)
            if not torch.equal(plain[name], untrained[name]):
                with pytest.raises(AssertionError, match="limit"):
                    assert_as_accurate(untrained[name], plain[name], true_value, measure=typical_error)
