"""Times the steps of a loop without a profiler, and how long each waits for input, runs backward and the optimizer.

On a GPU the CPU runs ahead by any number of steps, so its clock says nothing about a single step: CUDA events at the
boundaries do, without waiting for anything. The CPU's time for each part is scaled to them, so that the parts add up to
the step; once the queue of kernels is full, both clocks run at the same pace.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from stepscope.measure.soundness import MachineWatch, doubt_spread
from stepscope.measure.timing import elapsed_ns, make_event
from stepscope.recording.rows.bench import Doubt

PARTS = ("input", "backward", "optimizer")
REST = "other"


@dataclass(kw_only=True)
class _Sample:
    began_ns: int
    parts_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    host_ns: int = 0
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def step_ns(self) -> int:
        return elapsed_ns(*self.events) if self.events else self.host_ns

    def phases_ns(self) -> dict[str, int]:
        step_ns = self.step_ns()
        scale = step_ns / max(1, self.host_ns)
        parts = {name: min(step_ns, round(spent_ns * scale)) for name, spent_ns in self.parts_ns.items()}
        return {**parts, REST: max(0, step_ns - sum(parts.values()))}


class LoopClock:
    """`start` and `stop` are called at every boundary; they cost nothing outside `timing`."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._current: _Sample | None = None
        self._first_event: torch.cuda.Event | None = None
        self._samples: list[_Sample] = []
        self._watch: MachineWatch | None = None
        self._doubts: list[Doubt] = []

    @property
    def kind(self) -> str:
        return "cuda events" if any(sample.events for sample in self._samples) else "host"

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        self._device, self._watch = device, MachineWatch(device)
        try:
            yield
        finally:
            self._doubts, self._device = self._watch.doubts(), None

    def start(self) -> None:
        if self._device is None:
            return
        self._first_event = self._mark()
        self._current = _Sample(began_ns=time.perf_counter_ns())

    def stop(self) -> None:
        now_ns, sample, self._current = time.perf_counter_ns(), self._current, None
        if sample is None:
            return
        sample.host_ns = now_ns - sample.began_ns
        if self._first_event is not None:
            last = self._mark()
            assert last is not None
            sample.events = (self._first_event, last)
        self._samples.append(sample)
        if self._watch is not None:
            self._watch.look()

    def add(self, part: str, spent_ns: int) -> None:
        if self._current is not None:
            self._current.parts_ns[part] += spent_ns

    def phases_ns(self) -> dict[str, tuple[int, ...]]:
        """One entry per phase and step."""
        self._wait()
        phases = [sample.phases_ns() for sample in self._samples]
        return {name: tuple(one[name] for one in phases) for name in (*PARTS, REST)} if phases else {}

    def doubts(self) -> tuple[Doubt, ...]:
        self._wait()
        return (*self._doubts, *doubt_spread([sample.step_ns() for sample in self._samples], of="steps"))

    def _mark(self) -> torch.cuda.Event | None:
        if self._device is None or self._device.type != "cuda":
            return None
        event = make_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _wait(self) -> None:
        for sample in self._samples[-1:]:
            if sample.events is not None:
                sample.events[1].synchronize()
