"""The memory of attention, forward and backward, on top of its inputs.

It is measured after everything has run once, when libraries have their workspaces and the compiler is done. On CUDA the
numbers are the caching allocator's, from an empty cache. A CPU has no such allocator, and the resident set of the
process would bury a small case in noise; PyTorch's profiler reports every allocation and free of an operator, and those
are summed.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch._C._profiler import _EventType

from stepscope.measure.attention.problem import RandomAttention
from stepscope.measure.memory.recorder import profiling, results_of
from stepscope.recording.rows.attention_case import AttentionMemory


def weigh(problem: RandomAttention) -> AttentionMemory:
    input_bytes = sum(x.untyped_storage().nbytes() for x in (*problem.inputs, problem.upstream))
    if problem.q.device.type == "cuda":
        return _weigh_on_cuda(problem, input_bytes)
    return _weigh_on_cpu(problem, input_bytes)


def _weigh_on_cuda(problem: RandomAttention, input_bytes: int) -> AttentionMemory:
    device = problem.q.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    out_BHLD = problem.forward()
    torch.cuda.synchronize(device)
    kept, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    forward_peak = torch.cuda.max_memory_allocated(device)
    problem.backward(out_BHLD)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return AttentionMemory(
        counter="cuda allocator",
        input_bytes=input_bytes,
        before_backward_bytes=kept - start,
        forward_peak_bytes=forward_peak - start,
        peak_bytes=peak - start,
        before_backward_allocated_bytes=kept,
        before_backward_reserved_bytes=reserved,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def _weigh_on_cpu(problem: RandomAttention, input_bytes: int) -> AttentionMemory:
    with profiling() as profiler:
        out_BHLD = problem.forward()
    kept, forward_peak = _add_up(results_of(profiler))
    with profiling() as profiler:
        gradients = problem.backward(out_BHLD)
    _, backward_peak = _add_up(results_of(profiler))
    del gradients
    return AttentionMemory(
        counter="profiler",
        input_bytes=input_bytes,
        before_backward_bytes=kept,
        forward_peak_bytes=forward_peak,
        peak_bytes=max(forward_peak, kept + backward_peak),
    )


def _add_up(results: Any) -> tuple[int, int]:
    """Return the bytes still allocated, and the peak."""
    sizes = [size for _, size in sorted(_allocations(results))]
    totals = list(accumulate(sizes, initial=0))
    return totals[-1], max(totals)


def _allocations(results: Any) -> Iterator[tuple[int, int]]:
    """Time and size of each event; negative for a free."""
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        waiting.extend(event.children)
