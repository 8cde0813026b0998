"""The program that runs under `ncu`: one case, one or a few forward passes between cudaProfilerStart and Stop.

    python -P -m stepscope.measure.targets.ncu REQUEST.json

Nothing is annotated and no other profiler runs: the counted kernels are those of the bare model. Torch is imported only
when it runs, because `jobs.recorders.nsight_compute` reads the types below without it.

Nsight Compute prints nothing until its end when it writes CSV. Its progress shows in PyTorch's allocator: the CPU waits
for every kernel while it is counted, so a thread that compares the number of tensors allocated so far with that of the
previous pass knows the completed share. Module hooks would give names, but would be compiled too.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.measure.targets import TargetFailed, profiled_range, serve
from stepscope.recording.rows.bench import Environment
from stepscope.spec import Case

if TYPE_CHECKING:
    import torch

MOST_LAYERS = 12
_LOOK_S = 0.5


class NcuRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`case.timing.steps` passes are counted."""

    case: Case


class NcuCounted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """`forward_flops` holds the theoretical FLOPs of the operators of one pass, by kernel class: two per multiply-add,
    and the full square of attention.
    """

    environment: Environment
    parameters: int
    optimizer: str | None
    forward_flops: dict[str, int]


NcuAnswer = NcuCounted | TargetFailed


def progress_path(request: Path) -> Path:
    return request.with_suffix(".progress")


def too_many_layers(layers: int, hint: str) -> StepscopeError:
    return StepscopeError(
        f"too many layers for hardware counters: `{layers}`",
        detail=f"expected at most {MOST_LAYERS}: Nsight Compute takes 0.2 to 0.5 s per kernel, and further layers "
        "add nothing new",
        hint=hint,
    )


def main(arguments: list[str]) -> int:
    return serve("stepscope.measure.targets.ncu", arguments, _count_requested)


def _count_requested(path: Path) -> NcuCounted:
    request = msgspec.json.decode(path.read_bytes(), type=NcuRequest)
    return count(request.case, progress_path(path))


def count(case: Case, progress: Path) -> NcuCounted:
    """Run the case; ncu counts the kernels between the profiler's start and stop."""
    import torch

    from stepscope.measure.environment import check_torch, describe, resolve_device
    from stepscope.measure.flops import count_operations
    from stepscope.measure.profiler import prepare

    check_torch()
    device = resolve_device(case.workload.device)
    if device.type != "cuda":
        raise no_gpu(case.workload.device)
    step = prepare(case, device, lambda stage: _tell(progress, stage))
    check_layers(step.module)
    forward_flops = count_operations(step)
    before = _tensors_made(device)
    step.run()
    torch.cuda.synchronize(device)
    expected = (_tensors_made(device) - before) * case.timing.steps
    with _telling_share(device, expected, progress), profiled_range(device):
        for _ in range(case.timing.steps):
            step.run()
    return NcuCounted(
        environment=describe(device, {case.workload.precision}),
        parameters=step.parameters,
        optimizer=step.optimizer_name,
        forward_flops=forward_flops,
    )


def no_gpu(device: str) -> StepscopeError:
    return StepscopeError(
        f"hardware counters require a GPU; device `{device}` is the CPU here",
        hint="to record on a CPU with PyTorch's profiler, remove --counters: stepscope profile",
    )


def check_layers(module: "torch.nn.Module") -> None:
    """The built-in model's layers are known before anything runs; those of other models once they are built."""
    from stepscope.step.checkpointing import repeated_blocks

    layers = sum(1 for _ in repeated_blocks(module))
    if layers > MOST_LAYERS:
        raise too_many_layers(
            layers, "use fewer layers, such as --set num_hidden_layers=2 (the name depends on the model)"
        )


def _tensors_made(device: "torch.device") -> int:
    import torch

    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))


@contextmanager
def _telling_share(device: "torch.device", expected: int, progress: Path) -> Iterator[None]:
    """Meanwhile, a thread reports how much of the counted passes is done."""
    before = _tensors_made(device)
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_LOOK_S):
            _tell(progress, f"counting, {(_tensors_made(device) - before) / max(1, expected):.0%} of the pass")

    _tell(progress, "counting")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _tell(progress, "waiting for ncu to write")


def _tell(progress: Path, stage: str) -> None:
    with suppress(OSError):  # a full disk will be noticed by those who have more to write
        progress.write_text(stage)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
