"""Joining and leaving a process group.

Ranks that we start meet through a file, so no port can be in use. Ranks started by `torchrun` or `srun` use environment
variables.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stepscope.errors import StepscopeError
from stepscope.parallel.communicator import Communicator
from stepscope.units import count_noun

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def join(
    *, backend: str, timeout_s: float, meeting: Path | None = None, rank: int = 0, world: int = 1
) -> Iterator[Communicator]:
    """Join the ranks that meet at a file or, without one, through environment variables. A collective that exceeds
    `timeout_s` fails on every rank that waits for it.
    """
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    timeout = timedelta(seconds=timeout_s)
    if meeting is not None:
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)
    else:
        _check_environment()
        _init_from_environment(backend, timeout)
    communicator = Communicator.default()
    try:
        yield communicator
    except BaseException as error:
        communicator.journal.leave(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        raise
    communicator.journal.leave()
    dist.destroy_process_group()


def _init_from_environment(backend: str, timeout: timedelta) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise StepscopeError(
            f"the ranks could not connect at `{address}`",
            detail=str(error).splitlines()[0][:300],
            hint="use another port: MASTER_PORT=29501, or torchrun --master-port 29501",
        ) from None


def _check_environment() -> None:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise StepscopeError(
            f"environment variable `{missing[0]}` is not set",
            detail=f"a rank requires {', '.join(VARIABLES)}",
            hint="torchrun --nproc-per-node 2 -m stepscope train",
        )
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not rank.isdigit() or not world.isdigit() or int(rank) >= int(world):
        raise StepscopeError(
            f"invalid RANK `{rank}` for WORLD_SIZE `{world}`",
            detail="expected RANK to be a number below WORLD_SIZE",
            hint="torchrun --help",
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdigit() or int(port) > 65535:
        raise StepscopeError(
            f"invalid MASTER_PORT: `{port}`", detail="expected a number up to 65535", hint="MASTER_PORT=29500"
        )
    if rank == "0":
        _check_port(int(port))


def _check_port(port: int) -> None:
    """Check before torch waits for its whole timeout. Under torchrun, the agent itself holds the store on that port."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise StepscopeError(
                f"cannot listen on port `{port}`: {error.strerror}",
                detail="rank 0 listens there for the other ranks",
                hint=f"MASTER_PORT={port + 1}",
            ) from None


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """Return a rank's device: one GPU per rank, shared if there are fewer, unless the device has an index."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name in ("auto", "cuda"):
        return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    return torch.device(name)


def choose_backend(name: str, device: str, world: int) -> str:
    """`auto` is NCCL on GPUs and gloo on a CPU. NCCL requires one GPU per rank, which is checked here for a better
    error.
    """
    on_gpu = choose_device(device, local_rank=0).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise StepscopeError(f"device not found: `{device}`", detail="torch sees no CUDA device", hint="--device cpu")
    if name == "nccl" and not on_gpu:
        raise StepscopeError("backend `nccl` requires GPUs", detail="the ranks run on CPUs", hint="--backend gloo")
    if name == "gloo" or not on_gpu:
        return "gloo"
    local, count = int(os.environ.get("LOCAL_WORLD_SIZE", world)), torch.cuda.device_count()
    if local > count:
        raise StepscopeError(
            f"NCCL requires one GPU per rank: got `{local}` ranks and {count_noun(count, 'GPU')}",
            detail="with gloo, several ranks can share a GPU; it copies through CPU memory",
            hint=f"--ranks {count}, or --backend gloo",
        )
    return "nccl"
