"""Modules of compiled code in a trace."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.recording import tables
from stepscope.recording.compiled_code import name_modules, say_unknown_runs
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


def replace_key(graph: CompiledGraph, key: str) -> CompiledGraph:
    return CompiledGraph(is_backward=graph.is_backward, key=key, calls=graph.calls)


def record(
    *ops: tuple[str, int, int, int],
    runs: tuple[tuple[int, int, int], ...],
    as_operators: bool = False,
    key: str | None = None,
    calls: tuple[tuple[int, int, int, str], ...] = (),
) -> Recording:
    """Operators with thread, start and end, calls of compiled functions, and of modules."""
    named = [(f"## Call CompiledFxGraph {key} ##", thread, start, end) for thread, start, end in runs]
    called = [(f"module:{name}", thread, start, end) for thread, start, end, name in calls]
    columns = ("name", "thread", "start_ns", "end_ns")

    def table(name: str, rows: list[tuple[str, int, int, int]], **more: pl.Expr) -> pl.DataFrame:
        return _complete(name, pl.DataFrame(rows, schema=columns, orient="row").with_columns(process=1, **more))

    return Recording(
        manifest=Manifest(source="pytorch profiler"),
        ops=table("ops", [*ops, *(named if as_operators else [])]),
        ranges=table("ranges", called if as_operators else [*called, *named], source=pl.lit("user")),
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


def _rename(graph: CompiledGraph, old: str, new: str) -> CompiledGraph:
    calls = tuple(CompiledCall(one.kernel, one.module and one.module.replace(old, new)) for one in graph.calls)
    return CompiledGraph(is_backward=graph.is_backward, key=graph.key, calls=calls)


def test_the_key_tells_which_graph_ran() -> None:
    recording = record(*STEP, runs=((7, 0, 20),), key="fab")
    mine, other = replace_key(FORWARD, "fab"), _rename(replace_key(FORWARD, "fac"), "layers", "critic")
    assert modules_of(name_modules(recording, (other, mine, FORWARD)))[0] == (1, "layers.0.norm")
    assert name_modules(recording, (FORWARD,)) is recording


def test_of_graphs_that_may_all_have_run_only_what_is_the_same_is_taken() -> None:
    recording = record(*STEP, runs=((7, 0, 20),))
    found = modules_of(name_modules(recording, (FORWARD, _rename(FORWARD, "layers.1", "critic"))))
    assert found == [(1, "layers.0.norm"), (3, "layers.0.up")]


# layers.0.norm, layers.0.up, and a call without a module
LAYER = CompiledGraph(is_backward=False, calls=(*FORWARD.calls[:2], FORWARD.calls[4]))


@pytest.mark.parametrize(
    ("caller", "names"),
    [
        ("layers.3", ["layers.3.norm", "layers.3.up"]),
        ("layers.0", ["layers.0.norm", "layers.0.up"]),
        ("(Model)", ["layers.0.norm", "layers.0.up"]),
        ("layers.0.up", ["layers.0.up"]),  # what is not inside the caller is unknown
        ("layers.0.up.0", []),
        ("layers.0.3", []),
        ("decoder.3", []),
    ],
)
def test_code_of_one_layer_that_runs_for_another_has_the_modules_of_that_one(caller: str, names: list[str]) -> None:
    recording = record(*STEP[:6], runs=((7, 0, 20),), calls=((7, 0, 21, caller),))
    assert [name for _, name in modules_of(name_modules(recording, (LAYER,)))] == names


@pytest.mark.parametrize(
    ("calls", "num_known"),
    [
        ([(7, 0, 40, "(Model)")], 0),  # runs twice: for two layers, or twice for one
        ([(7, 0, 20, "(Model)"), (7, 21, 40, "(Model)")], 4),  # two steps of a model with a graph break
        ([(7, 0, 20, "layers.0"), (7, 21, 40, "layers.1")], 4),
        ([], 0),
    ],
    ids=["twice", "once-per-call", "in-layers", "outside"],
)
def test_code_of_one_layer_that_runs_outside_may_run_for_any(
    calls: list[tuple[int, int, int, str]], num_known: int
) -> None:
    later = [(name, thread, start + 20, end + 20) for name, thread, start, end in STEP[:6]]
    recording = record(*STEP[:6], *later, runs=((7, 0, 20), (7, 21, 40)), calls=tuple(calls))
    assert len(modules_of(name_modules(recording, (LAYER,)))) == num_known


def test_the_caller_is_the_innermost_module_that_is_open() -> None:
    later = [(name, thread, start + 10, end + 10) for name, thread, start, end in STEP[:6]]
    calls = ((7, 0, 40, "(Model)"), (7, 1, 10, "layers.1"), (7, 10, 31, "layers.3"), (7, 31, 39, "layers.5"))
    recording = record(*later, runs=((7, 10, 30),), calls=calls)
    found = modules_of(name_modules(recording, (LAYER,)))
    assert [name for _, name in found] == ["layers.3.norm", "layers.3.up"]


@pytest.mark.parametrize(
    ("repeated", "name"),
    [((), "layers.3.up"), (((8, 10, 21, "layers.1"),), "layers.1.up")],
    ids=["backward", "forward-again"],
)
def test_in_backward_the_caller_is_that_of_forward(repeated: tuple[tuple[int, int, int, str], ...], name: str) -> None:
    """Unless a checkpoint calls the module again."""
    recording = record(
        *STEP,
        ("CompiledFunction", 7, 0, 3),
        ("OtherFunction", 7, 5, 8),
        ("Other", 8, 9, 22),
        runs=((8, 11, 20),),
        calls=((7, 0, 4, "layers.3"), (7, 4, 9, "layers.4"), *repeated),
    )
    node = ("autograd::engine::evaluate_function: CompiledFunctionBackward", 8, 10, 21)
    recording = replace(recording, ops=pl.concat([recording.ops, record(node, runs=()).ops]))
    number = (
        pl.when(pl.col("name") == "OtherFunction").then(6).when(pl.col("name").str.contains("Function|^Other$")).then(5)
    )
    in_backward = pl.when(pl.col("thread") == 8).then(1)
    ops = recording.ops.with_columns(sequence=number, forward_thread=in_backward.cast(pl.Int64))
    backward = CompiledGraph(is_backward=True, calls=BACKWARD.calls[1:])
    found = modules_of(name_modules(replace(recording, ops=ops), (backward,)))
    assert [name for _, name in found] == [name]


def test_runs_without_modules_are_said() -> None:
    recording = record(*STEP, runs=((7, 0, 20), (8, 11, 20)))
    assert say_unknown_runs(recording, (FORWARD,)) == ()
    (said,) = say_unknown_runs(recording, ())
    assert said.startswith("modules are unknown in 2 of 2 calls of compiled code")
    assert say_unknown_runs(record(*STEP, runs=()), ()) == ()


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
