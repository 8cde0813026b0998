"""Collectives measured by real ranks: checked first, timed on each, and a failed case keeps the others."""

from typing import Any

import pytest

from stepscope.recording.rows.collective_case import CommCase, CommOutcome
from stepscope.recording.rows.links import COLLECTIVES, Collective, Dtype
from tests.cpu.parallel.ranks import run_ranks


def make_case(collective: Collective, ranks: int, *, message_bytes: int = 100_000, dtype: Dtype = "fp32") -> CommCase:
    return CommCase(
        collective=collective,
        message_bytes=message_bytes,
        ranks=ranks,
        backend="gloo",
        device="cpu",
        dtype=dtype,
        repetitions=3,
        seconds=0.01,
    )


def measure(rank: int, world: int, cases: tuple[CommCase, ...]) -> list[CommOutcome]:
    from stepscope.measure.collectives import measure_collectives
    from stepscope.parallel import Communicator

    asked = cases if rank == 0 else ()  # only rank 0 knows which are left
    return list(measure_collectives(asked, Communicator.default(), device="cpu"))


def test_every_collective_is_correct_and_timed_on_every_rank() -> None:
    world = 3
    cases = [make_case(collective, world) for collective in COLLECTIVES]
    # A message that the ranks do not divide, of less than a tile and of more, in another dtype.
    cases += [make_case("reduce-scatter", world, message_bytes=4_000_010, dtype="bf16")]
    cases += [make_case("all-gather", world, message_bytes=4 * world)]
    first, *others = run_ranks(measure, world, tuple(cases))
    assert [outcome.status for outcome in first] == ["ok"] * 6
    for outcome in first:
        assert outcome.measurement is not None
        assert [len(samples) for samples in outcome.measurement.samples_ns] == [3] * world
        assert all(sample > 0 for samples in outcome.measurement.samples_ns for sample in samples)
        assert len(outcome.measurement.slowest_ns) == 3
        assert len(outcome.measurement.processor_ns) == world
    assert all(other == first for other in others)


def measure_broken(rank: int, world: int, cases: tuple[CommCase, ...], breaks: str) -> list[CommOutcome]:
    """One collective of rank 1 gives a wrong result, or has no memory for one message."""
    import torch

    from stepscope.measure.collectives import measure_collectives
    from stepscope.parallel import Communicator

    communicator: Any = Communicator.default()
    if rank == 1 and breaks == "memory":
        real = torch.empty

        def empty(count: int, **more: Any) -> torch.Tensor:
            if count == cases[1].elements:
                raise RuntimeError("[enforce fail at alloc.cpp:1] . DefaultCPUAllocator: can't allocate memory")
            return real(count, **more)

        torch.empty = empty  # type: ignore[assignment]
    if breaks == "result":
        all_reduce = communicator.all_reduce

        def spoil(tensor: torch.Tensor, name: str, *, average: bool = True) -> Any:
            pending = all_reduce(tensor, name, average=average)
            pending.wait()
            if rank == 1 and len(tensor) == cases[1].elements:
                tensor[-1] += 1
            return pending

        communicator.all_reduce = spoil
    return list(measure_collectives(cases, communicator, device="cpu"))


@pytest.mark.parametrize(
    ("breaks", "status", "said"),
    [
        ("memory", "oom", "rank 1: RuntimeError: DefaultCPUAllocator"),
        ("result", "wrong", "rank 1: the all-reduce returned wrong"),
    ],
)
def test_failure_on_one_rank_costs_that_case_on_all(breaks: str, status: str, said: str) -> None:
    cases = tuple(make_case("all-reduce", 2, message_bytes=size) for size in (1_000, 2_000, 3_000))
    for outcomes in run_ranks(measure_broken, 2, cases, breaks):
        assert [outcome.status for outcome in outcomes] == ["ok", status, "ok"]
        assert outcomes[1].reason.startswith(said)


def test_message_larger_than_memory_is_not_tried() -> None:
    (outcome,) = run_ranks(measure, 2, (make_case("broadcast", 2, message_bytes=10**15),))[0]
    assert outcome.status == "oom"
    assert "not tried" in outcome.reason
