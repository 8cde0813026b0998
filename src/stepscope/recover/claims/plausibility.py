"""Inconsistent evidence: values that no GPU can have reported, whatever it ran.

The numbers in a file can be edited one by one, but on a GPU they depend on each other: operations on instructions,
bytes on sectors, time on work, the work on the kernel's name, and times on the order of launches.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

from stepscope.hardware import Hardware, chip_of
from stepscope.hardware import find as find_hardware
from stepscope.recording.readers.counter_metrics import SECTOR_BYTES
from stepscope.recover.claims.repetition import find_copies
from stepscope.recover.evidence.layout import Complaint
from stepscope.recover.evidence.order import is_product
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting, Triple

# Kernels that are known well enough to say from their names that they do not use tensor cores.
_PLAIN_LIBRARIES = ("ATen",)
_PLAIN_CLASSES = ("elementwise", "copy", "reduction", "norm", "softmax", "index", "embedding", "loss", "optimizer")
_TENSOR_DTYPES = ("bf16", "fp16", "tf32")
FASTEST = 1.15  # times the data sheet's peak: some GPUs clock higher; the highest measured was 0.85
_SAME_SHARE = 0.01  # how much operations per instruction may differ between launches of a kernel
_BINARY_LIBRARIES = ("cuBLAS", "cuBLASLt", "cuDNN", "CUTLASS", "FlashAttention")  # not compiled by the user
_MOST_REGISTERS = 65_536  # of a multiprocessor
_SHORTEST_NS = 250  # the shortest kernel measured took 576 ns
_FEWEST_KINDS = 3  # of kernels, which never all take the same time
_CLOCK_ERROR_NS = 1_000  # the longest overlap of consecutive kernels in a genuine trace was 192 ns
_MOST_SWAPPED = 0.01  # share of kernels that several threads may have launched at the same moment


def find_contradictions(evidence: KernelEvidence) -> Iterator[Complaint]:
    sightings = evidence.sightings
    hardware = find_hardware(evidence.device) if evidence.device else None
    for flaw in evidence.flaws:
        yield Complaint(sighting=sightings[flaw.row], expected=flaw.expected, seen=flaw.seen)
    if hardware is not None:
        yield from _check_device(sightings, hardware, evidence.device_sms)
    yield from _check_resources(sightings)
    yield from _check_durations(sightings)
    yield from _check_numbers(sightings)
    yield from _check_times(sightings)
    yield from _check_names(sightings)
    yield from _check_dtypes(sightings)
    yield from _check_instructions(sightings)
    for one in sightings:
        yield from _check_stores(one)
        if hardware is not None:
            yield from _check_speed(one, hardware)
    yield from find_copies(sightings)


def _check_device(
    sightings: Sequence[Sighting], hardware: Hardware, multiprocessors: int | None
) -> Iterator[Complaint]:
    """A GPU may be shared, and have fewer multiprocessors, but never more; and it cannot run code for a later one."""
    chip = chip_of(hardware)
    if chip is None:
        return
    if multiprocessors is not None and multiprocessors > chip.multiprocessors:
        yield Complaint(
            sighting=sightings[0],
            expected=f"at most {chip.multiprocessors} multiprocessors on {hardware.name}",
            seen=str(multiprocessors),
        )
    major, minor = chip.capability
    for one in sightings:
        found = re.fullmatch(r"sm_(\d{1,3})[a-z]?", one.name.architecture or "")
        if found and int(found[1]) > 10 * major + minor:
            yield Complaint(
                sighting=one,
                expected=f"code for compute capability {major}.{minor} or lower, on {hardware.name}",
                seen=f"{one.name.architecture}, according to its name",
            )


def _check_resources(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    """A compiled kernel has the same registers in every launch, and GEMMs and attention the same threads. A compiler
    may use one name for several kernels."""
    known: dict[str, Sighting] = {}
    of_grid: dict[tuple[str, Triple], Sighting] = {}  # shared memory may depend on the size
    for one in sightings:
        threads = one.block[0] * one.block[1] * one.block[2]
        if (one.registers or 0) * threads > _MOST_REGISTERS:
            yield Complaint(
                sighting=one,
                expected=f"at most {_MOST_REGISTERS:,} registers per block, on any GPU",
                seen=f"{one.registers} for each of {threads:,} threads",
            )
        if one.name.kernel_class not in ("GEMM", "attention") or one.name.library not in _BINARY_LIBRARIES:
            continue
        first = known.setdefault(one.name.name, one)
        alike = of_grid.setdefault((one.name.name, one.grid), one)
        for what, usual, other, example in (
            ("registers", first.registers, one.registers, first),
            ("block", first.block, one.block, first),
            ("shared memory", alike.shared_bytes, one.shared_bytes, alike),
        ):
            if usual != other and None not in (usual, other):
                yield Complaint(sighting=one, expected=f"{what} {usual}, as in #{example.index}", seen=str(other))


def _check_durations(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    for one in sightings:
        if 0 < one.duration_ns < _SHORTEST_NS:
            yield Complaint(
                sighting=one,
                expected=f"at least {_SHORTEST_NS} ns to start and end a kernel",
                seen=f"{one.duration_ns} ns",
            )
    kinds, durations = {one.name.name for one in sightings}, {one.duration_ns for one in sightings}
    if len(kinds) >= _FEWEST_KINDS and len(durations) == 1 and 0 not in durations:
        yield Complaint(
            sighting=sightings[0],
            expected="different durations of different kernels",
            seen=f"{durations.pop():,} ns for all",
        )


def _check_names(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    products = [one for one in sightings if is_product(one) and one.name.tile is not None]
    measured = {one.name.dtype for one in products if one.counters.get("tensor_ops")}
    for one in sightings:
        operations = one.counters.get("tensor_ops")
        plain = one.name.library in _PLAIN_LIBRARIES and one.name.kernel_class in _PLAIN_CLASSES
        if operations and plain:
            yield Complaint(
                sighting=one,
                expected=f"no tensor core work: {one.name.operation}, according to its name",
                seen=f"tensor_ops {operations:,}",
            )
    for one in products:
        is_silent = one.counters.get("tensor_ops") == 0 and (one.name.dtype in measured or one.name.tensor_cores)
        if is_silent and one.name.dtype in _TENSOR_DTYPES:
            yield Complaint(
                sighting=one, expected=f"a GEMM in {one.name.dtype}, according to its name", seen="tensor_ops 0"
            )


def _check_dtypes(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    """The tensor cores count operations by the dtype of their inputs, whatever the kernel is called. A kernel whose
    name has a dtype multiplies in one."""
    for one in sightings:
        counted = [dtype for dtype, operations in one.tensor_dtypes.items() if operations]
        if one.name.dtype is None or one.name.kernel_class not in ("GEMM", "attention"):
            continue
        if one.is_misnamed or len(counted) > 1:
            said = " and ".join(f"{one.tensor_dtypes[dtype]:,} in {dtype}" for dtype in counted)
            yield Complaint(
                sighting=one,
                expected=f"operations in {one.name.dtype}, according to its name",
                seen=f"{said}, by the counters",
            )


def _check_instructions(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    """Operations per instruction are the same in every launch of a kernel."""
    usual: dict[str, float] = {}
    for one in sightings:
        operations, instructions = one.counters.get("tensor_ops"), one.counters.get("tensor_instructions")
        if not operations or instructions is None or one.name.kernel_class not in ("GEMM", "attention"):
            continue
        if instructions == 0:
            yield Complaint(
                sighting=one, expected="tensor core instructions", seen=f"none, with tensor_ops {operations:,}"
            )
            continue
        each = operations / instructions
        known = usual.setdefault(one.name.name, each)
        if abs(each - known) > _SAME_SHARE * known:
            yield Complaint(
                sighting=one,
                expected=f"{known:,.0f} operations per instruction, as in other launches of this kernel",
                seen=f"{each:,.0f}",
            )


def _check_stores(sighting: Sighting) -> Iterator[Complaint]:
    stored, sectors = sighting.counters.get("store_bytes"), sighting.counters.get("write_sectors")
    if stored and sectors is not None and sectors * SECTOR_BYTES < stored:
        yield Complaint(
            sighting=sighting,
            expected=f"at least {-(-stored // SECTOR_BYTES):,} sectors for {stored:,} stored bytes",
            seen=f"write_sectors {sectors:,}",
        )


def _check_speed(sighting: Sighting, hardware: Hardware) -> Iterator[Complaint]:
    seconds = sighting.duration_ns / 1e9
    if seconds <= 0:
        return
    peaks = hardware.peak_flops
    # A kernel of 16 bits or more cannot reach the peak of fp8, twice as high. One of unknown type may.
    narrow = sighting.name.dtype is None or sighting.name.dtype == "fp8"
    peak = max((peak for dtype, peak in peaks.items() if narrow or dtype != "fp8"), default=0.0)
    operations = sighting.counters.get("tensor_ops", 0)
    if peak and operations / seconds > FASTEST * peak:
        yield _too_fast(sighting, f"{operations:,} operations", operations / peak)
    moved = sighting.counters.get("dram_read_bytes", 0) + sighting.counters.get("dram_write_bytes", 0)
    if hardware.bandwidth and moved / seconds > FASTEST * hardware.bandwidth:
        yield _too_fast(sighting, f"{moved:,} bytes of memory traffic", moved / hardware.bandwidth)


def _too_fast(sighting: Sighting, what: str, least_seconds: float) -> Complaint:
    return Complaint(
        sighting=sighting,
        expected=f"at least {least_seconds * 1e6:,.1f} µs for {what} at this GPU's peak",
        seen=f"{sighting.duration_ns / 1e3:,.1f} µs",
    )


# --- Launch order


def _check_numbers(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    """Every launch has its own number, and launches on a stream have increasing numbers."""
    numbered = [one for one in sightings if one.launch is not None and not one.in_graph]
    last: dict[int | None, Sighting] = {}
    for one in numbered:
        known = last.setdefault(one.launch, one)
        if known is not one and not _are_of_a_graph(sightings, known, one):
            yield Complaint(
                sighting=one, expected="a different number for every launch", seen=f"{one.launch:,}, as #{known.index}"
            )
        last[one.launch] = one
    swapped = [(a, b) for a, b in itertools.pairwise(numbered) if (b.launch or 0) < (a.launch or 0)]
    has_timeline = any(one.start_ns is not None for one in numbered)
    if len(swapped) > (_MOST_SWAPPED * len(numbered) if has_timeline else 0):
        before, after = swapped[0]
        yield Complaint(
            sighting=after,
            expected="launches in the order of their numbers",
            seen=f"{after.launch:,} after {before.launch:,}",
        )


def _are_of_a_graph(sightings: Sequence[Sighting], first: Sighting, second: Sighting) -> bool:
    """Whether only kernels with the same number are between two that share it, and not all are the same kernel. Some
    profilers do not mark the kernels of a CUDA graph."""
    between = sightings[first.index : second.index + 1]
    is_alone = all(one.launch == first.launch for one in between)
    return is_alone and first.start_ns is not None and len({one.name.name for one in between}) > 1


def _check_times(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    """A kernel may start before the end of the one before it on its stream, but it cannot end before."""
    latest: Sighting | None = None
    for one in sightings:
        if one.start_ns is None or one.in_graph:
            continue
        if (
            latest is not None
            and min(_end(latest), _end(one)) - one.start_ns > _CLOCK_ERROR_NS
            and _end(one) <= _end(latest)
        ):
            yield Complaint(
                sighting=one,
                expected=f"a kernel that ends after #{latest.index}, which is before it on the same stream",
                seen=f"one that ends {(_end(latest) - _end(one)) / 1e3:,.2f} µs before",
            )
        latest = one if latest is None or _end(one) > _end(latest) else latest


def find_overlap_ns(sightings: Sequence[Sighting]) -> int:
    """Return how long two kernels of the stream ran at the same time. Kernels can be allowed to start early, and those
    of a CUDA graph to run next to each other: times then do not show how much of the work is which."""
    total, end = 0, None
    for one in sightings:
        if one.start_ns is None:
            continue
        if end is not None and end - one.start_ns > _CLOCK_ERROR_NS:
            total += min(end, _end(one)) - one.start_ns
        end = max(end or _end(one), _end(one))
    return total


def _end(sighting: Sighting) -> int:
    return (sighting.start_ns or 0) + sighting.duration_ns
