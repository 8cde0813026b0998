"""Hardware counters as tables: what each kernel did, and the counters of many cases compared with the formula.

The formula counts every GEMM in full, with two operations per multiply-add. A counter counts what ran: whole tiles, the
part that a causal kernel does not skip, three GEMMs where fp32 is split into tf32, and on the CUDA cores everything
besides GEMMs. A ratio of 1 is therefore a coincidence; look for ratios that stay constant along an axis of the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from stepscope import hardware
from stepscope.cost import attention_flops, softmax_flops
from stepscope.errors import StepscopeError, nearest
from stepscope.explain.kernel_names.vocabulary import CLASSES
from stepscope.explain.trace.attribution.names import classify
from stepscope.findings import Cell, Column, Table
from stepscope.recording.readers.counter_metrics import L1_HIT_RATE, L2_HIT_RATE, PASSES, canonical_counters
from stepscope.recording.store import Recording
from stepscope.spec import RUN_SETTINGS, SHAPE_SETTINGS, Case, ModelShape, Setting, Workload, complete
from stepscope.units import count_noun

DEFAULT_CLASS = "attention"
_US = 1e3
_COUNTED = ("tensor_ops", "fadd", "fmul", "ffma", "dadd", "dmul", "dfma", "dram_read_bytes", "dram_write_bytes")
_RATES = {L1_HIT_RATE: "l1_hit", L2_HIT_RATE: "l2_hit"}
# Kernels with equal values did the same work. For a GEMM this includes its operations on the CUDA cores, which depend
# on its size; those of other kernels depend on the data.
_SHAPE = ("name", "grid", "block", "tensor_ops", "product_flops")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCase:
    """A case of a grid, with its recording or the reason why it has none."""

    name: str
    case: Case
    recording: Recording | None
    reason: str = ""


def choose_classes(asked: str | None) -> tuple[str, ...]:
    """Kernel classes from a comma-separated list, in any case."""
    by_word = {name.lower(): name for name in CLASSES}
    words = [word.strip() for word in (asked or DEFAULT_CLASS).split(",")]
    for word in words:
        if word.lower() not in by_word:
            close = nearest(word.lower(), by_word)
            raise StepscopeError(
                f"unknown kernel class: `{word}`",
                detail=f"expected one of {', '.join(CLASSES)}",
                hint=f"--kernel-class {by_word[close] if close else DEFAULT_CLASS}",
            )
    return tuple(dict.fromkeys(by_word[word.lower()] for word in words))


def has_counters(recording: Recording) -> bool:
    """Return whether the recording has any of the counters that the tables show."""
    return bool(canonical_counters(recording.counters).height)


# --- Kernels of one recording


def counted_kernels(recording: Recording) -> pl.DataFrame:
    """Return the kernels in launch order with `class`, `short`, `grid`, `block`, `time_ns`, the counters and values
    derived from them; null if not measured. Cache hits and lookups are counted in different replays of a kernel, and
    for one of a few microseconds the ratio can be ten times too large: a hit rate above 1 is dropped."""
    kernels = classify(recording.kernels).with_row_index("kernel").cast({"kernel": pl.Int64})
    rates = recording.counters.filter(pl.col("metric").is_in(list(_RATES))).select(
        "kernel", pl.col("metric").replace(_RATES).alias("key"), pl.when(pl.col("value") <= 100).then("value") / 100
    )
    for frame in (canonical_counters(recording.counters), rates):
        wide = frame.pivot(on="key", index="kernel", values="value")
        kernels = kernels.join(wide, on="kernel", how="left", maintain_order="left")
    missing = [name for name in (*_COUNTED, *_RATES.values()) if name not in kernels.columns]
    return kernels.with_columns(
        *(pl.lit(None, pl.Float64).alias(name) for name in missing),
        *(_triple(what).alias(what) for what in ("grid", "block")),
        (pl.col("end_ns") - pl.col("start_ns")).alias("time_ns"),
    ).with_columns(
        (pl.col("fadd") + pl.col("fmul") + 2 * pl.col("ffma")).alias("fp32_flops"),
        (pl.col("dadd") + pl.col("dmul") + 2 * pl.col("dfma")).alias("fp64_flops"),
        (pl.col("dram_read_bytes") + pl.col("dram_write_bytes")).alias("dram_bytes"),
    )


def _triple(what: str) -> pl.Expr:
    return pl.concat_str([pl.col(f"{what}_{axis}") for axis in "xyz"], separator="×")


def kernels_table(recording: Recording, *, top: int | None = None) -> Table:
    """Return one row per group of identical kernels, in launch order, with the counters of one launch. `top` keeps the
    groups that take the most time."""
    product_flops = pl.when(pl.col("class") == "GEMM").then("fp32_flops").alias("product_flops")
    kernels = counted_kernels(recording).with_columns(product_flops)
    values = ("fp32_flops", "fp64_flops", "dram_bytes", "l1_hit", "l2_hit", "time_ns")
    grouped = kernels.group_by(_SHAPE, maintain_order=True).agg(
        pl.col("short", "class").first(), pl.len().cast(pl.Int64).alias("count"), pl.col(values).mean()
    )
    shown = grouped
    if top is not None and grouped.height > top:
        order = pl.col("count") * pl.col("time_ns")
        shown = grouped.filter(order.rank("ordinal", descending=True) <= top)
    bandwidth = _bandwidth(recording)
    return Table(
        title="Counters by kernel",
        columns=_KERNEL_COLUMNS,
        rows=tuple(_kernel_row(row, bandwidth) for row in shown.iter_rows(named=True)),
        notes=_kernel_notes(recording, rest=grouped.height - shown.height, total=grouped.height),
    )


_KERNEL_COLUMNS = (
    Column(key="short", label="kernel"),
    Column(key="class", label="class"),
    Column(key="count", label="launches", kind="count"),
    Column(key="grid", label="grid"),
    Column(key="tensor_ops", label="tensor-core ops", kind="count"),
    Column(key="fp32_flops", label="CUDA-core FLOPs", kind="count"),
    Column(key="tensor_share", label="on tensor cores", kind="share"),
    Column(key="dram_gb_s", label="DRAM GB/s", kind="number"),
    Column(key="dram_share", label="of peak", kind="share"),
    Column(key="l1_hit", label="L1 hits", kind="share"),
    Column(key="l2_hit", label="L2 hits", kind="share"),
    Column(key="time_us", label="µs", kind="us"),
    Column(key="fp64_flops", label="fp64 FLOPs", kind="count", detail=True),
    Column(key="dram_bytes", label="DRAM bytes", kind="bytes", detail=True),
    Column(key="block", label="block", detail=True),
    Column(key="name", label="name", detail=True),
)


def _kernel_row(row: dict[str, Cell], bandwidth: float | None) -> tuple[Cell, ...]:
    tensor, plain, moved, time = (_number(row[key]) for key in ("tensor_ops", "fp32_flops", "dram_bytes", "time_ns"))
    rate = moved / time if moved is not None and time else None  # bytes per nanosecond are GB per second
    share = tensor / (tensor + plain) if tensor is not None and plain is not None and tensor + plain else None
    return (
        row["short"],
        row["class"],
        row["count"],
        row["grid"],
        _whole(tensor),
        _whole(plain),
        share,
        rate,
        rate * 1e9 / bandwidth if rate is not None and bandwidth else None,
        row["l1_hit"],
        row["l2_hit"],
        time / _US if time is not None else None,
        _whole(_number(row["fp64_flops"])),
        _whole(moved),
        row["block"],
        row["name"],
    )


def _number(cell: Cell) -> float | None:
    assert not isinstance(cell, str)
    return cell


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _bandwidth(recording: Recording) -> float | None:
    environment = recording.manifest.environment
    known = environment.hardware if environment else hardware.find(recording.manifest.device)
    return known.bandwidth if known else None


def _kernel_notes(recording: Recording, *, rest: int, total: int) -> tuple[str, ...]:
    passes = recording.counters.filter(metric=PASSES)["value"].max()
    replayed = f"; each kernel was replayed {passes:.0f} times" if isinstance(passes, float) else ""
    return (
        "counters of one launch, in launch order; identical kernels share one row" + replayed,
        "tensor-core ops include padding to full tiles; CUDA-core FLOPs are fp32 additions and multiplications",
        *((f"{count_noun(rest, 'more row')}: --table counters --top {total}",) if rest else ()),
    )


# --- Cases of a grid


def cases_table(cases: Sequence[CountedCase], classes: Sequence[str] = (DEFAULT_CLASS,)) -> Table:
    """Return one row per case and kernel class: the counters of all its launches, the formula, and their ratio."""
    settings = [
        one for one in _SETTINGS if one.name == "context" or len({_read(one, case.case.workload) for case in cases}) > 1
    ]
    totals = [(case, kind, _total(case, kind)) for case in cases for kind in classes]
    has_fp64 = any(total["fp64_flops"] is not None for _, _, total in totals)
    keys = ("launches", "tensor_ops", "fp32_flops", *(("fp64_flops",) if has_fp64 else ()))
    rows = tuple(
        (*(_read(one, case.case.workload) for one in settings), kind, *_case_cells(case.case, kind, total, keys))
        for case, kind, total in totals
    )
    return Table(
        title="Counters compared with the formula",
        columns=(
            *(Column(key=one.name, label=one.label, kind=one.kind) for one in settings),
            Column(key="class", label="kernels"),
            *(Column(key=key, label=_LABELS[key], kind="count") for key in keys),
            Column(key="textbook_flops", label="formula", kind="count"),
            *(
                Column(key=f"{key}_ratio", label=f"{_LABELS[key].split()[0]} / formula", kind="ratio")
                for key in keys[1:]
            ),
            Column(key="notes_flops", label="B·H·(2L²d+3L²)", kind="count", detail=True),
        ),
        rows=rows,
        notes=_case_notes(cases, totals),
    )


_LABELS = {
    "launches": "launches",
    "tensor_ops": "tensor-core ops",
    "fp32_flops": "fp32 FLOPs",
    "fp64_flops": "fp64 FLOPs",
}
_Total = dict[str, int | None]


# Settings that may differ between counted cases, with the mode and the seed last.
_LAST = ("mode", "seed")
_SETTINGS = (
    complete(Setting(help="", label="model"), "model"),
    *(SHAPE_SETTINGS[name] for name in ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "vocab")),
    *(one for name, one in RUN_SETTINGS.items() if "forward" in one.modes and name not in ("device", *_LAST)),
    *(RUN_SETTINGS[name] for name in _LAST),
)


def _read(setting: Setting, workload: Workload) -> Cell:
    if setting.name == "model":  # a model whose shape has no columns
        return None if isinstance(workload.model, ModelShape) else workload.model.name
    return setting.read(workload.model if setting.name in SHAPE_SETTINGS else workload)


def _total(case: CountedCase, kind: str) -> _Total:
    """Return totals over all launches of a class; null if not all were measured, or without a recording."""
    if case.recording is None:
        return dict.fromkeys((*_LABELS, "textbook"))
    kernels = counted_kernels(case.recording).filter(pl.col("class") == kind)
    total: _Total = {"launches": kernels.height}
    for key in ("tensor_ops", "fp32_flops", "fp64_flops"):
        measured = kernels.height and not kernels[key].null_count()
        total[key] = round(kernels[key].sum()) if measured else None
    flops = (case.recording.manifest.forward_flops or {}).get(kind)
    total["textbook"] = flops * case.case.timing.steps if flops is not None else None
    return total


def _case_cells(case: Case, kind: str, total: _Total, keys: Sequence[str]) -> tuple[Cell, ...]:
    textbook = total["textbook"]
    ratios = []
    for key in keys[1:]:
        counted = total[key]
        ratios.append(counted / textbook if textbook and counted is not None else None)
    return (*(total[key] for key in keys), textbook, *ratios, _notes_formula(case) if kind == "attention" else None)


def _notes_formula(case: Case) -> int | None:
    """Return the GEMMs of the causal half, and three operations per softmax element over the full square: an estimate
    from the literature, for the shapes of the built-in model."""
    shape, workload = case.workload.model, case.workload
    if not isinstance(shape, ModelShape):
        return None
    heads, length = shape.num_heads, workload.context
    products = attention_flops(
        batch=workload.batch, heads=heads, queries=length, keys=length, head_dim=shape.head_dim, causal=True
    )
    softmax = (
        softmax_flops(workload.batch * heads * length * length) * 3 // 5
    )  # 3 operations by convention; stepscope counts 5
    return case.timing.steps * shape.num_layers * (products + softmax)


def _case_notes(cases: Sequence[CountedCase], totals: Sequence[tuple[CountedCase, str, _Total]]) -> tuple[str, ...]:
    notes = ["all launches of a class; formula: 2 operations per multiply-add, attention as B·H·4L²·d per layer"]
    absent = {kind for _, kind, total in totals if total["launches"] == 0}
    if "attention" in absent:
        notes.append("no fused attention ran; unfused attention consists of GEMMs and a softmax: --kernel-class GEMM")
    notes.extend(f"{case.name}: {case.reason}" for case in cases if case.recording is None)
    return tuple(notes)
