"""Kernels of CUDA graphs belong to the calls of compiled code that launched them, if that is certain."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.explain.trace.module_tree import add_up_modules
from stepscope.explain.trace.profile import coverage_in_graphs, make_profile
from stepscope.explain.trace.profile_tables import headline
from stepscope.explain.trace.summary import summarise
from stepscope.recording import tables
from stepscope.recording.compiled_code import keep_calls
from stepscope.recording.readers import kineto
from stepscope.recording.rows.compiled_code import CompiledCall, CompiledGraph
from stepscope.recording.store import Recording, load, save
from tests.unit.recordings import ADD, COPY, FOREACH, GEMM_BF16, SOFTMAX, Timeline, as_replays

FIXTURES = Path(__file__).parents[2] / "fixtures"
MM, SORT, CUSTOM = "extern_kernels.mm", "torch.ops.aten.sort.default", "torch.ops.mine.scan.default"
NORM, ACT, LAST = "triton_per_fused_mean_mul_0", "triton_poi_fused_gelu_1", "triton_red_fused_sum_2"
SPLIT_K = "void cublasLt::splitKreduce_kernel<32>(float*)"

Calls = Sequence[tuple[str, str | None]]
Found = list[tuple[str | None, str | None]]  # module, and how it is known


def layer(number: int, model: str = "") -> Calls:
    place = f"{model}layers.{number}"
    return [(NORM, f"{place}.norm"), (MM, f"{place}.up"), (ACT, f"{place}.act"), (MM, f"{place}.down")]


KERNELS = [NORM, GEMM_BF16, ACT, GEMM_BF16]  # of a layer
FORWARD: Calls = [*layer(0), *layer(1), (LAST, "head")]
REPLAYED = [*KERNELS * 2, LAST]


def code(calls: Calls, key: str | None = "a", *, is_backward: bool = False) -> CompiledGraph:
    return CompiledGraph(key=key, is_backward=is_backward, calls=tuple(CompiledCall(*call) for call in calls))


def record(
    kernels: Sequence[str],
    *graphs: CompiledGraph,
    key: str | None = None,
    caller: str | None = None,
    phase: str | None = "forward",
    nodes: Sequence[int] | None = None,
) -> Recording:
    """The replay of a graph by the module `caller`, inside a call of the compiled function with this key, if any."""
    timeline = Timeline()
    run = nullcontext() if key is None else timeline.range(f"## Call CompiledFxGraph {key} ##")
    with (
        nullcontext() if phase is None else timeline.phase(phase),
        nullcontext() if caller is None else timeline.module(caller),
        run,
    ):
        timeline.replay(kernels, **({} if nodes is None else {"graph_node": nodes}))
    return keep_calls(timeline.record(), graphs)


def find(recording: Recording) -> Found:
    kernels = attribute_kernels(recording).filter(launched="graph").sort("start_ns")
    return [(module if way else None, way) for module, way in kernels.select("module", "matched").iter_rows()]


def named(calls: Calls | Sequence[str | None]) -> Found:
    modules = [one if isinstance(one, str) or one is None else one[1] for one in calls]
    return [(module, "compiled" if module else None) for module in modules]


@pytest.mark.parametrize("key", ["a", None])
def test_each_kernel_belongs_to_the_module_of_its_call(tmp_path: Path, key: str | None) -> None:
    """Inside a call of the compiled function, as with `reduce-overhead`, and in a graph that the script captured."""
    save(record(REPLAYED, code(FORWARD), key=key, caller="(Model)"), tmp_path / "run")
    recording = load(tmp_path / "run")
    assert find(recording) == named(FORWARD)
    found = attribute_kernels(recording)
    assert found["layer"].to_list() == [0] * 4 + [1] * 4 + [None]
    assert found["op_row"].null_count() == found.height
    profile = make_profile(recording)
    assert coverage_in_graphs(profile) == pytest.approx({"phase": 1, "layer": 8 / 9, "module": 1, "operator": 0})
    assert profile.coverage()["module"] == 1
    assert "100.0% from the code that the compiler generated" in headline(profile)
    assert [(one.matched, one.count) for one in summarise(profile, ()).graphs] == [("compiled", 9)]
    labels = {(node.label, len(node.copies)) for node in add_up_modules(profile.kernels).children}
    assert labels == {("layers.*", 2), ("head", 1)}


def test_numbers_of_nodes_are_the_order_of_the_capture_and_time_otherwise() -> None:
    order = [1, 0, 2, 3, 5, 4, 6, 7, 8]  # branches of a graph run in parallel
    swapped = record([REPLAYED[place] for place in order], code(FORWARD), nodes=order)
    assert find(swapped) == named([FORWARD[place] for place in order])
    assert find(record(REPLAYED, code(FORWARD), nodes=list(range(9))[::-1])) == named(FORWARD)


@pytest.mark.parametrize("key", ["a", None])
@pytest.mark.parametrize(
    "replayed",
    [
        [*REPLAYED[:4], *REPLAYED[5:]],  # a generated kernel is missing
        [*REPLAYED, LAST],  # there is one more
        [*REPLAYED[:-1], "triton_red_fused_sum_3"],  # another
        [*REPLAYED[:2], LAST, *REPLAYED[3:8], ACT],  # another order
        [GEMM_BF16, COPY, GEMM_BF16, SOFTMAX],  # none
    ],
)
def test_other_generated_kernels_are_other_code(replayed: list[str], key: str | None) -> None:
    assert set(find(record(replayed, code(FORWARD), key=key))) == {(None, None)}


def test_few_names_may_be_equal_by_chance() -> None:
    calls: Calls = [(NORM, "encoder"), (ACT, "encoder"), (LAST, "decoder")]
    replayed = [name for name, _ in calls]
    assert set(find(record(replayed, code(calls)))) == {(None, None)}
    assert find(record(replayed, code(calls), key="a")) == named(calls)


def test_code_that_was_not_seen_has_no_modules() -> None:
    assert set(find(record(REPLAYED, code(FORWARD), key="b"))) == {(None, None)}


def test_shapes_have_code_of_their_own() -> None:
    other = [(NORM, "embedding"), (ACT, "layers.0"), (LAST, "layers.1"), (NORM, "layers.2"), (ACT, "head")]
    graphs = code(FORWARD, "a"), code(other, "b")
    assert find(record([name for name, _ in other], *graphs)) == named(other)
    assert find(record(REPLAYED, *graphs)) == named(FORWARD)


def test_what_differs_between_equal_codes_stays_unknown() -> None:
    """Two models with equal code have equal keys as well."""
    one, two = ([*layer(0, name), *layer(1, name), (LAST, "head")] for name in ("actor.", "critic."))
    for key in ("a", None):
        found = find(record(REPLAYED, code(one), code(two), key=key))
        assert found == [*named([None] * 8), ("head", "compiled")]
    assert find(record(REPLAYED, code(one, "a"), code(two, "b"), key="b")) == named(two)


def test_code_of_either_pass_shows_no_phase() -> None:
    recording = record(REPLAYED, code(FORWARD), code(FORWARD, is_backward=True), phase=None)
    assert find(recording) == named(FORWARD)
    assert attribute_kernels(recording)["phase"].null_count() == len(REPLAYED)


BACKWARD: Calls = [(MM, "head"), (LAST, "layers.1"), (MM, "layers.1.up"), (NORM, "layers.0"), (ACT, "embedding")]


class TestSeveralCodes:
    """A graph that the script captured may have several compiled functions, and other work between them."""

    def test_forward_and_backward(self) -> None:
        loss = [GEMM_BF16, SOFTMAX, ADD, GEMM_BF16]
        replayed = [COPY, *REPLAYED, *loss, LAST, GEMM_BF16, NORM, ACT, FOREACH, FOREACH]
        graphs = code([*FORWARD, (MM, "head")]), code(BACKWARD, "b", is_backward=True)
        recording = record(replayed, *graphs)
        seam: list[str | None] = ["head", None, None, "head"]
        expected = [None, *(module for _, module in FORWARD), *seam, *(module for _, module in BACKWARD[1:])]
        assert find(recording) == named([*expected, None, None])
        kernels = attribute_kernels(recording).sort("start_ns")
        assert kernels["phase"].to_list() == ["forward"] * 13 + ["backward"] * 5 + ["forward"] * 2
        alone = attribute_kernels(record(replayed, *graphs, phase=None)).sort("start_ns")
        assert alone["phase"].to_list() == [None, *["forward"] * 10, None, None, *["backward"] * 5, None, None]

    def test_nothing_runs_between_two_codes(self) -> None:
        graphs = code([*FORWARD, (MM, "decoder")]), code([(MM, "loss"), *BACKWARD[1:]], "b", is_backward=True)
        replayed = [*REPLAYED, GEMM_BF16, GEMM_BF16, LAST, GEMM_BF16, NORM, ACT]
        expected = [*FORWARD, (MM, "decoder"), (MM, "loss"), *BACKWARD[1:]]
        assert find(record(replayed, *graphs)) == named(expected)

    def test_code_that_only_follows_code_that_never_ran(self) -> None:
        whole: Calls = [*FORWARD, (ACT, "loss")]
        parts = [(ACT, "other"), (NORM, "other")], [(ACT, "other"), (LAST, "other"), (ACT, "other")]
        replayed = [*REPLAYED, ACT]
        assert find(record(replayed, code(whole), *map(code, parts))) == named(whole)

    def test_names_that_two_codes_share_follow_from_the_others(self) -> None:
        """Only one way explains all of the kernels."""
        first: Calls = [(NORM, "embedding"), (ACT, "embedding"), (LAST, "layers.0")]
        rest: Calls = [(LAST, "layers.1"), (ACT, "head")]
        leads_nowhere: Calls = [(NORM, "other"), (ACT, "other")]
        never_reached: Calls = [(ACT, "other"), (LAST, "other")]
        graphs = [code(calls) for calls in (first, rest, leads_nowhere, never_reached)]
        assert find(record([name for name, _ in (*first, *rest)], *graphs)) == named([*first, *rest])

    def test_code_that_runs_twice(self) -> None:
        """For two batches if it is that of the whole model. Otherwise, two modules may share it."""
        assert find(record(REPLAYED * 2, code(FORWARD))) == named([*FORWARD, *FORWARD])
        calls = [*layer(0, "actor."), *layer(1, "actor."), (LAST, "actor.head")]
        assert find(record(REPLAYED, code(calls))) == named(calls)
        assert set(find(record(REPLAYED * 2, code(calls)))) == {(None, None)}
        assert find(record(REPLAYED * 2, code(calls), caller="actor")) == named([*calls, *calls])

    def test_two_ways_to_divide_the_kernels(self) -> None:
        """A B C D is A B and C D, or A and B C D."""
        one, two = [(NORM, "a"), (ACT, "b")], [(LAST, "c"), ("triton_x", "d")]
        three, four = [(NORM, "a")], [(ACT, "x"), (LAST, "c"), ("triton_x", "y")]
        graphs = [code(calls) for calls in (one, two, three, four)]
        found = find(record([NORM, ACT, LAST, "triton_x"], *graphs))
        assert found == named(["a", None, "c", None])


Q: Calls = [(MM, "layers.0.q")]
Q_AND_K: Calls = [*Q, (MM, "layers.0.k")]


class TestBetweenGeneratedKernels:
    @staticmethod
    def between(calls: Calls, *kernels: str) -> list[str | None]:
        graph = code([(NORM, "embedding"), *calls, (ACT, "head")])
        return [module for module, _ in find(record([NORM, *kernels, ACT], graph, key="a"))[1:-1]]

    def test_one_call_has_all_of_them(self) -> None:
        assert self.between(Q, GEMM_BF16, SPLIT_K) == ["layers.0.q"] * 2

    def test_a_kernel_that_nothing_called_is_unknown(self) -> None:
        assert self.between([], COPY) == [None]

    def test_calls_have_their_kernels_in_order(self) -> None:
        assert self.between(Q_AND_K, GEMM_BF16, GEMM_BF16) == ["layers.0.q", "layers.0.k"]

    def test_a_border_that_is_not_clear(self) -> None:
        """The copy may finish the first GEMM or prepare the second; both are in one layer."""
        found = self.between(Q_AND_K, GEMM_BF16, COPY, GEMM_BF16)
        assert found == ["layers.0.q", "layers.0", "layers.0.k"]
        across = [(MM, "layers.0.q"), (MM, "layers.1.q")]
        assert self.between(across, GEMM_BF16, COPY, GEMM_BF16) == ["layers.0.q", None, "layers.1.q"]

    def test_a_sum_over_split_k_belongs_to_the_gemm_before_it(self) -> None:
        found = self.between(Q_AND_K, GEMM_BF16, SPLIT_K, GEMM_BF16)
        assert found == ["layers.0.q", "layers.0.q", "layers.0.k"]
        assert self.between(Q_AND_K, GEMM_BF16, SPLIT_K) == ["layers.0"] * 2  # one of them launched nothing
        assert self.between(Q_AND_K, SPLIT_K, GEMM_BF16, GEMM_BF16) == ["layers.0"] * 3  # the GEMM before it is missing

    def test_a_gemm_shows_where_another_call_ends(self) -> None:
        calls = [(SORT, "layers.0.router"), *Q]
        assert self.between(calls, ADD, COPY, GEMM_BF16) == ["layers.0.router", "layers.0", "layers.0.q"]
        assert self.between(calls[::-1], GEMM_BF16, ADD) == ["layers.0.q", "layers.0.router"]
        # A sort launches no GEMM, and a GEMM has one.
        assert self.between(calls, ADD, GEMM_BF16, GEMM_BF16) == ["layers.0.router", "layers.0.q", "layers.0.q"]
        assert self.between(calls, GEMM_BF16, GEMM_BF16) == ["layers.0"] * 2
        assert self.between(Q_AND_K, GEMM_BF16, COPY) == ["layers.0"] * 2

    def test_an_operator_of_another_library_may_launch_anything(self) -> None:
        calls = [(CUSTOM, "layers.0.scan"), *Q]
        assert self.between(calls, GEMM_BF16, GEMM_BF16) == ["layers.0.scan", "layers.0.q"]

    def test_fewer_kernels_than_calls(self) -> None:
        """A call launched nothing, and nothing tells which."""
        assert self.between(Q_AND_K, GEMM_BF16) == ["layers.0"]
        assert self.between([(MM, "encoder"), (MM, "decoder")], GEMM_BF16) == [None]
        assert self.between([*Q, *Q], GEMM_BF16) == ["layers.0.q"]

    def test_a_call_without_a_module(self) -> None:
        assert self.between([(MM, None), *Q], GEMM_BF16, GEMM_BF16) == [None, "layers.0.q"]


class TestCodeOfALayer:
    """Code that was compiled for one layer may run for all of them."""

    @staticmethod
    def code_of(number: int) -> Calls:
        return [*layer(number), (LAST, f"layers.{number}"), (ACT, f"layers.{number}.down")]

    REPLAYED = (*KERNELS, LAST, ACT)

    @pytest.mark.parametrize("key", ["a", None])
    def test_the_caller_tells_the_layer(self, key: str | None) -> None:
        found = find(record(self.REPLAYED, code(self.code_of(0)), key=key, caller="layers.3"))
        assert found == named(self.code_of(3))

    @pytest.mark.parametrize("caller", [None, "(Model)", "layers", "head.0"])
    def test_without_it_the_layer_is_unknown(self, caller: str | None) -> None:
        assert set(find(record(self.REPLAYED, code(self.code_of(0)), key="a", caller=caller))) == {(None, None)}
        first = [(kernel, place.removeprefix("layers.")) for kernel, place in self.code_of(0) if place]
        assert set(find(record(self.REPLAYED, code(first), key="a", caller=caller))) == {(None, None)}
        several = record(self.REPLAYED * 3, code(self.code_of(0)), caller=caller)
        assert {way for _, way in find(several)} <= {None, "repetition", "order"}


def test_partitions_of_one_call_are_compared_together() -> None:
    """Inductor may split code at an operator that cannot be captured. Each part is a graph of its own."""
    timeline = Timeline()
    with timeline.phase("forward"), timeline.range("## Call CompiledFxGraph a ##"):
        timeline.launch(COPY, 10, op="aten::copy_")  # inputs
        timeline.replay(REPLAYED[:3])
        timeline.launch(GEMM_BF16, 10, op="aten::mm")
        timeline.replay(REPLAYED[4:])
    assert find(keep_calls(timeline.record(), [code(FORWARD)])) == named([*FORWARD[:3], *FORWARD[4:]])


def test_the_captured_step_is_better_evidence() -> None:
    timeline = Timeline()
    calls = [call for number in range(5) for call in layer(number)]
    replayed = KERNELS * 5
    with timeline.step(), timeline.phase("forward"):
        for name in replayed[:-2] + replayed[-1:]:
            with timeline.module("(Real)"):
                timeline.launch(name, 10, op="aten::real")
    with timeline.step():
        timeline.replay(replayed)
    found = find(keep_calls(timeline.record(), [code(calls)]))
    assert found.pop(-2) == ("layers.4.act", "compiled")
    assert set(found) == {("(Real)", "eager")}


def test_more_choices_than_can_be_compared() -> None:
    graphs = [code([(NORM, "a"), (MM, f"layers.0.{n}"), (MM, "layers.0"), (ACT, "b")]) for n in range(101)]
    found = find(record([NORM, *[GEMM_BF16] * 500, ACT], *graphs, key="a"))
    assert found == named(["a", *[None] * 500, "b"])


def test_calls_are_kept_only_for_graphs() -> None:
    timeline = Timeline()
    timeline.launch(NORM, 10)
    recording = timeline.record()
    assert keep_calls(recording, [code(FORWARD)]) is recording
    replayed = record(REPLAYED)
    assert keep_calls(replayed, [code([(NORM, None)])]) is replayed
    unmarked = replace(replayed, kernels=replayed.kernels.with_columns(graph=pl.lit(None, pl.Boolean)))
    for known in (unmarked, replace(replayed, launches=replayed.launches.clear())):
        assert keep_calls(known, [code(FORWARD)]).compiled_calls.height == len(FORWARD)


# --- A recorded step of an H200 ---------------------------------------------------------------------------------------


def read_code(kernels: pl.DataFrame, *, key: str) -> tuple[CompiledGraph, dict[int, str]]:
    """The calls that launched these kernels, each of a module of its own, in layers of 16 calls; and the modules of
    kernels, by row."""
    calls: list[CompiledCall] = []
    modules: dict[int, str] = {}
    for (_, op), rows in groupby(kernels.select("op_row", "op", "row").iter_rows(), lambda row: row[:2]):
        number = len(calls)
        module = f"blocks.{number // 16}.part{number % 16}"
        calls.append(CompiledCall(op.replace("aten::", "extern_kernels."), module))
        modules |= {row: module for *_, row in rows}
    return CompiledGraph(key=key, is_backward=key == "backward", calls=tuple(calls)), modules


def replay_compiled_step(*, in_runs: bool) -> tuple[Recording, dict[int, str]]:
    """The second step as one graph per phase, with the calls of its compiled code, and the true modules by row. Without
    `in_runs`, the graphs have the loss and its backward pass too, which were not compiled."""
    replayed, kernels = as_replays(kineto.read(FIXTURES / "h200_nano_compiled.json.gz"))
    ordered = kernels.drop("row").with_row_index("row").sort("launch_ns", "start_ns")
    graphs: list[CompiledGraph] = []
    truth: dict[int, str] = {}
    runs: list[pl.DataFrame] = []
    for number, phase in enumerate(("forward", "backward"), 1):
        ours = ordered.filter(phase=phase).with_row_index("place")
        compiled = ours.filter(pl.col("op").is_in(["aten::mm", "aten::bmm"]) | pl.col("op").str.starts_with("triton_"))
        first, last = compiled["place"].min(), compiled["place"].max()
        assert isinstance(first, int)
        assert isinstance(last, int)
        graph, modules = read_code(ours.slice(first, last + 1 - first), key=phase)
        graphs.append(graph)
        truth |= modules
        launch = replayed.launches.filter(correlation=number)
        runs.append(
            launch.select("start_ns", "end_ns", "process", "thread", name=pl.lit(f"## Call CompiledFxGraph {phase} ##"))
        )
    recording = keep_calls(replace(replayed, captured=replayed.captured.clear()), graphs)
    if in_runs:
        is_compiled = pl.int_range(pl.len()).is_in(list(truth))
        named_runs = tables.conform("ranges", pl.concat(runs).with_columns(source=pl.lit("user")))
        ranges = pl.concat([recording.ranges, named_runs])
        recording = replace(recording, kernels=recording.kernels.filter(is_compiled), ranges=ranges)
        truth = dict(enumerate(truth[row] for row in sorted(truth)))
    return recording, truth


def check_modules(recording: Recording, truth: dict[int, str]) -> tuple[int, int]:
    """How many kernels have a module, and how many have their own, not one that contains it. None has a wrong one."""
    found = attribute_kernels(recording).with_row_index("row").filter(pl.col("matched") == "compiled")
    for row, module in found.select("row", "module").iter_rows():
        assert row in truth, "a kernel of code that was not compiled"
        assert truth[row] == module or truth[row].startswith(f"{module}."), row
    return found.height, sum(truth[row] == module for row, module in found.select("row", "module").iter_rows())


@pytest.mark.parametrize(("in_runs", "known"), [(True, (259, 259)), (False, (259, 259))])
def test_modules_of_a_recorded_step_are_right(in_runs: bool, known: tuple[int, int]) -> None:
    """The graphs and the calls are made up: names and order of kernels, and their operators, are those of the trace."""
    recording, truth = replay_compiled_step(in_runs=in_runs)
    assert len(truth) == 259
    assert check_modules(recording, truth) == known


@pytest.mark.parametrize("in_runs", [True, False])
def test_a_replay_that_lacks_kernels_of_libraries_has_no_wrong_modules(in_runs: bool) -> None:
    recording, truth = replay_compiled_step(in_runs=in_runs)
    row = pl.int_range(pl.len())
    kept = recording.kernels.with_columns(row=row).filter(pl.col("name").str.starts_with("triton_") | (row % 5 > 0))
    lacking = replace(recording, kernels=kept.drop("row"))
    known, _ = check_modules(lacking, {new: truth[old] for new, old in enumerate(kept["row"]) if old in truth})
    assert known > 200
