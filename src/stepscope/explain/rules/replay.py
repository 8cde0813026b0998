"""What if: the recording run again, with kernels that take less time or are not there.

Less GPU time is not a shorter step. Where the device waits for the host, a faster kernel only waits longer, and a
kernel that is never launched saves the host's time instead. So a saving is not added up but replayed, by three rules: a
kernel starts when the host has launched it and what it waited for on the device is done; the host goes on after each
launch as fast as it did; where it waited for the device, it goes on when the device is done.

A kernel is taken to wait for the one before it on its stream and for the last one to end anywhere before it started:
the recording does not say which events a stream waits for. Without changes the replay gives the recording's own times.

A recorder slows the host down and leaves the device as it is. Where the step was also timed without the recorder,
the host's time between launches is scaled until the replay takes as long as that. Where the device was the limit, many
paces of the host explain that time; the slowest usual one is taken, so that a step which becomes bound by the host is
not promised to be shorter than it may be.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

USUAL_LATENCY_NS = 5_000  # from the call to the start of its kernel on an idle device
SHORT_GAP_NS = 1_000  # between two kernels of which the second was waiting
NEVER = -1
LONG_GAP_NS = 1_000_000  # a host that launches nothing for so long does something else than launching
_LAUNCH, _KERNEL, _WAIT = 0, 1, 2
_FASTEST_SCALE = 0.3
# The slow end of what a host needs without our recorder: 0.36 to 0.66 of its recorded time, in six recordings in which
# the host was the limit (H200).
_USUAL_SCALE, _FLAT = 0.6, 0.98
_HALVINGS = 6  # to 1 % of the recorded pace
# Steps that the device limits, timed twice, differed by 0.2 and 0.3 % (H200); a replay is not taken to be that exact.
_CLOSE = 1.01


@dataclass(slots=True, kw_only=True)
class Change:
    """One entry a kernel: its new time, whether it is gone, and the share of the host's time before its launch that
    stays. What goes may leave host time behind: a fused call costs the host more than one of the launches it replaces.
    """

    duration_ns: Floats
    removed: Bools
    host_share: Floats
    skipped_waits: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """`kernels` (start_ns, end_ns, stream, launch_ns) in the order of their start, `waits` in that of their end."""

    kernels: pl.DataFrame
    waits: pl.DataFrame
    begin_ns: int

    @cached_property
    def start(self) -> Ints:
        return self.kernels["start_ns"].to_numpy()

    @cached_property
    def end(self) -> Ints:
        return self.kernels["end_ns"].to_numpy()

    @cached_property
    def launch(self) -> Ints:
        """When the host asked for each kernel, `NEVER` where that is not known."""
        known = self.kernels["launch_ns"].fill_null(NEVER).to_numpy()
        return np.where(known > self.start, NEVER, known)  # clocks that disagree say nothing

    def unchanged(self) -> Change:
        return Change(
            duration_ns=(self.end - self.start).astype(np.float64),
            removed=np.zeros(len(self.start), dtype=np.bool_),
            host_share=np.ones(len(self.start)),
        )

    @cached_property
    def waited_for(self) -> tuple[Ints, Ints]:
        """Per kernel, the one before it on its stream and the last one to end before it; `NEVER` without one."""
        before_on_stream = np.full(len(self.start), NEVER, np.int64)
        last: dict[int, int] = {}
        for row, stream in enumerate(self.kernels["stream"].to_list()):
            before_on_stream[row] = last.get(stream, NEVER)
            last[stream] = row
        by_end = np.argsort(self.end, kind="stable")
        place = np.searchsorted(self.end[by_end], self.start, side="right") - 1
        ended = np.where(place >= 0, by_end[place], NEVER)
        # What has no length may end at its own start.
        return before_on_stream, np.where(ended < np.arange(len(ended)), ended, before_on_stream)

    @cached_property
    def waited_for_rows(self) -> tuple[list[int], list[int]]:
        before_on_stream, last_ended = self.waited_for
        return before_on_stream.tolist(), last_ended.tolist()

    @cached_property
    def ready(self) -> Ints:
        """When what each kernel waited for was done."""
        both = [np.where(rows == NEVER, self.begin_ns, self.end[rows]) for rows in self.waited_for]
        return np.minimum(np.maximum(*both), self.start)

    @cached_property
    def starved(self) -> Bools:
        """The kernels that started late because they were launched late."""
        known = self.launch != NEVER
        late = known & (self.launch >= self.ready)
        latency = self.latency_ns
        soon = known & (self.start - self.launch <= 2 * latency)
        result: Bools = (late | soon) & (self.start - self.ready > SHORT_GAP_NS)
        return result

    @cached_property
    def latency_ns(self) -> float:
        late = (self.launch != NEVER) & (self.launch >= self.ready)
        if not late.any():
            return USUAL_LATENCY_NS
        return float(np.clip(np.median((self.start - self.launch)[late]), 1_000, 20_000))

    @cached_property
    def is_launching(self) -> Bools:
        """The kernels before whose launch the host did nothing for long but launch."""
        order = np.argsort(self.launch, kind="stable")
        spent = np.diff(self.launch[order], prepend=self.begin_ns)
        result = np.zeros(len(order), dtype=np.bool_)
        result[order] = spent <= LONG_GAP_NS
        result &= self.launch != NEVER
        return result

    @cached_property
    def delays(self) -> tuple[list[float], list[float]]:
        """Per kernel: from its launch to its start, and from what it waited for to its start."""
        since_launch, since_ready = (self.start - self.launch).astype(float), (self.start - self.ready).astype(float)
        latency = np.where(self.starved, since_launch, np.minimum(since_launch, self.latency_ns))
        gap = np.where(self.starved, np.minimum(since_ready, SHORT_GAP_NS), since_ready)
        return latency.tolist(), gap.tolist()

    @cached_property
    def events(self) -> list[tuple[int, int, int]]:
        """Everything in the order of time: (moment, kind, row)."""
        events = [(moment, _KERNEL, row) for row, moment in enumerate(self.start.tolist())]
        events += [(moment, _LAUNCH, row) for row, moment in enumerate(self.launch.tolist()) if moment != NEVER]
        events += [(moment, _WAIT, row) for row, moment in enumerate(self.waits["end_ns"].to_list())]
        return sorted(events)

    @cached_property
    def wait_rows(self) -> list[tuple[int, int, int]]:
        """Per wait: its start, its end, and the kernel whose end it waited for."""
        by_end = np.argsort(self.end, kind="stable")
        starts, ends = self.waits["start_ns"].to_numpy(), self.waits["end_ns"].to_numpy()
        place = np.searchsorted(self.end[by_end], ends, side="right") - 1
        rows = np.where(place >= 0, by_end[place], NEVER)
        return list(zip(starts.tolist(), ends.tolist(), rows.tolist(), strict=True))

    def run(self, change: Change, *, host_scale: float = 1.0) -> float:
        """How long all of it takes, in nanoseconds."""
        begin = min(self.begin_ns, self.events[0][0])
        host = float(begin)
        seen = float(begin)  # the host's clock in the recording
        # A kernel without a known launch waits for none; the entry at `NEVER`, the last, stands for no kernel.
        launched = [-math.inf] * len(self.start)
        ended = [float(begin)] * (len(self.start) + 1)
        before, last_ended = self.waited_for_rows
        latency, gap = self.delays
        duration, removed = change.duration_ns.tolist(), change.removed.tolist()
        share = (change.host_share * host_scale).tolist()
        # Comparisons in place of max(), here where all the time goes: 0.4 µs a kernel in place of 1.1.
        for moment, kind, row in self.events:
            if kind == _KERNEL:
                start, other = ended[before[row]], ended[last_ended[row]]
                if other > start:
                    start = other
                if not removed[row]:
                    start += gap[row]
                    called = launched[row] + latency[row]
                    if called > start:
                        start = called
                    start += duration[row]
                ended[row] = start
            elif kind == _LAUNCH:
                if moment > seen:
                    spent = moment - seen
                    # What kept the host away for milliseconds was not this kernel, and stays when it goes.
                    host += spent * (host_scale if removed[row] and spent > LONG_GAP_NS else share[row])
                    seen = moment
                launched[row] = host
            else:
                start_ns, end_ns, done = self.wait_rows[row]
                host += host_scale * max(0.0, start_ns - seen)
                if row not in change.skipped_waits:
                    if done != NEVER:
                        host = max(host, ended[done])
                        start_ns = max(start_ns, min(int(self.end[done]), end_ns))
                    host += host_scale * max(0.0, end_ns - max(start_ns, seen))
                seen = max(seen, end_ns)
        return max(host, max(ended)) - begin

    def calibrate(self, wanted_ns: float) -> float:
        """The largest scale of the host's time, at most 1, at which the unchanged recording takes `wanted_ns`."""
        change, most = self.unchanged(), wanted_ns * _CLOSE
        if self.run(change) <= most:
            return 1.0
        if self.run(change, host_scale=_FASTEST_SCALE) > most:
            return _USUAL_SCALE  # the device itself was slower: the host's share cannot be told
        low, high = _FASTEST_SCALE, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.run(change, host_scale=middle) <= most else (low, middle)
        if low > _USUAL_SCALE and self.run(change, host_scale=_USUAL_SCALE) >= wanted_ns * _FLAT:
            return _USUAL_SCALE  # the host hardly matters to the step's time, which so says nothing about the host
        return low
