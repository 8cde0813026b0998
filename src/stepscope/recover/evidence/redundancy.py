"""Numbers that Nsight Compute reports more than once: a single one that was edited contradicts the others.

Every counter comes with its sum, average, minimum and maximum over the units of the GPU, and every launch with its grid
and block in several columns. A file that has only some of these columns is checked with what it has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

_STATISTIC = r"^(?P<counter>\w+)\.(?P<what>avg|max|min|sum)$"
_OF_PROFILER = "profiler__"  # averages over passes, whose number varies
_WHATS = ("avg", "max", "min", "sum")
_DECIMALS = 0.0051  # values are printed with two decimals
_RELATIVE = 1e-9
_FEWEST_LIKE = 3  # launches that must agree on the number of units before another one contradicts them
_DEVICE_NAME = "device__attribute_display_name"
_PER_DEVICE = ("device__attribute_multiprocessor_count", "launch__sm_count")
_OF_OCCUPANCY = (
    "block_size",
    "registers_per_thread",
    "occupancy_limit_registers",
    "shared_mem_per_block",
    "shared_mem_per_block_driver",
    "shared_mem_per_block_static",
    "shared_mem_per_block_dynamic",
)
# A multiprocessor has this many registers for four schedulers, and allocates them to warps in units.
_REGISTERS, _SCHEDULERS, _WARP, _REGISTER_UNIT = 65_536, 4, 32, 256
_MOST_IRREGULAR = 0.1  # share of launches that break a rule, above which it does not apply to this GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Two values in one row of the file, or in rows about one device, that cannot both be true."""

    row: int  # of the kernel
    expected: str
    seen: str


def find_flaws(kernels: pl.DataFrame, counters: pl.DataFrame) -> list[Flaw]:
    """Return the flaws of these kernels, which have their position in the table in the column `row`."""
    counters = counters.filter(pl.col("kernel").is_in(kernels["row"].implode()))
    found = [*_check_devices(counters), *_check_launches(kernels, counters), *_check_occupancy(counters)]
    return sorted([*found, *_check_statistics(counters)], key=lambda flaw: flaw.row)


def _check_devices(counters: pl.DataFrame) -> Iterator[Flaw]:
    """All kernels of a stream run on the same device."""
    names = counters.filter(pl.col("metric") == _DEVICE_NAME).select("kernel", "metric", pl.col("text").alias("said"))
    sizes = counters.filter(pl.col("metric").is_in(_PER_DEVICE)).select(
        "kernel", "metric", pl.col("value").cast(pl.Int64, strict=False).cast(pl.String).alias("said")
    )
    for (metric,), rows in pl.concat([names, sizes]).group_by("metric", maintain_order=True):
        usual = str(rows["said"].drop_nulls().mode(maintain_order=True).first())
        for kernel, said in rows.filter(pl.col("said") != pl.lit(usual)).select("kernel", "said").iter_rows():
            yield Flaw(row=kernel, expected=f"{metric} {usual}, as in the other kernels of its stream", seen=str(said))


def _check_launches(kernels: pl.DataFrame, counters: pl.DataFrame) -> Iterator[Flaw]:
    grid, block = (_product([f"{what}_{axis}" for axis in "xyz"]) for what in ("grid", "block"))
    expected = {"launch__grid_size": grid, "launch__block_size": block, "launch__thread_count": grid * block}
    expected |= {f"launch__{what}_dim_{axis}": pl.col(f"{what}_{axis}") for what in ("grid", "block") for axis in "xyz"}
    said = counters.filter(pl.col("metric").is_in(list(expected)), pl.col("value").is_not_null())
    for metric, value in expected.items():
        rows = said.filter(pl.col("metric") == metric).join(
            kernels.select(pl.col("row").cast(pl.Int64).alias("kernel"), value.cast(pl.Int64).alias("follows")),
            on="kernel",
        )
        for kernel, follows, seen in (
            rows.filter(pl.col("follows") != pl.col("value")).select("kernel", "follows", "value").iter_rows()
        ):
            yield Flaw(row=kernel, expected=f"{metric} {follows:,} for its grid and block", seen=f"{seen:,.0f}")


def _check_occupancy(counters: pl.DataFrame) -> Iterator[Flaw]:
    """Registers and shared memory also decide how many blocks fit on a multiprocessor. Rules that a GPU may not follow
    are only used if nearly all launches do."""
    column = {name: pl.col(f"launch__{name}") for name in _OF_OCCUPANCY}
    said = counters.filter(pl.col("metric").is_in([f"launch__{name}" for name in _OF_OCCUPANCY]))
    wide = said.pivot(on="metric", index="kernel", values="value", aggregate_function="first")
    if len(wide.columns) <= len(_OF_OCCUPANCY):
        return
    warps = (column["block_size"] / _WARP).ceil()
    each = (column["registers_per_thread"] * _WARP / _REGISTER_UNIT).ceil() * _REGISTER_UNIT
    shared = column["shared_mem_per_block_driver"] + column["shared_mem_per_block_static"]
    rules = {
        "occupancy_limit_registers": (_REGISTERS / each / _SCHEDULERS).floor() * _SCHEDULERS // warps,
        "shared_mem_per_block": shared + column["shared_mem_per_block_dynamic"],
    }
    for name, follows in rules.items():
        rows = wide.select("kernel", follows.alias("follows"), column[name].alias("seen")).drop_nulls()
        wrong = rows.filter(pl.col("follows") != pl.col("seen"))
        if wrong.height <= _MOST_IRREGULAR * rows.height:
            for kernel, expected, seen in wrong.iter_rows():
                what = "registers" if "registers" in name else "shared memory"
                yield Flaw(row=kernel, expected=f"launch__{name} {expected:,.0f} for its {what}", seen=f"{seen:,.0f}")


def _product(columns: list[str]) -> pl.Expr:
    return pl.col(columns[0]).cast(pl.Int64) * pl.col(columns[1]) * pl.col(columns[2])


def _check_statistics(counters: pl.DataFrame) -> Iterator[Flaw]:
    """The sum is the average times the number of units, which is the same in every launch."""
    parts = pl.col("metric").str.extract_groups(_STATISTIC).alias("parts")
    rows = (
        counters.filter(pl.col("value").is_not_null(), ~pl.col("metric").str.starts_with(_OF_PROFILER))
        .with_columns(parts)
        .unnest("parts")
        .filter(pl.col("counter").is_not_null())
    )
    if not rows.height:
        return
    # Statistics in different units are rounded differently.
    rows = rows.filter(pl.col("unit").n_unique().over("counter") == 1)
    wide = rows.pivot(on="what", index=["kernel", "counter"], values="value", aggregate_function="first")
    wide = wide.with_columns(pl.lit(None, pl.Float64).alias(what) for what in _WHATS if what not in wide.columns)
    units = (pl.col("sum") / pl.col("avg")).round()
    usual = (
        wide.filter(pl.col("avg") > 1)
        .group_by("counter")
        .agg(units.mode().min().alias("units"), pl.len().alias("launches"))
        .filter(pl.col("launches") >= _FEWEST_LIKE)
    )
    wide = wide.join(usual, on="counter", how="left")
    slack = _DECIMALS * (1 + pl.col("units").fill_null(1)) + _RELATIVE * pl.col("sum").abs().fill_null(0)
    is_sum = (pl.col("sum") - pl.col("avg") * pl.col("units")).abs() <= slack
    is_between = (pl.col("avg") >= pl.col("min") - _DECIMALS) & (pl.col("avg") <= pl.col("max") + _DECIMALS)
    bad = wide.filter(~is_sum.fill_null(value=True) | ~is_between.fill_null(value=True))
    for kernel, counter, units_, *values in bad.select("kernel", "counter", "units", *_WHATS).iter_rows():
        known = [f"{what} {value:,.2f}" for what, value in zip(_WHATS, values, strict=True) if value is not None]
        expected = f"{counter} that agrees with itself" + (f" over {units_:,.0f} units" if units_ else "")
        yield Flaw(row=kernel, expected=expected, seen=", ".join(known))
