"""Times attention: forward, backward, and both together, each timed separately.

On CUDA each repetition is between two events, and a buffer larger than any L2 cache is zeroed before it, as in
`triton.testing.do_bench`: the inputs start in main memory, and the CPU gets ahead while the buffer is zeroed. Nothing
waits until all repetitions are launched. Unlike `do_bench`, every backward pass has its own forward pass, outside the
timing: keeping one graph for all would hold memory that a training step frees, and a compiled backward refuses it.

On a CPU the wall clock is used, and no cache is flushed: no buffer would be fair to all of them.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.measure.attention.problem import RandomAttention
from stepscope.measure.timing import elapsed_ns, make_event

_WARMUPS = 3
_FEWEST = 5
_FLUSH_BYTES = 256 * 2**20
# If the device finishes this soon after the last launch, it was waiting for the CPU, not the other way round.
_STARVED_NS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRepetitions:
    """Nanoseconds, one entry per repetition. `starved` if a GPU waited for the CPU."""

    samples_ns: tuple[int, ...]
    starved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What is timed, and the untimed setup it needs."""

    prepare: Callable[[], Any]
    run: Callable[[Any], object]


def time_attention(
    problem: RandomAttention, *, repetitions: int, seconds: float
) -> tuple[TimedRepetitions, TimedRepetitions, TimedRepetitions]:
    """Time forward, backward and both: up to a number of repetitions or seconds, but at least a few."""
    pieces = (
        _Piece(prepare=lambda: None, run=lambda _: problem.forward()),
        _Piece(prepare=problem.forward, run=problem.backward),
        _Piece(prepare=lambda: None, run=lambda _: problem.backward(problem.forward())),
    )
    device = problem.q.device
    if device.type == "cuda":
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        forward, backward, both = (_time_on_cuda(piece, flush, repetitions, seconds) for piece in pieces)
    else:
        forward, backward, both = (_time_on_host(piece, repetitions, seconds) for piece in pieces)
    return forward, backward, both


def _time_on_host(piece: _Piece, repetitions: int, seconds: float) -> TimedRepetitions:
    piece.run(piece.prepare())
    samples: list[int] = []
    while len(samples) < repetitions and (len(samples) < _FEWEST or sum(samples) < seconds * 1e9):
        ready = piece.prepare()
        start = time.perf_counter_ns()
        piece.run(ready)
        samples.append(time.perf_counter_ns() - start)
    return TimedRepetitions(samples_ns=tuple(samples))


def _time_on_cuda(piece: _Piece, flush: torch.Tensor, repetitions: int, seconds: float) -> TimedRepetitions:
    guesses, _ = _repeat(piece, flush, _WARMUPS)
    fitting = math.ceil(seconds * 1e9 / max(1, min(guesses)))
    samples, lag_ns = _repeat(piece, flush, max(min(repetitions, fitting), min(repetitions, _FEWEST)))
    return TimedRepetitions(samples_ns=samples, starved=lag_ns < _STARVED_NS)


def _repeat(piece: _Piece, flush: torch.Tensor, count: int) -> tuple[tuple[int, ...], int]:
    """Return the samples, and how long the device kept working after the last launch."""
    starts, ends = [make_event() for _ in range(count)], [make_event() for _ in range(count)]
    torch.cuda.synchronize(flush.device)
    for start, end in zip(starts, ends, strict=True):
        ready = piece.prepare()
        flush.zero_()
        start.record()
        piece.run(ready)
        end.record()
        del ready
    issued = time.perf_counter_ns()
    torch.cuda.synchronize(flush.device)
    lag_ns = time.perf_counter_ns() - issued
    return tuple(elapsed_ns(start, end) for start, end in zip(starts, ends, strict=True)), lag_ns
