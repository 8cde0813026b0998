"""The roofline: FLOP/s of each operator against its FLOP per byte, under the limits of the device.

A point is all calls of one operator with one shape (`trace.roofline`). Operators that only move memory have no FLOPs,
but their bandwidth has the same limit: they are points too. A note gives the share of kernels with unknown costs.
"""

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import polars as pl

from stepscope.explain.trace.attribution.names import cut_name
from stepscope.explain.trace.profile import Profile
from stepscope.explain.trace.roofline import roofline, shorten_shapes
from stepscope.findings import Missing, Roof, Roofline, RoofPoint
from stepscope.hardware import Hardware
from stepscope.units import count_noun

MOST_POINTS = 150  # per run
_WHAT = "the roofline"
_RECORD_SHAPES = "torch.profiler.profile(record_shapes=True)"


def draw_roofline(profiles: Sequence[Profile], names: Sequence[str]) -> Roofline | Missing:
    """The roofline of runs on one kind of device. A run without points gets a note; with none at all it is Missing."""
    assert len(profiles) == len(names), "one name per profile"
    limits = _shared_limits(profiles)
    if isinstance(limits, Missing):
        return limits
    hardware, bandwidth = limits
    points: list[RoofPoint] = []
    precisions: set[str] = set()
    notes: list[str] = []
    absent: list[Missing] = []
    for run, (profile, name) in enumerate(zip(profiles, names, strict=True)):
        prefix = f"{name}: " if name else ""
        frame = roofline(profile)
        drawn = frame.filter(pl.col("flops").is_not_null() & (pl.col("bytes") > 0) & (pl.col("time_ns") > 0))
        if not drawn.height:
            absent.append(_explain_nothing(profile))
            notes.append(f"{prefix}no points: {absent[-1].why}")
            continue
        shown = drawn.head(MOST_POINTS)
        points += _tell_apart([_point(row, profile, run) for row in shown.iter_rows(named=True)])
        precisions |= set(shown.filter(pl.col("flops") > 0)["dtype"].drop_nulls())
        notes += [prefix + note for note in _notes(profile, drawn)]
    if not points:
        return absent[0]
    peaks = sorted(((peak, name) for name, peak in hardware.peak_flops.items() if name in precisions), reverse=True)
    unknown = sorted(precisions - set(hardware.peak_flops))
    if unknown:
        notes.append(f"the {', '.join(unknown)} peak of {hardware.name} is unknown")
    return Roofline(
        title=f"Roofline of {hardware.name}",
        runs=tuple(names),
        bytes_per_s=bandwidth,
        roofs=tuple(Roof(label=name, flops_per_s=peak) for peak, name in peaks),
        points=tuple(points),
        unit="step" if any(profile.clock.has_steps for profile in profiles) else "trace",
        notes=tuple(notes),
    )


def _have_one_roof(profiles: Sequence[Profile]) -> bool:
    """Whether one chart fits all runs: their devices have the same limits."""
    limits = [profile.hardware for profile in profiles]
    return all(one is not None and _limits_of(one) == _limits_of(limits[0]) for one in limits)


def _limits_of(hardware: Hardware | None) -> tuple[object, ...]:
    return (hardware.bandwidth, dict(hardware.peak_flops)) if hardware else ()


def _shared_limits(profiles: Sequence[Profile]) -> tuple[Hardware, float] | Missing:
    for profile in profiles:
        device, hardware = profile.recording.manifest.device, profile.hardware
        if hardware is None:
            why = f"the limits of `{device}` are unknown" if device else "the recording does not name its device"
            return Missing(what=_WHAT, why=why)
        if hardware.bandwidth is None:
            disturbed = ": it is measured only if no other process uses the machine"
            why = f"the memory bandwidth of `{device}` is unknown{disturbed if hardware.source == 'measured' else ''}"
            return Missing(what=_WHAT, why=why)
    if not _have_one_roof(profiles):
        return Missing(what=_WHAT, why="the devices of the two runs have different limits")
    first = profiles[0].hardware
    assert first is not None
    assert first.bandwidth is not None
    return first, first.bandwidth


def _explain_nothing(profile: Profile) -> Missing:
    if not profile.recording.manifest.shapes_recorded:
        return Missing(what=_WHAT, why="operator shapes were not recorded", command=_RECORD_SHAPES)
    if not profile.kernels["op_row"].is_not_null().any():
        return Missing(what=_WHAT, why="the recording does not link kernels to operators")
    return Missing(what=_WHAT, why="the recording has no operator with a known cost")


def _point(row: dict[str, object], profile: Profile, run: int) -> RoofPoint:
    numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    # Calls are counted for launches in marked steps, so divide by those, as the table does.
    steps, calls, time_ns = profile.num_steps, numbers["calls"], numbers["time_ns"]
    reached = row["reached"]
    assert reached is None or isinstance(reached, float)
    roof = f", {row['dtype']} roof" if row["dtype"] else ""
    shapes = shorten_shapes(str(row["shapes"] or "")) or ""
    lines = (
        cut_name(f"{row['op']} {shapes}".strip()),
        cut_name(str(row["short"])),
        f"{count_noun(calls / steps, 'call')} {profile.clock.say_per_step}, {time_ns / calls / 1e3:,.4g} µs each",
        f"{numbers['bytes_per_s'] / 1e9:,.4g} GB/s"
        + (f", {numbers['flops_per_s'] / 1e12:,.4g} TFLOP/s{roof}" if numbers["flops_per_s"] else ""),
    )
    return RoofPoint(
        label=cut_name(_label(str(row["op"]), shapes)),
        group=str(row["class"]),
        intensity=numbers["intensity"],
        flops_per_s=numbers["flops_per_s"],
        bytes_per_s=numbers["bytes_per_s"],
        time_ms=time_ns / steps / 1e6,
        share=time_ns / max(1, profile.gpu_time_ns),
        reached=reached,
        bound=str(row["bound"]),
        detail="\n".join(lines),
        run=run,
    )


def _label(op: str, shapes: str) -> str:
    """An operator with its sizes, short enough for a label next to a point: `mm 1024×768 · 768×3072`."""
    bare = op.removeprefix("aten::")
    sizes = [tensor.replace(",", "×") for tensor in re.findall(r"\[([\d,]+)\]", shapes)]
    # Compiled code also passes the output tensor, which does not change the GEMM.
    return " ".join((bare, " · ".join(sizes[:2] if bare in ("mm", "bmm") else sizes))).strip()


def _tell_apart(points: Sequence[RoofPoint]) -> list[RoofPoint]:
    """Add the kernel to labels that occur more than once: calls of one GEMM may use several kernels."""
    times = Counter(point.label for point in points)
    return [
        msgspec.structs.replace(point, label=f"{point.label}, {point.detail.splitlines()[1]}")
        if times[point.label] > 1
        else point
        for point in points
    ]


def _notes(profile: Profile, drawn: pl.DataFrame) -> list[str]:
    """What the chart leaves out, as shares of the kernel time."""
    total = max(1, profile.gpu_time_ns)
    unknown = total - int(drawn["time_ns"].sum())
    notes = []
    if drawn.height > MOST_POINTS:
        rest = int(drawn.tail(drawn.height - MOST_POINTS)["time_ns"].sum())
        notes.append(f"showing the {MOST_POINTS} longest; {drawn.height - MOST_POINTS:,} more take {rest / total:.1%}")
    if unknown > 0:
        notes.append(f"not shown: {unknown / total:.1%} of the time, in kernels with unknown FLOPs and bytes")
    return notes
