"""Inconsistent evidence: values that no GPU can have reported, whatever it ran.

The numbers in a file can be edited one by one, but on a GPU they depend on each other: operations on instructions,
bytes on sectors, time on work, and the work on the kernel's name. Some never repeat: memory traffic and duration vary
with every launch, so layers with exactly the same values are copies of one layer.
"""

import itertools
from collections.abc import Iterator, Sequence

from stepscope.hardware import Hardware
from stepscope.recover.evidence.layout import Complaint, Placement
from stepscope.recover.evidence.order import is_product
from stepscope.recover.facts import Sighting

# Kernels that are known well enough to say from their names that they do not use tensor cores.
_PLAIN_LIBRARIES = ("ATen",)
_PLAIN_CLASSES = ("elementwise", "copy", "reduction", "norm", "softmax", "index", "embedding", "loss", "optimizer")
_TENSOR_DTYPES = ("bf16", "fp16", "tf32")
FASTEST = 1.15  # times the data sheet's peak: some GPUs clock higher; the highest measured was 0.85
_SAME_SHARE = 0.01  # how much operations per instruction may differ between launches of a kernel
_SECTOR_BYTES = 32
# How many kernels of a layer must agree in every value before it counts as a copy: with counters, and without.
_FEWEST_COUNTED, _FEWEST_TIMED = 4, 8
_COARSEST_NS = 100  # clock resolution; that of a GPU is 32 ns
_ROUNDING_NS = 2  # how much steps differ after converting ticks to nanoseconds
_CHANCE = 1e-6  # probability that layers agree by chance, below which they count as copies
_UNKNOWN_SHARE = 0.5  # of kernels that take the same time in two layers: more than in any genuine run measured


def find_contradictions(
    sightings: Sequence[Sighting], placement: Placement | None, hardware: Hardware | None
) -> Iterator[Complaint]:
    """Yield contradictions. Those with `is_unclear` do not count: with a coarse clock, durations repeat by chance."""
    yield from _check_names(sightings)
    yield from _check_instructions(sightings)
    for one in sightings:
        yield from _check_stores(one)
        if hardware is not None:
            yield from _check_speed(one, hardware)
    if placement is not None:
        yield from _find_copies(sightings, placement)


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
        is_silent = one.counters.get("tensor_ops") == 0 and one.name.dtype in measured
        if is_silent and one.name.dtype in _TENSOR_DTYPES:
            yield Complaint(
                sighting=one, expected=f"a GEMM in {one.name.dtype}, according to its name", seen="tensor_ops 0"
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
    if stored and sectors is not None and sectors * _SECTOR_BYTES < stored:
        yield Complaint(
            sighting=sighting,
            expected=f"at least {-(-stored // _SECTOR_BYTES):,} sectors for {stored:,} stored bytes",
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


def _find_copies(sightings: Sequence[Sighting], placement: Placement) -> Iterator[Complaint]:
    """Compare the durations and memory traffic of layers, each from one attention to the next."""
    starts = sorted({(place.pass_number, place.layer): place.sighting.index for place in placement.attentions}.values())
    layers = [sightings[start:end] for start, end in itertools.pairwise(starts)]
    is_coarse = find_step_ns(sightings) >= _COARSEST_NS
    share = _share_alike(layers)
    known: dict[tuple[object, ...], int] = {}
    for kernels in layers:
        counted = all("dram_read_bytes" in one.counters for one in kernels)
        if len(kernels) < (_FEWEST_COUNTED if counted else _FEWEST_TIMED):
            continue
        key = tuple(_varying(one) for one in kernels)
        start = kernels[0].index
        if any(one[0] for one in key) and known.setdefault(key, start) != start:
            by_chance = len(layers) ** 2 * share ** len(kernels)
            yield Complaint(
                sighting=kernels[0],
                expected="durations and memory traffic that vary between layers, as on every GPU",
                seen=f"{len(kernels)} kernels with exactly the same values as those starting at #{known[key]}",
                is_unclear=not counted and (is_coarse or by_chance > _CHANCE),
            )


def find_step_ns(sightings: Sequence[Sighting]) -> int:
    """Return the clock's resolution: the smallest difference between two durations, or 0 if all are equal."""
    durations = sorted({one.duration_ns for one in sightings})
    steps = [after - before for before, after in itertools.pairwise(durations)]
    return min((step for step in steps if step > _ROUNDING_NS), default=min(steps, default=0))


def _share_alike(layers: Sequence[Sequence[Sighting]]) -> float:
    """Return the share of kernels that take the same time in the next layer. Layers that are entirely equal do not
    count."""
    alike, compared = 1, 2
    for first, second in itertools.pairwise(layers):
        same = sum(_varying(one) == _varying(other) for one, other in zip(first, second, strict=False))
        if len(first) == len(second) and same < len(first):
            alike, compared = alike + same, compared + len(first)
    return alike / compared if compared > _FEWEST_TIMED else _UNKNOWN_SHARE


def _varying(sighting: Sighting) -> tuple[int | None, ...]:
    counters = sighting.counters
    return (
        sighting.duration_ns,
        counters.get("write_sectors"),
        counters.get("dram_read_bytes"),
        counters.get("dram_write_bytes"),
    )
