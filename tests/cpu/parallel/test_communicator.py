"""Collectives through the communicator: their results, counts, and errors when a rank is missing."""

import time
from pathlib import Path

import torch

from stepscope.parallel import Communicator
from tests.cpu.parallel.ranks import run_ranks


def _try_all(rank: int, world: int) -> dict[str, list[float]]:
    comm = Communicator.default()
    got: dict[str, list[float]] = {}
    comm.take_time()
    tensor = torch.full((4,), float(rank))
    comm.all_reduce(tensor, "a").wait()
    got["average"] = tensor.tolist()
    tensor = torch.full((4,), float(rank))
    comm.all_reduce(tensor, "a", average=False).wait()
    got["sum"] = tensor.tolist()
    whole = torch.zeros(2 * world)
    whole[2 * rank : 2 * rank + 2] = rank + 1
    comm.all_gather(whole, whole[2 * rank : 2 * rank + 2], "b").wait()
    got["gathered"] = whole.tolist()
    whole = torch.arange(2.0 * world) + rank
    comm.reduce_scatter(whole[2 * rank : 2 * rank + 2], whole, "c", average=False).wait()
    got["scattered"] = whole[2 * rank : 2 * rank + 2].tolist()
    tensor = torch.full((2,), float(rank))
    comm.broadcast(tensor, world - 1, "d").wait()
    got["broadcast"] = tensor.tolist()
    parts = [torch.full((4 + source,), float(rank)) for source in range(world)]
    for pending in comm.share(list(enumerate(parts)), "f"):
        pending.wait()
    got["parts"] = [value for part in parts for value in set(part.tolist())]
    got["shared"] = [float(value) for value in comm.share_objects(rank * 10, "e")]
    taken = comm.take_time()
    got["counts"] = [taken.issued, taken.message_bytes]
    assert taken.busy_ns > 0
    assert taken.exposed_ns > 0
    assert comm.take_time() == (0, 0, 0, 0)
    return got


def test_collectives_compute_what_their_names_say() -> None:
    for rank, got in enumerate(run_ranks(_try_all, 3)):
        assert got["average"] == [1.0] * 4
        assert got["sum"] == [3.0] * 4
        assert got["gathered"] == [1, 1, 2, 2, 3, 3]
        assert got["scattered"] == [3 * (2 * rank) + 3, 3 * (2 * rank + 1) + 3]
        assert got["broadcast"] == [2.0, 2.0]
        assert got["shared"] == [0, 10, 20]
        assert got["parts"] == [0, 1, 2]
        assert got["counts"] == [6, 16 + 16 + 24 + 24 + 8 + 4 * (4 + 5 + 6)]


def _scatter_sums(rank: int, world: int) -> tuple[list[float], list[float]]:
    wholes = torch.randn(world, 8 * world, generator=torch.Generator().manual_seed(1))
    shard = torch.empty(8)
    Communicator.default().reduce_scatter(shard, wholes[rank].clone(), "x", average=False).wait()
    in_order = wholes[0]
    for other in wholes[1:]:
        in_order = in_order + other
    return shard.tolist(), in_order.chunk(world)[rank].tolist()


def test_reduce_scatter_sums_in_rank_order_to_the_bit() -> None:
    for found, wanted in run_ranks(_scatter_sums, 4):
        assert found == wanted


def _wait_late(rank: int, world: int, issued: Path) -> tuple[int, int, int]:
    """Rank 0 works for 0.2 s while rank 1 is 0.4 s late: half of the collective is hidden. Rank 1 starts counting when
    rank 0 has begun, which a busy machine may delay.
    """
    comm = Communicator.default()
    comm.all_reduce(torch.ones(1), "warm-up").wait()
    comm.barrier("begin")
    comm.take_time()
    if rank == 1:
        while not issued.exists():
            time.sleep(0.01)
        time.sleep(0.4)
    began = time.perf_counter_ns()
    pending = [comm.all_reduce(torch.ones(1), name) for name in ("first", "second")]
    if rank == 0:
        issued.touch()
        time.sleep(0.2)
    for one in pending:
        one.wait()
    elapsed_ns = time.perf_counter_ns() - began
    taken = comm.take_time()
    return taken.busy_ns, taken.exposed_ns, elapsed_ns


def test_hidden_communication_is_counted_but_not_exposed(tmp_path: Path) -> None:
    (busy_ns, exposed_ns, elapsed_ns), _ = run_ranks(_wait_late, 2, tmp_path / "issued")
    assert 0.35e9 < busy_ns <= elapsed_ns, "two at once are not two in turn"
    assert exposed_ns < busy_ns - 0.15e9


def test_overlapping_spans_count_once() -> None:
    from stepscope.parallel.clocks import _union_ns

    assert _union_ns([(0, 10), (5, 15), (20, 30), (22, 25)]) == 25
