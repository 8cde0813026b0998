"""Replay a recording with kernels that are faster or gone, to estimate what a fix saves.

Less GPU time does not mean a shorter step. If the device waits for the CPU, a faster kernel only waits longer, and a
kernel that is never launched saves CPU time instead. Savings are therefore replayed, by three rules: a kernel starts
when the CPU has launched it and the work it depends on is done; after each launch the CPU continues at its recorded
speed; after a wait for the device it continues when the device is done.

A kernel is assumed to depend on the one before it on its stream, and on the last kernel anywhere that ended before it
started: the recording does not show which events a stream waits for. Without changes the replay reproduces the recorded
times.

A profiler slows the CPU down and leaves the device unchanged. If unprofiled steps were timed too, the CPU time between
launches is scaled until the replay takes as long as those. In a GPU-bound step many CPU speeds explain that time; the
replay uses the slowest usual one, so that it does not promise too much for a step that becomes CPU-bound.
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

USUAL_LATENCY_NS = 5_000  # from the launch call to the start of the kernel on an idle device
SHORT_GAP_NS = 1_000  # between two kernels, if the second was already waiting
NEVER = -1
LONG_GAP_NS = 1_000_000  # a CPU that launches nothing for so long is not busy with launching
_LAUNCH, _KERNEL, _WAIT = 0, 1, 2
_FASTEST_SCALE = 0.3
# The slow end of the CPU's unprofiled time: 0.36 to 0.66 of its profiled time, in six CPU-bound recordings (H200).
_USUAL_SCALE, _FLAT = 0.6, 0.98
_HALVINGS = 6  # to 1% of the recorded speed
# GPU-bound steps, timed twice, differed by 0.2 and 0.3% (H200); a replay is less exact than that.
_CLOSE = 1.01


@dataclass(slots=True, kw_only=True)
class Change:
    """What a fix changes, with one entry per kernel: its GPU time, whether its launch is removed, the kernel that does
    its work instead (`carrier`, itself if none does), and the share of the CPU time before its launch that remains.

    A fused group is one kernel that still runs and others that are removed and carried by it: each keeps its part of
    the fused time. A removed kernel may leave CPU time behind: a fused call costs more than one of the launches it
    replaces.
    """

    time_ns: Floats
    removed: Bools
    carrier: Ints
    host_share: Floats
    skipped_waits: set[int] = field(default_factory=set)

    @property
    def duration_ns(self) -> Floats:
        """The time of each kernel that still runs, including the work it carries."""
        result: Floats = np.bincount(self.carrier, weights=self.time_ns, minlength=len(self.carrier)).astype(np.float64)
        return result

    def joined(self, other: "Change") -> "Change":
        """Return both changes together. A kernel that both make faster takes the shorter of the two times: what two
        fixes remove of the same kernel is removed once. A kernel that carries others in one of them still runs."""
        rows = np.arange(len(self.carrier))
        carries = np.zeros(len(rows), dtype=np.bool_)
        carries[self.carrier[self.carrier != rows]] = True
        target = self.carrier[other.carrier]
        taken = other.removed & ~self.removed & ~carries & ((other.carrier == rows) | ~self.removed[target])
        kept = other.removed & ~self.removed & ~taken
        return Change(
            time_ns=np.minimum(self.time_ns, other.time_ns),
            removed=self.removed | taken,
            carrier=np.where(taken, np.where(other.carrier == rows, rows, target), self.carrier),
            host_share=np.where(kept, self.host_share, np.minimum(self.host_share, other.host_share)),
            skipped_waits=self.skipped_waits | other.skipped_waits,
        )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """`kernels` (start_ns, end_ns, stream, launch_ns) sorted by start, `waits` sorted by end."""

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
        """The launch time of each kernel, `NEVER` if unknown."""
        known = self.kernels["launch_ns"].fill_null(NEVER).to_numpy()
        return np.where(known > self.start, NEVER, known)  # ignore clocks that disagree

    def unchanged(self) -> Change:
        return Change(
            time_ns=(self.end - self.start).astype(np.float64),
            removed=np.zeros(len(self.start), dtype=np.bool_),
            carrier=np.arange(len(self.start)),
            host_share=np.ones(len(self.start)),
        )

    @cached_property
    def waited_for(self) -> tuple[Ints, Ints]:
        """Per kernel: the one before it on its stream, and the last one that ended before it; `NEVER` without one."""
        before_on_stream = np.full(len(self.start), NEVER, np.int64)
        last: dict[int, int] = {}
        for row, stream in enumerate(self.kernels["stream"].to_list()):
            before_on_stream[row] = last.get(stream, NEVER)
            last[stream] = row
        by_end = np.argsort(self.end, kind="stable")
        place = np.searchsorted(self.end[by_end], self.start, side="right") - 1
        ended = np.where(place >= 0, by_end[place], NEVER)
        # An empty kernel may end at its own start.
        return before_on_stream, np.where(ended < np.arange(len(ended)), ended, before_on_stream)

    @cached_property
    def waited_for_rows(self) -> tuple[list[int], list[int]]:
        before_on_stream, last_ended = self.waited_for
        return before_on_stream.tolist(), last_ended.tolist()

    @cached_property
    def ready(self) -> Ints:
        """When the work that each kernel depends on was done."""
        both = [np.where(rows == NEVER, self.begin_ns, self.end[rows]) for rows in self.waited_for]
        return np.minimum(np.maximum(*both), self.start)

    @cached_property
    def starved(self) -> Bools:
        """The kernels that started late because of a late launch."""
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
    def cpu_since(self) -> Ints:
        """Since when the CPU worked towards each launch: the launch or the end of the wait before it."""
        order = np.argsort(self.launch, kind="stable")
        before = np.empty_like(self.launch)
        before[order] = np.concatenate(([NEVER], self.launch[order][:-1]))
        ends = np.concatenate(([self.begin_ns], self.waits["end_ns"].to_numpy()))
        waited = ends[np.searchsorted(ends[1:], self.launch, side="right")]
        return np.minimum(np.maximum(before, waited), self.launch)

    @cached_property
    def is_launching(self) -> Bools:
        """The kernels whose launch did not follow a long stall of the CPU."""
        result: Bools = (self.launch - self.cpu_since <= LONG_GAP_NS) & (self.launch != NEVER)
        return result

    @cached_property
    def delays(self) -> tuple[list[float], list[float], list[float]]:
        """Per kernel: the delay from its launch to its start, the delay from the end of its dependencies to its start,
        and the part of the latter that no launch explains and that therefore stays without the kernel."""
        since_launch, since_ready = (self.start - self.launch).astype(float), (self.start - self.ready).astype(float)
        latency = np.where(self.starved, since_launch, np.minimum(since_launch, self.latency_ns))
        gap = np.where(self.starved, np.minimum(since_ready, SHORT_GAP_NS), since_ready)
        return latency.tolist(), gap.tolist(), np.maximum(0.0, gap - SHORT_GAP_NS).tolist()

    @cached_property
    def idle_before(self) -> Ints:
        """How long the device was idle before each kernel."""
        done = np.maximum.accumulate(np.concatenate(([self.begin_ns], self.end[:-1])))
        return np.maximum(0, self.start - done)

    @cached_property
    def events(self) -> list[tuple[int, int, int]]:
        """All events in order of time: (moment, kind, row)."""
        events = [(moment, _KERNEL, row) for row, moment in enumerate(self.start.tolist())]
        events += [(moment, _LAUNCH, row) for row, moment in enumerate(self.launch.tolist()) if moment != NEVER]
        events += [(moment, _WAIT, row) for row, moment in enumerate(self.waits["end_ns"].to_list())]
        return sorted(events)

    @cached_property
    def wait_rows(self) -> list[tuple[int, int, int, int]]:
        """Per wait: its start, the time in it at which the kernel it waited for ended, its end, and that kernel."""
        by_end = np.argsort(self.end, kind="stable")
        starts, ends = self.waits["start_ns"].to_numpy(), self.waits["end_ns"].to_numpy()
        place = np.searchsorted(self.end[by_end], ends, side="right") - 1
        rows = np.where(place >= 0, by_end[place], NEVER)
        released = np.where(rows == NEVER, starts, np.maximum(starts, self.end[rows]))
        return list(zip(starts.tolist(), released.tolist(), ends.tolist(), rows.tolist(), strict=True))

    def run(self, change: Change, *, host_scale: float = 1.0) -> float:
        """Return the total time in nanoseconds."""
        begin = min(self.begin_ns, self.events[0][0])
        host = float(begin)
        seen = float(begin)  # the CPU's clock in the recording
        # A kernel without a known launch does not wait for one. The last entry, at `NEVER`, is for no kernel.
        launched = [-math.inf] * len(self.start)
        ended = [float(begin)] * (len(self.start) + 1)
        before, last_ended = self.waited_for_rows
        waits = self.wait_rows
        latency, gap, unexplained = self.delays
        duration, removed = change.duration_ns.tolist(), change.removed.tolist()
        share = (change.host_share * host_scale).tolist()
        # Comparisons instead of max(): 0.4 µs per kernel instead of 1.1 in this hot loop.
        for moment, kind, row in self.events:
            if kind == _KERNEL:
                start, other = ended[before[row]], ended[last_ended[row]]
                if other > start:
                    start = other
                if removed[row]:
                    start += unexplained[row]
                else:
                    start += gap[row]
                    called = launched[row] + latency[row]
                    if called > start:
                        start = called
                    start += duration[row]
                ended[row] = start
            elif kind == _LAUNCH:
                if moment > seen:
                    spent = moment - seen
                    # A stall of milliseconds is not due to this kernel and remains when it is removed.
                    host += spent * (host_scale if removed[row] and spent > LONG_GAP_NS else share[row])
                    seen = moment
                launched[row] = host
            else:
                start_ns, released_ns, end_ns, done = waits[row]
                if start_ns > seen:
                    host += host_scale * (start_ns - seen)
                if row not in change.skipped_waits:
                    if ended[done] > host:
                        host = ended[done]
                    since = released_ns if released_ns > seen else seen
                    if end_ns > since:
                        host += host_scale * (end_ns - since)
                if end_ns > seen:
                    seen = end_ns
        return max(host, max(ended)) - begin

    def calibrate(self, wanted_ns: float) -> float:
        """Return the largest scale of CPU time, at most 1, at which the unchanged recording takes `wanted_ns`."""
        change, most = self.unchanged(), wanted_ns * _CLOSE
        if self.run(change) <= most:
            return 1.0
        if self.run(change, host_scale=_FASTEST_SCALE) > most:
            return _USUAL_SCALE  # the device itself was slower: the CPU's share is unknown
        low, high = _FASTEST_SCALE, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.run(change, host_scale=middle) <= most else (low, middle)
        if low > _USUAL_SCALE and self.run(change, host_scale=_USUAL_SCALE) >= wanted_ns * _FLAT:
            return _USUAL_SCALE  # the step time hardly depends on the CPU, so it says nothing about its speed
        return low
