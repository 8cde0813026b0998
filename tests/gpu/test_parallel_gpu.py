"""Strategies on a GPU: several gloo ranks that share it, through CPU memory, and one NCCL rank."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.parallel import DDP, FSDP, Communicator
from stepscope.parallel.journal import FOLDER_VARIABLE
from stepscope.recording.rows.checkpoints import FOLDER_NAME, newest
from stepscope.recording.rows.training_log import LOG_NAME, TrainMemory, TrainRow, read_log, read_memory
from stepscope.spec import ModelShape, Training, Workload
from tests.cpu.parallel.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPE = ModelShape(d_model=128, d_ff=256, num_layers=4, num_heads=4, num_kv_heads=4, vocab=512)
PLAIN = Training(
    workload=Workload(model=SHAPE, batch=8, context=64, device="cuda"), steps=10, save_every=10, learning_rate=1e-3
)
WAYS: list[dict[str, Any]] = [
    {"strategy": "naive"},
    {"strategy": "flat"},
    {"strategy": "overlap"},
    {"strategy": "bucketed", "bucket_mb": 0.5},
    {"strategy": "bucketed", "shard_optimizer": True},
    {"strategy": "fsdp"},
]


class Silence:
    def resumed(self, step: int) -> None: ...

    def stepped(self, row: TrainRow) -> None: ...

    def saved(self, step: int) -> None: ...

    def accounted(self, memory: tuple[TrainMemory, ...]) -> None: ...


def _be_deterministic() -> None:
    """The backward pass of an embedding uses atomics by default, in a different order every time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(mode=True)


def _train(rank: int, world: int, trainings: list[Training], folder: Path) -> None:
    from stepscope.measure.training import train

    _be_deterministic()
    for number, training in enumerate(trainings):
        os.environ[FOLDER_VARIABLE] = str(folder / str(number) / "journal")
        where = folder / str(number)
        train(training, where, Communicator(), device="cuda", command="test", listener=Silence())


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found = newest(folder / FOLDER_NAME)
    assert found is not None
    weights: dict[str, torch.Tensor] = torch.load(found.path, weights_only=True)["model"]
    return weights


def _distance(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    parts = [(ours[name].double() - truth[name].double()).norm() for name in truth]
    return float(torch.stack(parts).norm())


def _single(folder: Path, **more: object) -> dict[str, torch.Tensor]:
    run_ranks(_train, 1, [msgspec.structs.replace(PLAIN, **more)], folder)
    return _weights(folder / "0")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu_train_like_one_process(world: int, tmp_path: Path) -> None:
    """Compared with one process that accumulates the ranks' parts of the batch, in the same order of sums for two
    ranks; no strategy may be further from it than whole-batch training is.
    """
    parts = _single(tmp_path / "parts", accumulate=world)
    whole = _single(tmp_path / "whole")
    trainings = [msgspec.structs.replace(PLAIN, ranks=world, **way) for way in WAYS]
    run_ranks(_train, world, trainings, tmp_path, timeout_s=240)
    limit = 2 * _distance(whole, parts)
    assert limit > 0
    for number, way in enumerate(WAYS):
        assert _distance(_weights(tmp_path / str(number)), parts) <= limit, way


def test_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """State saved in CPU memory moves to where the optimizer needs it, including `fused`."""
    workload = msgspec.structs.replace(PLAIN.workload, optimizer="adamw-fused")
    whole = [msgspec.structs.replace(PLAIN, workload=workload, ranks=2, **way) for way in WAYS]
    run_ranks(_train, 2, whole, tmp_path / "whole", timeout_s=240)
    run_ranks(_train, 2, [msgspec.structs.replace(one, steps=5) for one in whole], tmp_path / "parts", timeout_s=240)
    run_ranks(_train, 2, whole, tmp_path / "parts", timeout_s=240)
    for number, way in enumerate(WAYS):
        resumed, undisturbed = (_weights(tmp_path / part / str(number)) for part in ("parts", "whole"))
        for name, weight in undisturbed.items():
            assert torch.equal(resumed[name], weight), (way, name)


def test_bf16_trains_under_every_strategy(tmp_path: Path) -> None:
    half = msgspec.structs.replace(PLAIN, workload=msgspec.structs.replace(PLAIN.workload, precision="bf16"))
    trainings = [msgspec.structs.replace(half, ranks=2, **way) for way in WAYS]
    run_ranks(_train, 2, trainings, tmp_path, timeout_s=240)
    for number, way in enumerate(WAYS):
        rows, _ = read_log(tmp_path / str(number) / LOG_NAME)
        assert rows[-1].loss < rows[0].loss, way
        for weight in _weights(tmp_path / str(number)).values():
            assert weight.dtype == torch.float32


def _nccl(rank: int, world: int, folder: Path) -> list[tuple[int, int]]:
    """Joins NCCL in addition to the gloo group that the harness created."""
    from stepscope.measure.training import train

    _be_deterministic()
    os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"  # here, because ranks are forked from a server that started earlier
    group = torch.distributed.new_group(backend="nccl")
    taken = []
    for number, way in enumerate(WAYS):
        where = folder / str(number)
        training = msgspec.structs.replace(PLAIN, **way)
        train(training, where, Communicator(group), device="cuda", command="test", listener=Silence())
        rows, _ = read_log(where / LOG_NAME)
        taken.append((max(row.communication_ns[0] for row in rows), max(row.exposed_ns[0] for row in rows)))
    return taken


def test_one_nccl_rank_matches_one_process(tmp_path: Path) -> None:
    alone = _single(tmp_path / "alone")
    (taken,) = run_ranks(_nccl, 1, tmp_path, timeout_s=240)
    for number, way in enumerate(WAYS):
        weights = _weights(tmp_path / str(number))
        for name, weight in alone.items():
            assert torch.equal(weights[name], weight), (way, name)
        busy_ns, exposed_ns = taken[number]
        assert busy_ns > 0, way
        assert exposed_ns > 0, way


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _measure_peak(rank: int, world: int) -> tuple[int, int, int, int]:
    """FSDP's parameters in CUDA's allocator: with nothing gathered, and at the peak of a forward pass."""
    torch.cuda.set_device(0)
    sharded = FSDP(Chain().cuda())
    x = torch.ones(1, 1024, device="cuda")
    with torch.no_grad():
        sharded(x)
        torch.cuda.synchronize()
        idle = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sharded(x)
    peak = torch.cuda.max_memory_allocated()
    return idle, peak, sharded.ledger.peak_bytes, sharded.ledger.live_bytes


def test_fsdp_holds_its_shard_and_at_most_two_layers() -> None:
    layer = 1024 * 1024 * 4
    for idle, peak, gathered, live in run_ranks(_measure_peak, 2, timeout_s=120):
        assert gathered <= 2 * layer
        assert live <= gathered
        assert peak - (idle - live) <= 2 * layer + 2**20  # and activations of a kilobyte each


def _wrap_cuda(rank: int, world: int) -> list[float]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4, bias=False, device="cuda")
    ddp = DDP(model, "bucketed")
    (ddp(torch.full((2, 4), float(rank + 1), device="cuda")).sum()).backward()
    ddp.finish_gradient_synchronization()
    assert model.weight.grad is not None
    return [*model.weight.flatten().tolist(), *model.weight.grad.flatten().tolist()]


def test_ranks_start_and_end_with_the_same_values() -> None:
    first, second = run_ranks(_wrap_cuda, 2)
    assert first == second
    assert first[16:] == [3.0] * 16


def test_memory_matches_the_allocator(tmp_path: Path) -> None:
    run_ranks(_train, 2, [msgspec.structs.replace(PLAIN, ranks=2, strategy="fsdp", steps=1)], tmp_path)
    for row in read_memory(tmp_path / "0"):
        assert row.peak >= row.parameters + row.gradients + row.optimizer
