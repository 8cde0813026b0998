"""A rank that raises, dies or hangs: the others stop, and name the rank and its last collective."""

import os
import time

import pytest
import torch

from tests.cpu.parallel.ranks import run_ranks, start_ranks


def _fail(rank: int, world: int, fault: str) -> None:
    from stepscope.parallel import Communicator

    communicator = Communicator.default()
    tensor = torch.ones(4)
    for number in range(3):
        communicator.all_reduce(tensor, f"bucket {number}").wait()
    if rank == 1:
        match fault:
            case "raises":
                raise ValueError("the model is wrong")
            case "dies":
                os._exit(3)
            case "hangs":
                time.sleep(3600)
    communicator.all_reduce(tensor, "bucket 3").wait()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "rank 1 raised ValueError: the model is wrong, after collective 3, all-reduce of bucket 2"),
        ("dies", "rank 1 died, after collective 3, all-reduce of bucket 2"),
        ("hangs", "rank 1 fell behind, after collective 3, all-reduce of bucket 2"),
    ],
)
def test_other_ranks_name_the_failed_rank_and_its_last_collective(fault: str, said: str) -> None:
    with start_ranks(_fail, 3, fault, timeout_s=40 if fault == "hangs" else 240) as (_, pipes):
        for rank in (0, 2):
            failure, _ = pipes[rank].recv()
            assert said in failure
            assert f"rank {rank} could not complete the all-reduce of bucket 3" in failure


def _disagree(rank: int, world: int) -> list[str]:
    from stepscope.errors import StepscopeError
    from stepscope.parallel import DDP, FSDP

    told = []
    for wrap in (DDP, FSDP):
        for what in ("model", "batch", "nothing", *["no forward pass"] * (wrap is DDP)):
            try:
                model = wrap(torch.nn.Linear(4, 4 + (rank == 1 and what == "model")))
                if rank == 0 or what != "no forward pass":
                    model(torch.ones(2 + (rank == 1 and what == "batch"), 4)).sum().backward()
                model.finish_gradient_synchronization()
            except StepscopeError as error:
                told.append(f"{wrap.__name__} {what}: {error}")
    return told


def test_mismatched_ranks_raise_before_anything_is_updated() -> None:
    for told in run_ranks(_disagree, 2):
        assert all("mismatch: rank `1`" in line for line in told)
        assert [line.partition(":")[0] for line in told] == ["DDP model", "DDP batch", "FSDP model", "FSDP batch"]


def test_wrapping_requires_a_process_group() -> None:
    from stepscope.errors import StepscopeError
    from stepscope.parallel import DDP

    with pytest.raises(StepscopeError, match="process group has not been initialized"):
        DDP(torch.nn.Linear(2, 2))
