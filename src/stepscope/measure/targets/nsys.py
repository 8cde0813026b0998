"""The program that runs under `nsys profile`: one case, a few annotated steps between cudaProfilerStart and Stop.

    python -P -m stepscope.measure.targets.nsys REQUEST.json

Nsight Systems writes its own recording; our own measurements go to `jobs.recorders.nsight_systems`, which does not
import torch. Neither does this file until it runs.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.measure.targets import TargetFailed, profiled_range, serve
from stepscope.recording.rows.bench import Environment, RecordedRun
from stepscope.spec import Case


class NsysRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`emit_operators` adds PyTorch's operators to the recording; off if nsys was asked to do so itself."""

    case: Case
    functions: tuple[str, ...] = ()
    record_steps: int = 3
    emit_operators: bool = True


class NsysRecorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded"):
    run: RecordedRun
    environment: Environment


NsysAnswer = NsysRecorded | TargetFailed


def main(arguments: list[str]) -> int:
    return serve("stepscope.measure.targets.nsys", arguments, _record_requested)


def _record_requested(path: Path) -> NsysRecorded:
    return record(msgspec.json.decode(path.read_bytes(), type=NsysRequest))


def record(request: NsysRequest) -> NsysRecorded:
    """Run the case; nsys records what happens between the profiler's start and stop."""
    import torch
    from torch.autograd.profiler import emit_nvtx

    from stepscope.measure.environment import check_torch, describe, resolve_device
    from stepscope.measure.profiler import describe_gaps, prepare, time_plainly
    from stepscope.measure.timing import time_steps
    from stepscope.step.annotation import annotated, check_functions

    check_torch()
    case = request.case
    device = resolve_device(case.workload.device)
    if device.type != "cuda":
        raise StepscopeError(
            f"Nsight Systems requires CUDA; device `{case.workload.device}` is the CPU here",
            detail=f"torch {torch.__version__} sees no GPU" if not torch.cuda.is_available() else "a GPU is available",
            hint="to record on a CPU with PyTorch's profiler, remove --nsys: stepscope profile",
        )
    check_functions(request.functions, case.workload)
    step = prepare(case, device, lambda _: None)
    plain, doubts = time_plainly(step, case)

    def record_steps(count: int) -> tuple[list[int], set[str]]:
        # Shapes, and for every backward operator the number of the node that it evaluates.
        operators = emit_nvtx(record_shapes=True) if request.emit_operators else nullcontext()  # type: ignore[no-untyped-call]
        with operators, annotated(step, functions=request.functions, backend="nvtx") as annotation:
            samples = time_steps(step, count)
        return samples.step_ns, annotation.uncalled

    record_steps(1)  # the first step with ranges loads the libraries that create them
    with profiled_range(device):
        annotated_ns, uncalled = record_steps(request.record_steps)
    run = RecordedRun(
        clock="cuda events",
        phases_ns={name: tuple(values) for name, values in plain.phases_ns.items()},
        step_ns=tuple(plain.step_ns),
        recorded_step_ns=(),
        annotated_step_ns=tuple(annotated_ns),
        parameters=step.parameters,
        sizes=step.sizes,
        optimizer=step.optimizer_name,
        doubts=doubts,
        notes=describe_gaps(step, uncalled),
    )
    return NsysRecorded(run=run, environment=describe(device, {case.workload.precision}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
