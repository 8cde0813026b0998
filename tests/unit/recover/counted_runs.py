"""Recordings of a decoder on an imaginary GPU, whose counters follow laws that the test chooses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from stepscope.findings import Figure, Table
from stepscope.recording import tables
from stepscope.recording.store import Manifest, Recording
from stepscope.recover.study import study
from stepscope.spec import Case, ModelShape, Timing, Workload
from tests.unit.recordings import ADD, GEMM_BF16

TENSOR_OPS, FFMA, STORED = (
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "sm__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "sm__sass_data_bytes_mem_global_op_st.sum",
)
ATTENTION = (
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)"
)
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)"

QKV, HEAD = "query-key-value projection", "LM head"  # the study's names for them

Counters = Mapping[str, float]
# By name in the list below: the kernel's counters in a run.
Law = Callable[[Workload], Counters]
Laws = Mapping[str, Law]


def shape_of(workload: Workload) -> ModelShape:
    assert isinstance(workload.model, ModelShape)
    return workload.model


def case(*, passes: int = 1, **changes: int | str) -> Case:
    """Return a case with two layers, unless changed."""
    shape = {"num_layers": 2, "d_model": 256, "d_ff": 1024, "num_heads": 4, "num_kv_heads": 4, "vocab": 5000}
    run = {name: value for name, value in changes.items() if name not in shape}
    shape |= {name: int(value) for name, value in changes.items() if name in shape}
    model = ModelShape(**shape)  # type: ignore[arg-type]
    workload = Workload(model=model, attention="sdpa", mode="inference", **run)  # type: ignore[arg-type]
    return Case(workload=workload, timing=Timing(steps=passes))


def record(case: Case, laws: Laws, *, kernels: Mapping[str, str] | None = None, duration_ns: int = 1000) -> Recording:
    """Record one or several passes. Kernels without a law store one byte per token."""
    called = {"norm": NORM, "attention": ATTENTION, "add": ADD, **(kernels or {})}
    layer = ["norm", "query_key_value", "attention", "output", "norm", "up", "add", "down"]
    sequence = ["add", *layer * shape_of(case.workload).num_layers, "norm", "head"] * case.timing.steps
    names = [called.get(part, GEMM_BF16) for part in sequence]
    default: Counters = {STORED: case.workload.tokens}
    nothing: Counters = {TENSOR_OPS: 0, FFMA: 0, STORED: 0}
    counted = [{**nothing, **(laws[part](case.workload) if part in laws else default)} for part in sequence]
    place = {part: i for i, part in enumerate(dict.fromkeys(sequence))}  # GEMMs with the same name have different grids
    frame = pl.DataFrame(
        {
            "name": names,
            "start_ns": [i * duration_ns for i in range(len(names))],
            "end_ns": [(i + 1) * duration_ns for i in range(len(names))],
            "kind": ["kernel"] * len(names),
            "grid_x": [1 + place[part] for part in sequence],
        }
    )
    rows = [(i, metric, float(value)) for i, one in enumerate(counted) for metric, value in one.items()]
    counters = pl.DataFrame(rows, schema=["kernel", "metric", "value"], orient="row")
    return Recording(
        manifest=Manifest(source="nsight compute", device="NVIDIA H200", case=case),
        kernels=tables.conform("kernels", frame),
        counters=tables.conform("counters", counters),
    )


def fused_attention(tile: int = 64) -> Law:
    """Causal attention in whole tiles."""

    def count(workload: Workload) -> Counters:
        side = -(-workload.context // tile)
        heads = workload.batch * shape_of(workload).num_heads
        return {TENSOR_OPS: heads * side * (side + 1) // 2 * tile * tile * 4 * shape_of(workload).head_dim}

    return count


def product(workload: Workload) -> Counters:
    return {TENSOR_OPS: 2 * workload.tokens * 3 * shape_of(workload).d_model ** 2, FFMA: 64 * workload.tokens}


def head(workload: Workload) -> Counters:
    return {TENSOR_OPS: 2 * workload.tokens * shape_of(workload).d_model * shape_of(workload).vocab}


def norm(workload: Workload) -> Counters:
    return {STORED: 4 * workload.tokens * shape_of(workload).d_model}


LAWS: Laws = {
    "query_key_value": product,
    "head": head,
    "norm": norm,
    "attention": fused_attention(),
}


def run_all(cases: Sequence[Case], laws: Laws = LAWS) -> list[Table | Figure]:
    return study([record(one, laws) for one in cases])


def find(found: Sequence[Table | Figure], title: str) -> list[dict[str, Any]]:
    (table,) = (one for one in found if one.title.startswith(title) and isinstance(one, Table))
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def follow(found: Sequence[Table | Figure], part: str, counter: str) -> dict[str, Any]:
    (row,) = (
        row for row in find(found, "Sensitivity") if row["part"] == part and counter in row["counters"].split(", ")
    )
    return row


def notes_of(found: Sequence[Table | Figure]) -> str:
    first = found[0]
    assert isinstance(first, Table)
    return "\n".join(first.notes)


GRID = [
    *(case(context=context) for context in (128, 256, 512)),
    case(context=128, batch=8),
    case(context=128, d_model=512),
    case(context=128, num_layers=4),
    case(context=128, vocab=20_000),
]
