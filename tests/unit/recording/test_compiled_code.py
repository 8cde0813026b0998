"""Modules of compiled code in a trace."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.recording import tables
from stepscope.recording.compiled_code import name_modules
from stepscope.recording.rows.compiled_code import CompiledCall, CompiledGraph, load_graphs, save_graphs
from stepscope.recording.store import Manifest, Recording

FORWARD = CompiledGraph(
    is_backward=False,
    calls=(
        CompiledCall("triton_poi_fused_add_0", "layers.0.norm"),
        CompiledCall("extern_kernels.mm", "layers.0.up"),
        CompiledCall("triton_poi_fused_add_0", "layers.1.norm"),
        CompiledCall("extern_kernels.mm", "layers.1.up"),
        CompiledCall("torch.ops.stepscope.flash.default", None),
    ),
)
BACKWARD = CompiledGraph(
    is_backward=True,
    calls=(CompiledCall("extern_kernels.mm", "layers.1.up"), CompiledCall("extern_kernels.mm", "layers.0.up")),
)
RUN = "## Call CompiledFxGraph fab ##"


def record(
    *ops: tuple[str, int, int, int], runs: tuple[tuple[int, int, int], ...], as_operators: bool = False
) -> Recording:
    """Operators with thread, start and end, and calls of compiled functions."""
    named = [(RUN, thread, start, end) for thread, start, end in runs]
    columns = ("name", "thread", "start_ns", "end_ns")

    def table(name: str, rows: list[tuple[str, int, int, int]], **more: pl.Expr) -> pl.DataFrame:
        return _complete(name, pl.DataFrame(rows, schema=columns, orient="row").with_columns(process=1, **more))

    return Recording(
        manifest=Manifest(source="pytorch profiler"),
        ops=table("ops", [*ops, *(named if as_operators else [])]),
        ranges=table("ranges", [] if as_operators else named, source=pl.lit("user")),
    )


def modules_of(recording: Recording) -> list[tuple[int, str]]:
    named = recording.ranges.filter(pl.col("source") == "compiled").sort("start_ns")
    return list(named.select("start_ns", pl.col("name").str.strip_prefix("module:")).iter_rows())


STEP = (
    ("triton_poi_fused_add_0", 7, 1, 2),
    ("aten::mm", 7, 3, 6),
    ("aten::mm_inner", 7, 4, 5),
    ("triton_poi_fused_add_0", 7, 6, 7),
    ("aten::mm", 7, 8, 9),
    ("stepscope::flash", 7, 9, 10),
    ("aten::mm", 7, 30, 31),  # outside
    ("aten::mm", 8, 12, 14),
    ("aten::mm", 8, 15, 17),
)


@pytest.mark.parametrize("as_operators", [False, True])
def test_each_call_of_the_same_kernel_has_its_own_module(as_operators: bool) -> None:
    recording = record(*STEP, runs=((7, 0, 20), (8, 11, 20)), as_operators=as_operators)
    named = name_modules(recording, (FORWARD, BACKWARD))
    assert modules_of(named) == [
        (1, "layers.0.norm"),
        (3, "layers.0.up"),
        (6, "layers.1.norm"),
        (8, "layers.1.up"),
        (12, "layers.1.up"),
        (15, "layers.0.up"),
    ]
    assert named.manifest.modules_recorded


def test_operators_without_a_call_and_calls_without_an_operator_are_skipped() -> None:
    strange = [("aten::empty", 7, 2, 3), *(one for one in STEP if one[2] != 6)]
    named = name_modules(record(*strange, runs=((7, 0, 20),)), (BACKWARD, FORWARD))
    assert modules_of(named) == [(1, "layers.0.norm"), (3, "layers.0.up"), (8, "layers.1.up")]


def test_recording_without_compiled_code_stays_as_it_is() -> None:
    recording = record(*STEP, runs=())
    assert name_modules(recording, (FORWARD,)) is recording
    recording = record(*STEP, runs=((7, 0, 20),))
    assert name_modules(recording, ()) is recording


def test_kernels_of_compiled_backward_are_not_recomputed() -> None:
    recording = record(*STEP, ("autograd::engine::evaluate_function: F", 8, 10, 21), runs=((7, 0, 20), (8, 11, 20)))
    launches = [("cudaLaunchKernel", 7, 5, 1), ("cudaLaunchKernel", 8, 13, 2)]
    columns = ("name", "thread", "start_ns", "correlation")
    calls = pl.DataFrame(launches, schema=columns, orient="row").with_columns(end_ns=pl.col("start_ns") + 1)
    kernels = calls.select("correlation", start_ns=pl.col("start_ns") + 40, end_ns=pl.col("start_ns") + 41)
    kernels = kernels.with_columns(name=pl.lit("gemm"), kind=pl.lit("kernel"), device=0, stream=7)
    recording = replace(
        recording,
        launches=_complete("launches", calls.with_columns(process=1)),
        kernels=_complete("kernels", kernels.with_columns(process=1)),
    )
    found = attribute_kernels(name_modules(recording, (FORWARD, BACKWARD)))
    rows = found.sort("start_ns").select("module", "layer", "phase", "recomputed").rows()
    assert rows == [("layers.0.up", 0, "forward", False), ("layers.1.up", 1, "backward", False)]


def _complete(name: str, rows: pl.DataFrame) -> pl.DataFrame:
    empty = tables.empty(name)
    return pl.concat([empty, rows], how="diagonal_relaxed").cast(empty.schema).select(empty.columns)


def test_graphs_are_kept_next_to_a_trace(tmp_path: Path) -> None:
    assert load_graphs(tmp_path) == ()
    save_graphs(tmp_path, (FORWARD, BACKWARD))
    assert load_graphs(tmp_path) == (FORWARD, BACKWARD)
