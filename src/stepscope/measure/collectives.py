"""Collectives in isolation, as every rank runs them: correctness first, then time.

All ranks run the same cases in the same order and agree after each step whether to continue, so that a failure on one
rank (no memory, a wrong result) costs that case on all ranks and leaves the group intact. A collective that fails
breaks the group; that is not caught here.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from stepscope.hardware import available_bytes
from stepscope.measure.environment import DTYPES
from stepscope.measure.failures import is_out_of_memory, say_in_a_line
from stepscope.measure.soundness import doubt_spread
from stepscope.measure.timing import elapsed_ns, make_event
from stepscope.parallel.communicator import Communicator, Pending
from stepscope.parallel.group import choose_device
from stepscope.recording.rows.bench import Clock, Doubt
from stepscope.recording.rows.collective_case import CommCase, CommMeasurement, CommOutcome
from stepscope.units import GIB, count_noun

OnStage = Callable[[Literal["checking", "timing"]], None]

_WARMUPS = 2
_FEWEST = 5
# Ones where position and rank sum to a multiple of this, zeros elsewhere: sums over ranks are integers that every dtype
# represents exactly, and differ by position.
_PERIOD = 5
_TILE = _PERIOD * 2**16


def measure_collectives(
    cases: Sequence[CommCase], communicator: Communicator, *, device: str, on_stage: OnStage = lambda _: None
) -> Iterator[CommOutcome]:
    """Return the outcome of each of rank 0's cases, the same on every rank."""
    place = choose_device(device, local_rank=int(os.environ.get("LOCAL_RANK", communicator.rank)))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    for case in communicator.share_objects(tuple(cases), "rank 0's cases")[0]:
        yield _measure(case, communicator, place, on_stage)
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()


def _measure(case: CommCase, communicator: Communicator, device: torch.device, on_stage: OnStage) -> CommOutcome:
    on_stage("checking")
    problem, trouble = _try_to_make(case, communicator, device)
    if said := _first_said(communicator, trouble, "the memory check"):
        return CommOutcome(status="oom", reason=said)
    assert problem is not None
    problem.fill()
    problem.issue().wait()
    if said := _first_said(communicator, problem.say_wrong(), "the result check"):
        return CommOutcome(status="wrong", reason=said)
    on_stage("timing")
    problem.clear()
    clock = _CollectiveClock(problem, communicator, device)
    guesses = [min(clock.sample() for _ in range(_WARMUPS))]
    slowest_ns = max(one[0] for one in communicator.share_objects(guesses, "the time estimates"))
    fitting = round(case.seconds * 1e9 / max(1, slowest_ns))
    clock.start_counting()
    samples = tuple(clock.sample() for _ in range(min(case.repetitions, max(_FEWEST, fitting))))
    everyone = communicator.share_objects((samples, clock.processor_ns), "the samples")
    measurement = CommMeasurement(
        clock=clock.kind,
        samples_ns=tuple(one for one, _ in everyone),
        processor_ns=tuple(used for _, used in everyone),
    )
    return CommOutcome(status="ok", measurement=measurement, doubts=tuple(_doubt(case, measurement)))


def _first_said(communicator: Communicator, text: str, name: str) -> str:
    """Return, on every rank, the message of the first rank that has one."""
    said = communicator.share_objects(text, name)
    return next((f"rank {rank}: {one}" for rank, one in enumerate(said) if one), "")


class _Problem:
    """The tensors of a case, and the collective on them."""

    def __init__(self, case: CommCase, communicator: Communicator, device: torch.device) -> None:
        self._case, self._communicator = case, communicator
        dtype = DTYPES[case.dtype]
        self._whole = torch.empty(case.elements, dtype=dtype, device=device)
        parts = case.elements // case.ranks if case.collective in ("all-gather", "reduce-scatter") else 0
        self._part = torch.empty(parts, dtype=dtype, device=device)

    def fill(self) -> None:
        """Fill the input with a pattern per rank, and the output with values that are never correct."""
        rank = self._communicator.rank
        sent, received = self._part, self._whole
        if self._case.collective != "all-gather":
            sent, received = self._whole, self._part
        received.fill_(-1)
        _repeat(sent, _tile(sent, [rank]))

    def clear(self) -> None:
        """Zeros stay zeros however often they are summed."""
        self._whole.zero_()
        self._part.zero_()

    def issue(self) -> Pending:
        name = f"{self._case.message_bytes / 1e6:g} MB"
        match self._case.collective:
            case "all-reduce":
                return self._communicator.all_reduce(self._whole, name, average=False)
            case "all-gather":
                return self._communicator.all_gather(self._whole, self._part, name)
            case "reduce-scatter":
                return self._communicator.reduce_scatter(self._part, self._whole, name, average=False)
            case "broadcast":
                return self._communicator.broadcast(self._whole, 0, name)

    def say_wrong(self) -> str:
        """Return an empty string if every element is exactly right."""
        everyone = list(range(self._communicator.world))
        match self._case.collective:
            case "all-reduce":
                right = _repeats(self._whole, _tile(self._whole, everyone))
            case "broadcast":
                right = _repeats(self._whole, _tile(self._whole, [0]))
            case "reduce-scatter":
                first = self._communicator.rank * len(self._part)
                right = _repeats(self._part, _tile(self._part, everyone, first))
            case "all-gather":
                parts = self._whole.chunk(len(everyone))
                right = all(_repeats(part, _tile(part, [rank])) for rank, part in enumerate(parts))
        return "" if right else f"the {self._case.collective} returned wrong elements"


def _tile(like: Tensor, ranks: Sequence[int], first: int = 0) -> Tensor:
    """Return the sum of the patterns of `ranks`, starting at position `first`."""
    places = torch.arange(first, first + min(_TILE, max(1, len(like))), device=like.device)
    return sum(((places + rank) % _PERIOD == 0).to(torch.int32) for rank in ranks).to(like.dtype)  # type: ignore[union-attr]


def _repeat(tensor: Tensor, tile: Tensor) -> None:
    for part in torch.split(tensor, _TILE):
        part.copy_(tile[: len(part)])


def _repeats(tensor: Tensor, tile: Tensor) -> bool:
    return all(torch.equal(part, tile[: len(part)]) for part in torch.split(tensor, _TILE))


def _try_to_make(case: CommCase, communicator: Communicator, device: torch.device) -> tuple[_Problem | None, str]:
    if hopeless := _say_hopeless(case, device):
        return None, f"not tried: {hopeless}"
    try:
        return _Problem(case, communicator, device), ""
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None, say_in_a_line(error)


class _CollectiveClock:
    """Time from the end of a barrier to the end of the collective on this rank: with CUDA events if NCCL runs it on a
    stream, with the CPU clock if the rank's process does the work.
    """

    def __init__(self, problem: _Problem, communicator: Communicator, device: torch.device) -> None:
        self._problem, self._communicator, self._device = problem, communicator, device
        self.kind: Clock = "cuda events" if communicator.backend == "nccl" else "host"
        self.processor_ns = 0

    def start_counting(self) -> None:
        self.processor_ns = 0

    def sample(self) -> int:
        self._communicator.barrier("before a sample")
        self._synchronize()
        used_ns = time.process_time_ns()
        taken_ns = self._sample_on_stream() if self.kind == "cuda events" else self._sample_on_host()
        self.processor_ns += time.process_time_ns() - used_ns
        return taken_ns

    def _sample_on_stream(self) -> int:
        before, after = make_event(), make_event()
        before.record()
        self._problem.issue().wait()
        after.record()
        self._synchronize()
        return elapsed_ns(before, after)

    def _sample_on_host(self) -> int:
        start_ns = time.perf_counter_ns()
        self._problem.issue().wait()
        self._synchronize()
        return time.perf_counter_ns() - start_ns

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _say_hopeless(case: CommCase, device: torch.device) -> str:
    """Return why a case is not attempted; empty if it is. Linux overcommits CPU memory and then kills the process, so
    all ranks of a machine are counted together.
    """
    if device.type == "cuda":
        return ""
    there = available_bytes()
    need = case.needed_bytes * (case.ranks // case.hosts)
    if need <= there:
        return ""
    return f"the ranks on this machine need {need / GIB:.1f} GiB together; {there / GIB:.1f} GiB free"


def _doubt(case: CommCase, measurement: CommMeasurement) -> Iterator[Doubt]:
    yield from doubt_spread(measurement.slowest_ns, of="repetitions")
    here, cores = case.ranks // case.hosts, os.cpu_count() or 1
    if case.backend == "gloo" and here > cores:
        yield Doubt(code="crowded", text=f"{here} ranks share {count_noun(cores, 'core')}")
