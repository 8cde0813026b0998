"""Every DDP strategy compared with one process that trains on the batch of all ranks."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stepscope.parallel import DDP
from stepscope.parallel.ddp import STRATEGIES
from tests.cpu.accuracy import typical_error
from tests.cpu.parallel.ranks import run_ranks
from tests.cpu.parallel.training import (
    MODELS,
    ROWS_PER_RANK,
    STEPS,
    batch_of,
    differentiate,
    finish_step,
    loss_of,
    make_optimizer,
    part_of,
    train_alone,
    values_of,
)

# Small enough that these models have several buckets.
BUCKET_MB = 0.002


def _train_together(model: nn.Module, strategy: str, rank: int, world: int) -> nn.Module:
    ddp = DDP(model, strategy, bucket_mb=BUCKET_MB)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        inputs, target = part_of(batch_of(model, step, world * ROWS_PER_RANK), rank)
        differentiate(loss_of(ddp(inputs), target))
        ddp.finish_gradient_synchronization()
        finish_step(optimizer, step)
    return model


def _train_apart(model: nn.Module, rank: int, world: int) -> nn.Module:
    """The result of forgetting to average."""
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        inputs, target = part_of(batch_of(model, step, world * ROWS_PER_RANK), rank)
        differentiate(loss_of(model(inputs), target))
        finish_step(optimizer, step)
    return model


class Comparison(NamedTuple):
    """Compare the parameters after training with those of one process: are they bitwise equal if it accumulates the
    ranks' parts of the batch? How far are they from a float64 run, relative to one process with the whole batch at
    once?
    """

    equal: bool
    relative_error: float


Comparisons = dict[tuple[str, str], Comparison]


def _compare_with_one_process(rank: int, world: int) -> tuple[list[list[float]], Comparisons]:
    """Every rank's parameters, and on rank 0 the comparison, for each model and strategy."""
    trained: dict[tuple[str, str], Tensor] = {}
    for name, make in MODELS.items():
        for strategy in STRATEGIES:
            trained[name, strategy] = values_of(_train_together(make(), strategy, rank, world))
        if rank == 0:
            trained[name, "apart"] = values_of(_train_apart(make(), rank, world))
    comparisons: Comparisons = {}
    for name, make in MODELS.items() if rank == 0 else ():
        in_parts = values_of(train_alone(make(), world, parts=True))
        truth = values_of(train_alone(make().double(), world, parts=False))
        plain_error = typical_error(values_of(train_alone(make(), world, parts=False)), truth)
        for strategy in (*STRATEGIES, "apart"):
            ours = trained[name, strategy]
            comparisons[name, strategy] = Comparison(
                torch.equal(ours, in_parts), typical_error(ours, truth) / plain_error
            )
    return [trained[name, strategy].tolist() for name in MODELS for strategy in STRATEGIES], comparisons


@pytest.fixture(scope="module")
def compared() -> dict[int, Comparisons]:
    compared = {}
    for world in (2, 4):
        (values, comparisons), *others = run_ranks(_compare_with_one_process, world)
        assert all(theirs == values for theirs, _ in others), "ranks have different parameters"
        compared[world] = comparisons
    return compared


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_match_one_process_bitwise(model: str, compared: dict[int, Comparisons]) -> None:
    assert all(compared[2][model, strategy].equal for strategy in STRATEGIES), compared[2]
    assert not compared[2][model, "apart"].equal


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_as_close_to_the_truth_as_those_of_one_process(
    model: str, world: int, compared: dict[int, Comparisons]
) -> None:
    for strategy in STRATEGIES:
        assert compared[world][model, strategy].relative_error <= 2, (strategy, compared[world])
    assert compared[world][model, "apart"].relative_error > 2, "the limit would pass ranks that never communicated"
