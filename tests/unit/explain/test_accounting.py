"""Device time adds up to the nanosecond, whatever overlaps."""

from itertools import pairwise

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from stepscope.explain.trace.accounting import DeviceSweep, account, account_devices

SCHEMA = {"class": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}


def frame(*rows: tuple[str, int, int]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=SCHEMA, orient="row")


def test_overlap_counts_once() -> None:
    result = account(frame(("GEMM", 10, 30), ("communication", 20, 50), ("copy", 60, 70)), (0, 100))
    assert result.classes == {"GEMM": 10, "communication": 20, "copy": 10}
    assert (result.overlap_ns, result.idle_ns, result.busy_ns) == (10, 50, 50)
    assert (result.communication_hidden_ns, result.communication_exposed_ns) == (10, 20)


def test_two_kernels_of_one_class_overlap_too() -> None:
    result = account(frame(("GEMM", 0, 10), ("GEMM", 5, 15)), (0, 15))
    assert (result.classes, result.overlap_ns, result.idle_ns) == ({"GEMM": 10}, 5, 0)


def test_adjacent_kernels_do_not_overlap() -> None:
    result = account(frame(("GEMM", 0, 10), ("copy", 10, 20), ("copy", 10, 10)), (0, 20))
    assert (result.classes, result.overlap_ns, result.idle_ns) == ({"GEMM": 10, "copy": 10}, 0, 0)


kernels = st.lists(
    st.tuples(st.sampled_from(["GEMM", "copy", "communication"]), st.integers(0, 60), st.integers(0, 40)), max_size=12
)


@given(kernels)
def test_every_nanosecond_is_in_one_row(drawn: list[tuple[str, int, int]]) -> None:
    rows = [(name, start, start + length) for name, start, length in drawn]
    result = account(frame(*rows), (0, 100))
    expected: dict[str, int] = {}
    for moment in range(100):
        running = [name for name, start, end in rows if start <= moment < end]
        key = "idle" if not running else running[0] if len(running) == 1 else "overlap"
        expected[key] = expected.get(key, 0) + 1
    assert result.idle_ns == expected.pop("idle", 0)
    assert result.overlap_ns == expected.pop("overlap", 0)
    assert {name: time for name, time in result.classes.items() if time} == expected
    assert sum(result.classes.values()) + result.overlap_ns + result.idle_ns == result.wall_ns


def test_each_stream_adds_up() -> None:
    rows = frame(("GEMM", 10, 30), ("communication", 20, 50)).with_columns(
        process=pl.lit(1), device=pl.lit(0), stream=pl.Series([7, 20])
    )
    (device,) = account_devices(rows, (0, 100))
    assert {stream: (one.classes, one.idle_ns) for stream, one in device.streams.items()} == {
        7: ({"GEMM": 20}, 80),
        20: ({"communication": 30}, 70),
    }


@given(kernels, st.sets(st.integers(1, 99), max_size=4))
def test_batches_give_the_same_result_as_one_sweep(drawn: list[tuple[str, int, int]], borders: set[int]) -> None:
    rows = [(name, start, start + length) for name, start, length in drawn]
    placed = frame(*rows).with_columns(process=pl.lit(1), device=pl.lit(0), stream=pl.col("start_ns") % 3)
    sweep = DeviceSweep()
    edges = [0, *sorted(borders), 100]
    for low, high in pairwise(edges):
        portion = placed.filter(pl.col("start_ns").is_between(low, high, closed="left"))
        sweep.add(portion, None if high == 100 else high)
    assert sweep.accounts(100) == account_devices(placed, (0, 100))
