"""How long collectives run, and how long a rank waits for them.

A clock starts at its first reading: code that never reads it pays nothing, and nothing accumulates.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from stepscope.parallel.exchange import Exchange


class Waitable(Protocol):
    """Anything with a `wait` method."""

    def wait(self) -> object: ...


class Span:
    """When a collective ran, in CPU nanoseconds; without an end, it is still running."""

    __slots__ = ("begin_ns", "end_ns")

    def __init__(self) -> None:
        self.begin_ns = time.perf_counter_ns()
        self.end_ns: int | None = None

    def close(self, _: object = None) -> None:
        if self.end_ns is None:
            self.end_ns = time.perf_counter_ns()


class HostClock:
    """For a backend whose `wait` blocks the CPU."""

    def __init__(self) -> None:
        self._runs = False
        self._spans: list[Span] = []
        self._exposed_ns = 0

    def begin(self, work: Waitable) -> Span | None:
        if not self._runs:
            return None
        span = Span()
        self._spans.append(span)
        if isinstance(work, dist.Work):
            work.get_future().add_done_callback(span.close)
        elif isinstance(work, Exchange):
            work.on_done(span.close)
        return span

    def wait(self, work: Waitable, span: Span | None) -> None:
        with self.standing_still():
            work.wait()
        if span is not None:
            span.close()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Time inside counts as waiting for a collective: nothing else can run meanwhile."""
        begin_ns = time.perf_counter_ns()
        yield
        self._exposed_ns += time.perf_counter_ns() - begin_ns

    def take(self) -> tuple[int, int]:
        """Communication time and waiting time since the last reading."""
        self._runs = True
        over = [(span.begin_ns, span.end_ns) for span in self._spans if span.end_ns is not None]
        self._spans = [span for span in self._spans if span.end_ns is None]
        exposed_ns, self._exposed_ns = self._exposed_ns, 0
        return _union_ns(over), exposed_ns


class CudaClock:
    """For NCCL, whose collectives run on their own stream: events measure how long the current stream waited, and NCCL
    reports how long each collective took (`TORCH_NCCL_ENABLE_TIMING`, which `group.join` sets).
    """

    def __init__(self) -> None:
        self._runs = False
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._works: list[dist.Work] = []

    def begin(self, work: Waitable) -> None:
        if self._runs and os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1":
            assert isinstance(work, dist.Work), "NCCL's own"
            self._works.append(work)

    def wait(self, work: Waitable, span: Span | None) -> None:  # noqa: ARG002  # as the other clock's
        if not self._runs:
            work.wait()
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        work.wait()
        after.record()
        self._waits.append((before, after))

    def take(self) -> tuple[int, int]:
        self._runs = True
        torch.cuda.synchronize()
        exposed_ms = sum(before.elapsed_time(after) for before, after in self._waits)
        busy_ms = sum(work._get_duration() for work in self._works)  # type: ignore[attr-defined]
        self._waits, self._works = [], []
        return round(busy_ms * 1e6), round(exposed_ms * 1e6)


def _union_ns(spans: list[tuple[int, int]]) -> int:
    """Return how long at least one of them was running."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total
