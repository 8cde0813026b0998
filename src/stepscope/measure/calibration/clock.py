"""Times calls on a GPU as they run in a full queue: back to back, and never waiting for the host.

The GPU first sleeps for as long as the host needs to launch all calls, so small kernels are measured as well as large
ones, with the gap between kernels that a stream has. A CUDA graph has shorter gaps, and cannot capture everything.

Tensors that are larger than the L2 cache are read from memory in a real step, and small ones that the previous kernel
wrote are not. So a case says how much of its data is new in every call, and as many copies are used in turns.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from stepscope.measure.timing import elapsed_ns, make_event
from stepscope.recording.rows.calibration import Series

Call = Callable[[], object]
_ROUNDS = 3
_TARGET_NS = 500_000
_FEWEST, _MOST = 3, 48
_MOST_COPIES = 40
_SPARE_NS = 60_000  # for the events, and for a host that is slower than in the first round


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """One operation at one size. `make` returns a call with inputs of its own; `fresh_bytes` is what each call touches
    that no earlier one did, or 0 if all calls share their inputs."""

    operation: str
    dtype: str
    variant: str = ""
    columns: tuple[str, ...]
    sizes: tuple[int, ...]
    make: Callable[[], Call]
    fresh_bytes: int = 0


class CallClock:
    """Measures the time per call on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = 1 << 20
        self._cycles_per_ns = 0.0
        if device.type == "cuda":
            self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._cycles_per_ns = self._count_cycles()

    def time_case(self, case: TimedCall) -> int:
        """Return the nanoseconds of one call."""
        copies = 1
        if case.fresh_bytes:
            copies = min(_MOST_COPIES, max(2, 2 * self.l2_bytes // case.fresh_bytes + 1))
        return self.time_calls([case.make() for _ in range(copies)])

    def time_calls(self, calls: list[Call]) -> int:
        turns = itertools.cycle(calls)
        if self.device.type != "cuda":
            return max(1, self._run_on_host(turns, _FEWEST)[0])
        kept: deque[object] = deque(maxlen=len(calls))
        self._run(turns, kept, max(2, len(calls)), 0)  # loads kernels and allocates
        guess_ns, host_ns = self._run(turns, kept, _FEWEST, 200_000)
        count = min(_MOST, max(_FEWEST, _TARGET_NS // max(1, guess_ns)))
        rounds = [self._run_in_full_queue(turns, kept, count, host_ns) for _ in range(_ROUNDS)]
        return max(1, round(statistics.median(rounds)))

    def _run_in_full_queue(self, turns: Iterator[Call], kept: deque[object], count: int, host_ns: int) -> int:
        """Run a round, again with a longer sleep if the host was late."""
        sleep_ns = round(1.3 * host_ns * count) + _SPARE_NS
        for _ in range(3):
            took_ns, host_ns = self._run(turns, kept, count, sleep_ns)
            if host_ns * count <= sleep_ns:
                break
            sleep_ns = 2 * host_ns * count + _SPARE_NS
        return took_ns

    def _run(self, turns: Iterator[Call], kept: deque[object], count: int, sleep_ns: int) -> tuple[int, int]:
        """Return the time per call on the device and on the host."""
        before, after = make_event(), make_event()
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(round(sleep_ns * self._cycles_per_ns))  # type: ignore[no-untyped-call]
        start_ns = time.perf_counter_ns()
        before.record()
        for _ in range(count):
            kept.append(next(turns)())
        after.record()
        host_ns = time.perf_counter_ns() - start_ns
        torch.cuda.synchronize(self.device)
        return elapsed_ns(before, after) // count, host_ns // count

    def _run_on_host(self, turns: Iterator[Call], count: int) -> tuple[int, int]:
        start_ns = time.perf_counter_ns()
        for _ in range(count):
            next(turns)()
        took_ns = (time.perf_counter_ns() - start_ns) // count
        return took_ns, took_ns

    def _count_cycles(self) -> float:
        """Return the clock cycles of a sleep per nanosecond."""
        cycles = 2_000_000
        for _ in range(2):  # the first one loads the kernel
            before, after = make_event(), make_event()
            before.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            after.record()
            torch.cuda.synchronize(self.device)
        return cycles / elapsed_ns(before, after)


def measure_cases(
    clock: CallClock, cases: Iterable[TimedCall], *, deadline: float, on_case: Callable[[str], None]
) -> tuple[list[Series], list[str]]:
    """Return the times of all cases as series, and which could not be measured. After `deadline`, on the monotonic
    clock, the rest is left out."""
    rows: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[int, ...]]] = {}
    skipped: dict[str, str] = {}
    for case in cases:
        if time.monotonic() > deadline:
            skipped["out of time"] = f"out of time at {case.operation} {case.dtype}"
            break
        on_case(f"{case.operation} {case.dtype} {case.variant} {'×'.join(map(str, case.sizes))}")
        name = f"{case.operation} {case.dtype} {case.variant}".strip()
        try:
            took_ns = clock.time_case(case)
        except RuntimeError as error:  # out of memory, or a backend that does not take this problem
            skipped.setdefault(name, f"{name} {case.sizes}: {str(error).splitlines()[0][:160]}")
            continue
        key = (case.operation, case.dtype, case.variant, case.columns)
        rows.setdefault(key, []).append((*case.sizes, took_ns))
    series = [
        Series(operation=operation, dtype=dtype, variant=variant, columns=columns, rows=tuple(measured))
        for (operation, dtype, variant, columns), measured in rows.items()
    ]
    return series, list(skipped.values())
