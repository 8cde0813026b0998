"""The roofline: how close each operator comes to the device's limits, and which limit applies.

The unit is one call of an operator. Its cost follows from its shapes, and its time is that of all the kernels it
launched: a split-K GEMM and the kernel that adds up its parts are one call. A kernel belongs to the innermost operator
around its launch.

An operator takes at least as long as its FLOPs at the device's peak for that precision, and as its bytes at full
bandwidth. The longer of the two is the limit, and `reached` is the share of that speed. More than 100% means that
inputs came from the cache. The peak is that of the units the kernel used: an fp32 GEMM on the CUDA cores is compared
with those, not with the tensor cores it could have used.
"""

import math
import re

import msgspec
import polars as pl

from stepscope import cost
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.hardware import Hardware
from stepscope.spec import ModelShape

# Every kernel takes a few microseconds to start and to drain.
LAUNCH_NS = 5_000
FAR_FROM_LIMIT = 0.3
COUNTED_ENOUGH = 0.95  # of the time in GEMMs, attention and convolutions
COSTLY = ("GEMM", "attention", "convolution")


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs of a step, and their share of what the device could do in the step's time."""

    step_flops: int
    mfu: float | None
    precision: str | None
    source: str  # `formula` or `counted`
    convention: str


def operator_calls(profile: Profile) -> pl.DataFrame:
    """Return one row per call that launched a kernel: op_row, op, shapes, class, short and kernel (of its longest
    kernel), step, recomputed, kernels, time_ns; flops, bytes and op_dtype, null if the cost is unknown; and unit, the
    precision whose peak applies: the arithmetic in the kernel's name, otherwise op_dtype."""
    ops = profile.recording.ops
    owned = profile.kernels.filter(pl.col("op_row").is_not_null() & ~pl.col("class").is_in(["memcpy", "memset"]))
    calls = (
        owned.sort("time_ns", descending=True, maintain_order=True)
        .group_by("op_row", maintain_order=True)
        .agg(
            pl.col("op", "class", "short", "phase", "step", "recomputed").first(),
            unit=pl.col("dtype").first(),
            kernels=pl.len().cast(pl.Int64),
            time_ns=pl.col("time_ns").sum(),
        )
    )
    described = ops.select("shapes", "dtypes", "arguments")[calls["op_row"]] if calls.height else ops.head(0)
    calls = calls.with_columns(described.select("shapes", "dtypes", "arguments"))
    distinct = calls.select("op", "shapes", "dtypes", "arguments").unique()
    rows = [(*key, *_cost_cells(*key)) for key in distinct.iter_rows()]
    known = pl.DataFrame(
        rows,
        schema={**distinct.schema, "flops": pl.Int64, "bytes": pl.Int64, "op_dtype": pl.String},
        orient="row",
    )
    keys = ["op", "shapes", "dtypes", "arguments"]
    costed = calls.join(known, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return costed.with_columns(unit=pl.coalesce("unit", "op_dtype"))


def add_product_sizes(kernels: pl.DataFrame) -> pl.DataFrame:
    """Add batch, m, n and k of GEMMs from `op` and `shapes`, null if unknown."""
    distinct = kernels.select("op", "shapes").unique()
    rows = [(op, shapes, *(cost.product_dims(op or "", shapes) or (None,) * 4)) for op, shapes in distinct.iter_rows()]
    schema = {"op": pl.String, "shapes": pl.String, **dict.fromkeys(("batch", "m", "n", "k"), pl.Int64)}
    sizes = pl.DataFrame(rows, schema=schema, orient="row")
    return kernels.join(sizes, on=["op", "shapes"], how="left", nulls_equal=True, maintain_order="left")


def roofline(profile: Profile) -> pl.DataFrame:
    """Return one row per kind of call (op, shapes, class, short), the largest total time first: calls, kernels,
    time_ns, flops and bytes (of all calls), dtype (whose peak applies), flops_per_s, bytes_per_s, intensity, limit_ns,
    reached, bound."""
    calls = operator_calls(profile)
    grouped = (
        calls.group_by("op", "shapes", "class", "short", maintain_order=True)
        .agg(
            pl.col("unit").first(),
            calls=pl.len().cast(pl.Int64),
            kernels=pl.col("kernels").sum(),
            time_ns=pl.col("time_ns").sum(),
            # Null, not zero, if a call's cost is unknown.
            flops=pl.when(pl.col("flops").is_not_null().all()).then(pl.col("flops").sum()),
            bytes=pl.when(pl.col("bytes").is_not_null().all()).then(pl.col("bytes").sum()),
        )
        .sort("time_ns", "op", descending=[True, False])
    )
    rows = [_judge(row, profile.hardware, on_cpu=profile.on_cpu) for row in grouped.iter_rows(named=True)]
    judged = pl.DataFrame(
        rows,
        schema={"dtype": pl.String, "limit_ns": pl.Float64, "reached": pl.Float64, "bound": pl.String},
        orient="row",
    )
    seconds = pl.col("time_ns") / 1e9
    return pl.concat([grouped, judged], how="horizontal").with_columns(
        flops_per_s=pl.col("flops") / seconds,
        bytes_per_s=pl.col("bytes") / seconds,
        intensity=pl.when(pl.col("bytes") > 0).then(pl.col("flops") / pl.col("bytes")),
    )


def least_ns(hardware: Hardware | None, dtype: str | None, flops: float, moved_bytes: float) -> float | None:
    """Return the least time that any kernel needs for this, None if a limit that matters is unknown."""
    if hardware is None or hardware.bandwidth is None:
        return None
    peak = hardware.peak_flops.get(dtype or "")
    if flops and peak is None:
        return None
    return max(flops / peak if peak else 0.0, moved_bytes / hardware.bandwidth) * 1e9


def measure_use(profile: Profile) -> Utilisation | None:
    """Return the FLOPs and the MFU of a step: from the formula for the built-in model, otherwise counted from operator
    shapes. None if neither is possible: counting part of the work would give a wrong MFU."""
    step_ns = profile.clock.step_ns
    case = profile.recording.manifest.case
    if case is not None and isinstance(case.workload.model, ModelShape):
        workload = case.workload
        forward = cost.forward_flops(case.workload.model, batch=workload.batch, context=workload.context)
        flops = cost.step_flops(forward, workload.mode)
        return _use(profile, flops, step_ns, workload.precision, "formula", cost.FLOP_CONVENTION)
    calls = operator_calls(profile)
    # Recomputed activations do not count as work of the model.
    calls = calls.filter(pl.col("class").is_in(COSTLY) & ~pl.col("recomputed"))
    costly = profile.kernels.filter(pl.col("class").is_in(COSTLY) & ~pl.col("recomputed"))
    counted = calls.filter(pl.col("flops").is_not_null())
    if not counted.height or int(counted["time_ns"].sum()) < COUNTED_ENOUGH * int(costly["time_ns"].sum()):
        return None
    flops = round(counted["flops"].sum() / profile.num_steps)
    by_unit = counted.group_by("unit").agg(pl.col("time_ns").sum()).sort("time_ns", "unit", descending=[True, False])
    longest = by_unit["unit"][0]
    convention = "2 FLOPs per multiply-add, from the shapes of GEMMs, convolutions and fused attention"
    return _use(profile, flops, step_ns, longest, "counted", convention)


def roofline_table(profile: Profile, *, top: int = 20) -> Table:
    """Return the `top` kinds of calls by time."""
    frame = roofline(profile).head(top)
    total = max(1, profile.gpu_time_ns)
    cells: list[tuple[Cell, ...]] = [
        (
            row["op"],
            shorten_shapes(row["shapes"]),
            row["short"],
            row["calls"] / profile.num_steps,
            row["time_ns"] / total,
            row["time_ns"] / row["calls"] / 1e3,
            _scaled(row["flops_per_s"], 1e12) if row["flops"] else None,
            _scaled(row["bytes_per_s"], 1e9),
            row["intensity"],
            row["reached"],
            row["bound"],
        )
        for row in frame.iter_rows(named=True)
    ]
    return Table(
        title="Roofline: operators and the device's limits",
        columns=tuple(
            msgspec.structs.replace(one, label="calls") if one.key == "calls" and not profile.clock.has_steps else one
            for one in _COLUMNS
        ),
        rows=tuple(cells),
        notes=_notes(profile),
    )


_COLUMNS = (
    Column(key="operator", label="operator"),
    Column(key="shapes", label="shapes"),
    Column(key="kernel", label="kernel", detail=True),
    Column(key="calls", label="calls per step", kind="number"),
    Column(key="share", label="GPU time", kind="share"),
    Column(key="time_us", label="µs per call", kind="us"),
    Column(key="tflops_per_s", label="TFLOP/s", kind="number"),
    Column(key="gb_per_s", label="GB/s", kind="number"),
    Column(key="intensity", label="FLOP/byte", kind="number", detail=True),
    Column(key="reached", label="% of limit", kind="share"),
    Column(key="bound", label="bound by"),
)


def _notes(profile: Profile) -> tuple[str, ...]:
    notes = []
    hardware = profile.hardware
    if hardware is None:
        notes.append(f"unknown device limits: `{profile.recording.manifest.device or 'no device name'}`")
    if not profile.recording.manifest.shapes_recorded:
        notes.append("no shapes in this recording: record with record_shapes=True")
    if hardware is not None and (use := measure_use(profile)) is not None:
        share = f", {use.mfu:.1%} of the {use.precision} peak (MFU)" if use.mfu is not None else ""
        flops = f"{use.step_flops / 1e12:.3g} TFLOP {profile.clock.say_per_step}"
        notes.append(f"{flops}{share}; {use.source}: {use.convention}")
    return tuple(notes)


def shorten_shapes(shapes: str | None) -> str | None:
    """Return shapes on one line, without the empty ones of trailing arguments that are not tensors."""
    return re.sub(r"(?:,\[\])+\]$", "]", re.sub(r"\s+", "", shapes)) if shapes else None


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _cost_cells(
    op: str, shapes: str | None, dtypes: str | None, arguments: str | None
) -> tuple[int | None, int | None, str | None]:
    found = cost.operator_cost(op, shapes, dtypes, arguments)
    return (found.flops, found.bytes, found.dtype) if found else (None, None, None)


def _judge(
    row: dict[str, object], hardware: Hardware | None, *, on_cpu: bool
) -> tuple[str | None, float | None, float | None, str]:
    """Return dtype, limit_ns, reached and bound. A short call far from its limit is bound by its launch, except on a
    CPU: there the overhead of the call is not a limit of the device."""
    dtype, flops, moved, time = (row[key] for key in ("unit", "flops", "bytes", "time_ns"))
    calls = row["calls"]
    assert dtype is None or isinstance(dtype, str)
    assert isinstance(time, int)
    assert isinstance(calls, int)
    if not isinstance(flops, int) or not isinstance(moved, int):
        return dtype, None, None, "unknown"
    peaks = hardware.peak_flops if hardware else {}
    if dtype == "fp32" and "tf32" in peaks and flops / max(1, time) * 1e9 > peaks.get("fp32", math.inf):
        dtype = "tf32"  # faster than the CUDA cores: the name does not distinguish the two
    limit = least_ns(hardware, dtype, flops, moved)
    if limit is None or hardware is None or not time:
        return dtype, None, None, "unknown"
    reached = limit / time
    if time / calls < LAUNCH_NS and reached < FAR_FROM_LIMIT:
        return dtype, limit, reached, "unknown" if on_cpu else "launch"
    by_bytes = least_ns(hardware, dtype, 0, moved)
    assert by_bytes is not None
    return dtype, limit, reached, "memory" if by_bytes >= limit else "compute"


def _use(
    profile: Profile, flops: int, step_ns: float, precision: str | None, source: str, convention: str
) -> Utilisation:
    peak = profile.hardware.peak_flops.get(precision or "") if profile.hardware else None
    seconds = step_ns / 1e9
    mfu = flops / seconds / peak if peak and seconds > 0 else None
    if mfu is not None and mfu > 1:  # the operators or the step are not what they seem
        mfu = None
    return Utilisation(step_flops=flops, mfu=mfu, precision=precision, source=source, convention=convention)
