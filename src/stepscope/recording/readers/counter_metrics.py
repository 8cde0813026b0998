"""The hardware counters that stepscope collects and understands: Nsight Compute's name of each, and ours.

Every additional metric may need another run of every kernel, so there are two lists: `few` has what a kernel computed,
wrote and moved and the cache hit rates; `full` adds double and half precision outside the tensor cores.

`sm__inst_executed_pipe_fp64_op_dmma`, which is sometimes mistaken for the tensor cores, is not here: it counts only the
double-precision tensor pipe and is zero in a Transformer.
"""

import re
from collections.abc import Iterable
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
    """A metric of Nsight Compute. Metrics with the same key add up: a kernel multiplies in one data type."""

    name: str
    meaning: str
    key: CounterKey | None = None  # None for times and rates, which do not add up over kernels
    only_full: bool = False


def _executed(operation: CounterKey, meaning: str, *, only_full: bool = False) -> CounterMetric:
    name = f"sm__sass_thread_inst_executed_op_{operation}_pred_on.sum"
    return CounterMetric(name=name, key=operation, meaning=meaning, only_full=only_full)


DURATION = "gpu__time_duration.sum"
L1_HIT_RATE = "l1tex__t_sector_hit_rate.pct"
L2_HIT_RATE = "lts__t_sector_hit_rate.pct"
PASSES = "profiler__replayer_passes"  # added by Nsight Compute
SECTOR_BYTES = 32

_TENSOR_OPS = (
    ("bf16_dst_fp32", "bf16 inputs, fp32 accumulation"),
    ("fp16", "fp16 inputs"),
    ("tf32_dst_fp32", "tf32 inputs, fp32 accumulation"),
)
METRICS = (
    CounterMetric(name=DURATION, meaning="kernel duration, ns"),
    CounterMetric(name="dram__bytes_read.sum", key="dram_read_bytes", meaning="bytes read from GPU memory"),
    CounterMetric(name="dram__bytes_write.sum", key="dram_write_bytes", meaning="bytes written to GPU memory"),
    CounterMetric(name=L1_HIT_RATE, meaning="L1 cache hit rate, %"),
    CounterMetric(name=L2_HIT_RATE, meaning="L2 cache hit rate, %"),
    CounterMetric(
        name="lts__t_sectors_op_write.sum", key="write_sectors", meaning="32-byte sectors written to the L2 cache"
    ),
    CounterMetric(
        name="sm__inst_executed_pipe_tensor.sum",
        key="tensor_instructions",
        meaning="warp instructions on the tensor cores",
    ),
    *(
        CounterMetric(
            name=f"sm__ops_path_tensor_src_{kind}.sum",
            key="tensor_ops",
            meaning=f"tensor core operations, two per multiply-add, including padding: {what}",
        )
        for kind, what in _TENSOR_OPS
    ),
    CounterMetric(
        name="sm__sass_data_bytes_mem_global_op_st.sum",
        key="store_bytes",
        meaning="bytes written by store instructions",
    ),
    _executed("fadd", "fp32 additions outside the tensor cores, per thread"),
    _executed("fmul", "fp32 multiplications outside the tensor cores, per thread"),
    _executed("ffma", "fp32 multiply-adds outside the tensor cores, per thread; two operations each"),
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
_TENSOR_SOURCE = re.compile(r"^sm__ops_path_tensor_src_(?P<dtype>[a-z]+\d+)\w*\.sum$")
# Metrics that differ between launches of the same work: cycles, and traffic behind the L1 cache. Of several statistics
# of a metric, the first one is enough.
_NOISY = re.compile(
    r"^(?P<base>\w*__cycles_\w+|dram__(?:bytes|sectors)\w*|lts__t_(?:sectors|requests)\w*)\.(?P<what>\w+)$"
)
_STATISTICS = ("sum", "avg", "max")
_SCALES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SCALED = r"^([KMGT])[a-z]"  # base units start with a small letter


def key_of(metric: str) -> CounterKey | None:
    """Return our name for a metric. Sums over SM sub-partitions (`smsp__`) equal sums over SMs."""
    return _KEYS.get(_SUBPARTITION.sub("sm__", metric))


def tensor_dtype_of(metric: str) -> str | None:
    """Return the dtype of the inputs if the metric counts tensor core operations of a single one."""
    match = _TENSOR_SOURCE.match(_SUBPARTITION.sub("sm__", metric))
    return match["dtype"] if match else None


def choose_noisy(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that differ between launches of the same work, one statistic of each."""
    chosen: dict[str, tuple[int, str]] = {}
    for metric in sorted(metrics):
        match = _NOISY.match(metric)
        if match and match["what"] in _STATISTICS:
            found = (_STATISTICS.index(match["what"]), metric)
            chosen[match["base"]] = min(found, chosen.get(match["base"], found))
    return [metric for _, metric in chosen.values()]


def find_exact(counters: pl.DataFrame) -> pl.DataFrame:
    """Return the counters in base units. Nsight Compute rounds the others to two decimals."""
    return counters.filter(~pl.col("unit").str.contains(r"^[A-Z]").fill_null(value=False))


def canonical_counters(counters: pl.DataFrame) -> pl.DataFrame:
    """Return the counters that have a key, with the columns `kernel`, `key` and `value`.

    A metric with both spellings counts once. A kernel has no row for a counter without a number.
    """
    known = {metric: key for metric in counters["metric"].unique() if (key := key_of(metric)) is not None}
    spelled = pl.col("metric").str.replace(_SUBPARTITION.pattern, "sm__")
    prefix = pl.col("unit").str.extract(_SCALED)
    scale = prefix.replace_strict(list(_SCALES), list(_SCALES.values()), default=1, return_dtype=pl.Int64)
    return (
        counters.filter(pl.col("metric").is_in(list(known)), pl.col("value").is_not_null())
        .with_columns(pl.col("metric").replace_strict(known, return_dtype=pl.String).alias("key"), spelled)
        .unique(["kernel", "metric"], keep="first", maintain_order=True)
        .group_by("kernel", "key", maintain_order=True)
        .agg((pl.col("value") * scale).sum())
    )
