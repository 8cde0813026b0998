"""The hardware counters that stepscope collects and understands: Nsight Compute's name of each, and ours.

Every metric more may be another run of every kernel, so there are two lists: `few`, which say what a kernel computed,
wrote and moved and how the caches did, and `full`, with double and half precision outside of the tensor cores besides.

`sm__inst_executed_pipe_fp64_op_dmma`, which is at times taken for the tensor cores, is not here: it is the tensor pipe
of double precision alone, and stands at zero in a Transformer.
"""

import re
from typing import Literal

import msgspec
import polars as pl

# In operations, warp instructions, thread instructions, bytes, sectors of 32 bytes.
CounterKey = Literal[
    "tensor_ops",
    "tensor_instructions",
    "fadd",
    "fmul",
    "ffma",
    "dadd",
    "dmul",
    "dfma",
    "hadd",
    "hmul",
    "hfma",
    "store_bytes",
    "write_sectors",
    "dram_read_bytes",
    "dram_write_bytes",
]


class CounterMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of Nsight Compute. Several with one key add up: a kernel does its products in one data type."""

    name: str
    meaning: str
    key: CounterKey | None = None  # None: a time or a rate, which does not add up over kernels
    only_full: bool = False


def _executed(operation: CounterKey, meaning: str, *, only_full: bool = False) -> CounterMetric:
    name = f"sm__sass_thread_inst_executed_op_{operation}_pred_on.sum"
    return CounterMetric(name=name, key=operation, meaning=meaning, only_full=only_full)


DURATION = "gpu__time_duration.sum"
L1_HIT_RATE = "l1tex__t_sector_hit_rate.pct"
L2_HIT_RATE = "lts__t_sector_hit_rate.pct"
PASSES = "profiler__replayer_passes"  # Nsight Compute adds it by itself

_TENSOR_OPS = (
    ("bf16_dst_fp32", "bf16 products summed in fp32"),
    ("fp16", "fp16 products"),
    ("tf32_dst_fp32", "tf32 products summed in fp32"),
)
METRICS = (
    CounterMetric(name=DURATION, meaning="how long the kernel took, ns"),
    CounterMetric(name="dram__bytes_read.sum", key="dram_read_bytes", meaning="bytes read from the GPU's memory"),
    CounterMetric(name="dram__bytes_write.sum", key="dram_write_bytes", meaning="bytes written to the GPU's memory"),
    CounterMetric(name=L1_HIT_RATE, meaning="sectors found in the L1 cache, %"),
    CounterMetric(name=L2_HIT_RATE, meaning="sectors found in the L2 cache, %"),
    CounterMetric(
        name="lts__t_sectors_op_write.sum", key="write_sectors", meaning="sectors of 32 bytes written to the L2 cache"
    ),
    CounterMetric(
        name="sm__inst_executed_pipe_tensor.sum",
        key="tensor_instructions",
        meaning="instructions of a warp on the tensor cores",
    ),
    *(
        CounterMetric(
            name=f"sm__ops_path_tensor_src_{kind}.sum",
            key="tensor_ops",
            meaning=f"operations on the tensor cores, two a multiply-add, padding included: {what}",
        )
        for kind, what in _TENSOR_OPS
    ),
    CounterMetric(
        name="sm__sass_data_bytes_mem_global_op_st.sum", key="store_bytes", meaning="bytes in instructions that store"
    ),
    _executed("fadd", "fp32 additions of a thread, outside of the tensor cores"),
    _executed("fmul", "fp32 multiplications, the same"),
    _executed("ffma", "fp32 multiply-adds, the same; two operations each"),
    _executed("dadd", "fp64 additions", only_full=True),
    _executed("dmul", "fp64 multiplications", only_full=True),
    _executed("dfma", "fp64 multiply-adds", only_full=True),
    _executed("hadd", "half-precision additions", only_full=True),
    _executed("hmul", "half-precision multiplications", only_full=True),
    _executed("hfma", "half-precision multiply-adds", only_full=True),
)
FEW: tuple[str, ...] = tuple(metric.name for metric in METRICS if not metric.only_full)
FULL: tuple[str, ...] = tuple(metric.name for metric in METRICS)

_KEYS: dict[str, CounterKey] = {metric.name: metric.key for metric in METRICS if metric.key is not None}
_SUBPARTITION = re.compile(r"^smsp__")
_SCALES = {"Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}


def key_of(metric: str) -> CounterKey | None:
    """Our name for a metric. Sums over an SM's four parts (`smsp__`) are the same sums."""
    return _KEYS.get(_SUBPARTITION.sub("sm__", metric))


def canonical_counters(counters: pl.DataFrame) -> pl.DataFrame:
    """Of a recording's `counters` those that have a key, as the columns `kernel`, `key` and `value`, one row each.

    A metric under both spellings counts once, and what a kernel has no number for has no row.
    """
    known = {metric: key for metric in counters["metric"].unique() if (key := key_of(metric)) is not None}
    spelled = pl.col("metric").str.replace(_SUBPARTITION.pattern, "sm__")
    scale = pl.col("unit").replace_strict(list(_SCALES), list(_SCALES.values()), default=1, return_dtype=pl.Int64)
    return (
        counters.filter(pl.col("metric").is_in(list(known)), pl.col("value").is_not_null())
        .with_columns(pl.col("metric").replace_strict(known, return_dtype=pl.String).alias("key"), spelled)
        .unique(["kernel", "metric"], keep="first", maintain_order=True)
        .group_by("kernel", "key", maintain_order=True)
        .agg((pl.col("value") * scale).sum())
    )
