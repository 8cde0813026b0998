"""One attention implementation at many shapes: correctness first, then memory, then time.

The cases of one implementation share a process, so that the GPU context, library handles and compiled kernels are
created once. State that a case leaves behind is reset, or ends the process: running out of memory leaves the allocator
intact, but after any other failure on a GPU nothing in the process can be trusted, so it is not caught here.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from stepscope.cost.attention import need_of_attention
from stepscope.kernels.attention.problem import UnsupportedError
from stepscope.measure.attention.memory import weigh
from stepscope.measure.attention.problem import check, make_problem, say_wrong
from stepscope.measure.attention.timing import TimedRepetitions, time_attention
from stepscope.measure.failures import is_out_of_memory, say_in_a_line
from stepscope.measure.memory.limits import limit_memory
from stepscope.measure.soundness import MachineWatch, doubt_spread
from stepscope.recording.rows.attention_case import NOT_TRIED, AttentionCase, AttentionMeasurement, AttentionOutcome
from stepscope.recording.rows.bench import Doubt
from stepscope.units import GIB

Stage = Literal["checking", "weighing", "timing"]
OnStage = Callable[[Stage], None]

# A case that needs this many times the available memory is not attempted. On CUDA an attempt is cheap and the formulas
# have their limits; Linux overcommits CPU memory, and then kills the process.
HOPELESS_ON_CUDA, HOPELESS_ON_CPU = 4, 1


def measure_cases(cases: Sequence[AttentionCase], *, on_stage: OnStage) -> Iterator[AttentionOutcome]:
    """Run the cases in turn, all of one implementation, device and memory limit. The process cannot be reused."""
    device, limit = torch.device(cases[0].device), cases[0].memory_limit
    assert len({(case.implementation, case.device, case.memory_limit) for case in cases}) == 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if limit is not None:
        limit_memory(device, limit)
    for case in cases:
        yield _measure_or_explain(case, device, on_stage=on_stage)
        _clean_up(case, device)


def _measure_or_explain(case: AttentionCase, device: torch.device, *, on_stage: OnStage) -> AttentionOutcome:
    """Failures that do not affect the cases after this one."""
    if hopeless := _say_hopeless(case, device):
        return AttentionOutcome(status="oom", reason=f"{NOT_TRIED}: {hopeless}")
    try:
        return _measure(case, device, on_stage)
    except UnsupportedError as error:
        return AttentionOutcome(status="unsupported", reason=str(error))
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return AttentionOutcome(status="oom", reason=say_in_a_line(error))


def _measure(case: AttentionCase, device: torch.device, on_stage: OnStage) -> AttentionOutcome:
    problem = make_problem(case, device)
    on_stage("checking")
    accuracies = check(problem)
    if wrong := say_wrong(accuracies):
        return AttentionOutcome(status="wrong", reason=wrong)
    on_stage("weighing")
    memory = weigh(problem)
    on_stage("timing")
    watch = MachineWatch(device)
    timed = time_attention(problem, repetitions=case.repetitions, seconds=case.seconds)
    watch.look()
    forward, backward, both = (one.samples_ns for one in timed)
    measurement = AttentionMeasurement(
        clock="cuda events" if device.type == "cuda" else "host",
        forward_ns=forward,
        backward_ns=backward,
        both_ns=both,
        memory=memory,
        accuracies=accuracies,
    )
    return AttentionOutcome(status="ok", measurement=measurement, doubts=(*watch.doubts(), *_doubt(timed)))


def _doubt(timed: tuple[TimedRepetitions, TimedRepetitions, TimedRepetitions]) -> list[Doubt]:
    """At most one of each kind, for the worst of the three timings."""
    doubts = doubt_spread(*(one.samples_ns for one in timed), of="repetitions")
    if any(one.starved for one in timed):
        doubts.append(Doubt(code="host-bound", text="the GPU finished the last repetition as soon as it was launched"))
    return doubts


def _say_hopeless(case: AttentionCase, device: torch.device) -> str:
    """Return why a case is not attempted; empty if it is."""
    on_cuda = device.type == "cuda"
    there = torch.cuda.get_device_properties(device).total_memory if on_cuda else _host_bytes()
    need = need_of_attention(case).peak_bytes + 4 * case.tensor_bytes
    if need <= (HOPELESS_ON_CUDA if on_cuda else HOPELESS_ON_CPU) * there:
        return ""
    return f"needs an estimated {need / GIB:,.0f} GiB; {there / GIB:,.0f} GiB available"


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _clean_up(case: AttentionCase, device: torch.device) -> None:
    """Start each case from the same state: no tensors in reference cycles, an empty cache, and no shapes known to the
    compiler, which would otherwise assume that shapes vary, and which keeps a limited number of them.
    """
    if case.implementation == "compiled":
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
