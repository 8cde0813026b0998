"""The clock around attention: forward, backward, and the two as one, each timed by itself.

On CUDA an event before and one after, and a buffer larger than any second-level cache zeroed before each repetition, as
`triton.testing.do_bench` does it: what is timed begins with its inputs in main memory, and while the buffer is zeroed
the host gets ahead. Nothing waits until all repetitions are issued. Unlike `do_bench`, backward has a forward pass of
its own each time, off the clock: keeping one graph for all would hold memory that a training step gives back, and a
compiled backward refuses it.

On a CPU the host's clock, and no cache is emptied: there is no buffer that would be fair to all of them.
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
# The device was done this soon after the last repetition was issued: it was waiting for the host, not the other way.
_STARVED_NS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRepetitions:
    """Nanoseconds, one a repetition. `starved` when a GPU waited for its host."""

    samples_ns: tuple[int, ...]
    starved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What is on the clock, and what it needs that is not."""

    prepare: Callable[[], Any]
    run: Callable[[Any], object]


def time_attention(
    problem: RandomAttention, *, repetitions: int, seconds: float
) -> tuple[TimedRepetitions, TimedRepetitions, TimedRepetitions]:
    """Forward, backward and both: so many repetitions, or as many as take so many seconds, but a few at least."""
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
    """The samples, and how much longer than the host the device had to work in the end."""
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
