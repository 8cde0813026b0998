"""Memory timelines of invented steps, made from allocations like those of a recording."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from stepscope.findings import Area, Axis, Piece, Stretch, Timeline

MIB, GIB = 1 << 20, 1 << 30
AREAS = ("parameters", "optimizer state", "gradients", "activations", "temporaries")
NUM_LAYERS = 12
# Names that end a script, run as an image's handler, and reverse text.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    area: int
    start_ms: float
    end_ms: float
    size: int
    label: str


def training_step(num_slices: int = 600) -> Timeline:
    """One step: forward fills up with activations, backward turns them into gradients, AdamW takes temporaries."""
    allocations = [
        Allocation(area=area, start_ms=0, end_ms=200, size=size * MIB, label=f"layers.{layer}.{name}")
        for layer in range(NUM_LAYERS)
        for area, name, size in (
            (0, "mlp.up.weight", 128),
            (0, "attention.qkv.weight", 96),
            (1, "exp_avg", 224),
            (1, "exp_avg_sq", 224),
        )
    ]
    for layer in range(NUM_LAYERS):
        forward, backward = 5 + 4 * layer, 160 - 7 * (layer + 1)
        for index, (name, size) in enumerate((("attention scores", 384), ("mlp hidden", 256), ("residual", 64))):
            allocations.append(_of_layer(3, forward + index, backward + 5 - index, size, f"layers.{layer}.{name}"))
        allocations.append(_of_layer(2, backward + 3, 199, 224, f"layers.{layer}.grad"))
        allocations.append(_of_layer(4, forward + 1, forward + 2, 96, "softmax workspace"))
        allocations.append(_of_layer(4, backward + 1, backward + 3, 192, "softmax backward"))
        allocations.append(_of_layer(4, 165 + 2 * layer, 166.5 + 2 * layer, 224, "AdamW update"))
    allocations.append(_of_layer(3, 53, 76, 1500, "logits"))
    allocations.append(_of_layer(4, 60, 75, 1500, "cross entropy, float32"))
    timeline = timeline_of(allocations, num_slices, 200.0)
    phases = (("forward", 5, 60), ("backward", 60, 162), ("optimizer", 162, 200))
    stretches = tuple(_stretch(name, start, end, num_slices, 200.0) for name, start, end in phases)
    reserved = tuple(_reserved(timeline))
    return msgspec.structs.replace(
        timeline,
        stretches=(*stretches, Stretch(label="step 3", start=stretches[0].start, end=stretches[-1].end)),
        line=Area(name="reserved", values=reserved),
    )


def _of_layer(area: int, start_ms: float, end_ms: float, size_mib: int, label: str) -> Allocation:
    return Allocation(area=area, start_ms=start_ms, end_ms=end_ms, size=size_mib * MIB, label=label)


def _stretch(label: str, start_ms: float, end_ms: float, num_slices: int, length_ms: float) -> Stretch:
    return Stretch(label=label, start=int(start_ms / length_ms * num_slices), end=int(end_ms / length_ms * num_slices))


def _reserved(timeline: Timeline) -> list[int]:
    """The reserved memory of a caching allocator: the maximum so far, in large blocks."""
    reserved, highest = [], 0
    for heights in zip(*(area.values for area in timeline.areas), strict=True):
        highest = max(highest, math.ceil(sum(heights) * 1.03 / (512 * MIB)) * 512 * MIB)
        reserved.append(highest)
    return reserved


def timeline_of(allocations: Sequence[Allocation], num_slices: int, length_ms: float) -> Timeline:
    """Return the timeline of allocations, each slice at its start."""
    times = tuple(index * length_ms / num_slices for index in range(num_slices))
    values = [[0] * num_slices for _ in AREAS]
    pieces = []
    for allocation in allocations:
        start = math.ceil(allocation.start_ms / length_ms * num_slices)
        end = math.ceil(allocation.end_ms / length_ms * num_slices)
        for index in range(start, end):
            values[allocation.area][index] += allocation.size
        detail = (f"at {allocation.start_ms:g} ms", "model.py:123 forward", "functional.py:45 softmax")
        pieces.append(
            Piece(
                area=allocation.area, start=start, end=end, size=allocation.size, label=allocation.label, detail=detail
            )
        )
    return Timeline(
        title="Active memory over one training step",
        subtitle="gpt2-large, batch 4, context 1024, bf16, AdamW on NVIDIA H200",
        x=Axis(label="time", unit="ms"),
        y=Axis(label="active memory", unit="bytes"),
        times=times,
        areas=tuple(Area(name=name, values=tuple(heights)) for name, heights in zip(AREAS, values, strict=True)),
        pieces=tuple(sorted(pieces, key=lambda piece: -piece.size)),
        notes=("Each slice shows its highest instant.", "Reserved is what the allocator holds, used or not."),
    )


def hostile_timeline() -> Timeline:
    """A step in which every name tries to escape from the page."""
    timeline = training_step(100)
    name = f"{HOSTILE}\u202eevil\u2066"
    largest = msgspec.structs.replace(timeline.pieces[1], label="x" * 1_000_000)
    pieces = (msgspec.structs.replace(timeline.pieces[0], label=name, detail=(name,)), largest, *timeline.pieces[2:])
    return msgspec.structs.replace(
        timeline,
        title=name,
        subtitle=f"{name} &amp; {'y' * 1_000_000}",
        x=Axis(label=name, unit="ms"),
        areas=tuple(Area(name=f"{name}{index}", values=area.values) for index, area in enumerate(timeline.areas)),
        stretches=(Stretch(label=name, start=0, end=100), Stretch(label="x" * 1_000_000, start=10, end=60)),
        pieces=pieces,
        line=Area(name=name, values=timeline.areas[0].values),
        notes=(name,),
    )


def busy_timeline(*, num_slices: int, num_pieces: int) -> Timeline:
    """Half a million allocations, a million events, in eight areas that change all the time."""
    random = np.random.default_rng(0)
    count, num_areas, length_ms = 500_000, 8, 3000.0
    starts = np.sort(random.uniform(0, num_slices, count)).astype(np.int64)
    ends = np.minimum(starts + 1 + random.lognormal(1, 2, count).astype(np.int64), num_slices)
    sizes = 512 * (1 + random.lognormal(5.8, 2.2, count).astype(np.int64))
    members = random.integers(0, num_areas, count)
    values = np.zeros((num_areas, num_slices + 1), dtype=np.int64)
    np.add.at(values, (members, starts), sizes)
    np.add.at(values, (members, ends), -sizes)
    areas = tuple(
        Area(name=f"blocks.{index}", values=tuple(row[:-1].tolist())) for index, row in enumerate(values.cumsum(axis=1))
    )
    pieces = tuple(
        Piece(
            area=int(members[at]),
            start=int(starts[at]),
            end=int(ends[at]),
            size=int(sizes[at]),
            label=f"tensor {at}",
            detail=tuple(f"file{frame}.py:{at % 50 + frame} call{frame}" for frame in range(8)),
        )
        for at in np.argsort(-sizes)[:num_pieces]
    )
    return Timeline(
        title="Active memory over many steps",
        subtitle="a million events",
        x=Axis(label="time", unit="ms"),
        y=Axis(label="active memory", unit="bytes"),
        times=tuple((np.arange(num_slices) * (length_ms / num_slices)).tolist()),
        areas=areas,
        pieces=pieces,
    )
