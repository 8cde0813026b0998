"""Real ranks on a CPU, one of which is late in a known way: DDP or FSDP over gloo, recorded with PyTorch's profiler.

    python -m tests.cpu.late_ranks FOLDER,WORLD,LATE,FAULT,STRATEGY ...

FAULT is `input` (the dataset sleeps), `host` (the loop sleeps between steps), `logging` (it sleeps while it logs) or
`work` (more tokens per batch). The ranges are those that stepscope adds to a training loop.
All runs happen in one call, one after another: their ranks are forked from a process that has imported torch.
"""

import multiprocessing
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

SLEEP_S = 0.2  # far more than the hiccups of a busy machine
WARM_UP, STEPS = 2, 3
WIDTH, TOKENS, MORE_TOKENS, LAYERS = 128, 64, 2048, 3


class Tokens(Dataset[Tensor]):
    def __init__(self, *, length: int, sleep_s: float) -> None:
        self.length, self.sleep_s = length, sleep_s

    def __len__(self) -> int:
        return WARM_UP + STEPS

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.sleep_s)
        return torch.full((self.length, WIDTH), 0.1 * index)


def named(name: str) -> AbstractContextManager[object]:
    return torch._C._profiler._RecordFunctionFast(name, (), {"scope": "user_scope"})


def make_model(strategy: str) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def train(folder: Path, rank: int, world: int, late: int, fault: str, strategy: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    is_late = rank == late
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    length = MORE_TOKENS if is_late and fault == "work" else TOKENS
    data = Tokens(length=length, sleep_s=SLEEP_S if is_late and fault == "input" else 0.0)
    batches = iter(DataLoader(data, batch_size=1))
    recorder = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            recorder.start()
        with named(f"step:{step}") if step >= WARM_UP else nullcontext():
            with named("phase:input"):
                batch = next(batches)
            loss = model(batch).square().mean()
            with named("phase:backward"):
                loss.backward()
            with named("phase:optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            if is_late and fault == "host":
                time.sleep(SLEEP_S)
            with named("phase:logging"):
                if is_late and fault == "logging":
                    time.sleep(SLEEP_S)
    recorder.stop()
    recorder.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(folder: Path, world: int, late: int, fault: str, strategy: str) -> bool:
    """Whether every rank ended well."""
    forking = multiprocessing.get_context("fork")
    processes = [
        forking.Process(target=train, args=(folder, rank, world, late, fault, strategy)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return not any(process.exitcode for process in processes)


if __name__ == "__main__":
    import torch._dynamo  # every optimizer does
    import torch.distributed.fsdp

    for argument in sys.argv[1:]:
        folder, world, late, fault, strategy = argument.split(",")
        if not run_ranks(Path(folder), int(world), int(late), fault, strategy):
            sys.exit(f"a rank failed: {argument}")
