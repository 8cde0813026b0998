"""Kernels of CUDA graphs belong to what the same kernels show elsewhere, and to nothing if that is not certain."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.explain.trace.attribution.graphs import find_repeats
from stepscope.explain.trace.attribution.modules import label_layers
from stepscope.explain.trace.module_tree import add_up_modules
from stepscope.explain.trace.profile import coverage_in_graphs, make_profile
from stepscope.explain.trace.profile_tables import headline
from stepscope.explain.trace.summary import summarise
from stepscope.recording import tables
from stepscope.recording.readers import kineto
from stepscope.recording.store import Recording, load, save
from tests.unit.recordings import ADD, COPY, FOREACH, GEMM_BF16, MULTIPLY, SOFTMAX, Timeline, as_replays

FIXTURES = Path(__file__).parents[2] / "fixtures"
# The kernels of a layer, with the operator and the part of the layer that each belongs to.
LAYER = (
    (ADD, "aten::add", "norm"),
    (GEMM_BF16, "aten::mm", "attention.q_proj"),
    (SOFTMAX, "aten::_softmax", "attention"),
    (MULTIPLY, "aten::mul", "ffn"),
)
KERNELS = tuple(kernel for kernel, _, _ in LAYER)
TRUTH = [(op, f"blocks.{n}.{part}") for n in range(3) for _, op, part in LAYER]


def launch_layers(timeline: Timeline, layers: Sequence[int]) -> None:
    for number in layers:
        for kernel, op, part in LAYER:
            with timeline.module(f"blocks.{number}.{part}"):
                timeline.launch(kernel, 10, op=op)


def eager_then_graph(replayed: Sequence[str] = KERNELS * 3, **columns: Sequence[int]) -> Recording:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        launch_layers(timeline, range(3))
    with timeline.step():
        timeline.replay(replayed, **columns)
    return timeline.record()


def found_in_graphs(recording: Recording, *columns: str) -> list[tuple[object, ...]]:
    kernels = attribute_kernels(recording).filter(pl.col("launched") == "graph").sort("start_ns")
    return kernels.select(columns).rows()


def test_owners_come_from_the_same_kernels_launched_one_by_one() -> None:
    recording = eager_then_graph()
    assert found_in_graphs(recording, "op", "module") == TRUTH
    assert set(found_in_graphs(recording, "phase", "matched")) == {("forward", "eager")}
    assert [layer for (layer,) in found_in_graphs(recording, "layer")] == [0] * 4 + [1] * 4 + [2] * 4


def test_owners_come_from_the_same_step_without_graphs(tmp_path: Path) -> None:
    """What stepscope keeps in its own recordings, in place of the step itself."""
    both = attribute_kernels(eager_then_graph())
    captured = tables.conform("captured", both.filter(launched="op").select(tables.SCHEMAS["captured"].keys()))
    timeline = Timeline()
    with timeline.step(), timeline.phase("backward"):
        timeline.replay(KERNELS * 3)
    save(replace(timeline.record(), captured=captured), tmp_path / "run")
    recording = load(tmp_path / "run")
    assert found_in_graphs(recording, "op", "module") == TRUTH
    assert set(found_in_graphs(recording, "matched")) == {("capture",)}
    root = add_up_modules(make_profile(recording).kernels)
    assert [(node.label, len(node.copies)) for node in root.children] == [("blocks.*", 3)]


def test_the_operator_around_a_graph_is_not_that_of_its_kernels() -> None:
    recording = eager_then_graph()
    launch = recording.launches.filter(name="cudaGraphLaunch")
    outer = launch.select("process", "thread", "start_ns", "end_ns", name=pl.lit("CompiledFunction"))
    recording = replace(recording, ops=pl.concat([recording.ops, tables.conform("ops", outer)]))
    assert found_in_graphs(recording, "op", "module") == TRUTH
    assert set(found_in_graphs(recording, "op_row")) == {(None,)}  # or their FLOPs would follow from its shapes


def test_another_grid_is_another_kernel() -> None:
    recording = eager_then_graph(grid_x=[1] * 12, grid_y=[1] * 12, grid_z=[1] * 12)
    assert set(found_in_graphs(recording, "op", "module", "matched")) == {
        (None, f"repeat of 4 kernels.{number}", "repetition") for number in range(3)
    }


def test_what_differs_between_places_stays_unknown() -> None:
    """The graph of one layer fits three of them: the operators are the same, the layer is not known."""
    found = found_in_graphs(eager_then_graph(KERNELS), "op", "module", "matched")
    assert found == [(op, None, "eager") for _, op, _ in LAYER]


def test_a_graph_of_other_kernels_stays_unknown() -> None:
    found = found_in_graphs(eager_then_graph([*KERNELS, COPY, COPY, FOREACH, COPY]), "op", "module", "matched")
    assert set(found) == {(None, None, None)}


def test_a_kernel_that_only_the_graph_has_stays_unknown() -> None:
    timeline = Timeline()
    with timeline.phase("forward"):
        launch_layers(timeline, range(8))
    timeline.replay([*KERNELS, COPY, *KERNELS * 7])
    found = found_in_graphs(timeline.record(), "op", "matched")
    assert found.pop(4) == (None, None)
    assert found == [(op, "eager") for _ in range(8) for _, op, _ in LAYER]


def test_numbers_of_nodes_are_the_order_of_the_capture() -> None:
    """Branches of a graph run in parallel: times have another order."""
    order = [1, 0, 2, 3, 5, 4, 6, 7, 9, 8, 10, 11]
    replayed = [(KERNELS * 3)[place] for place in order]
    found = found_in_graphs(eager_then_graph(replayed, graph_node=[2**40 + place for place in order]), "op", "module")
    assert found == [TRUTH[place] for place in order]
    assert found_in_graphs(eager_then_graph(replayed), "op", "module") != found


def test_time_is_the_order_if_numbers_of_nodes_are_not() -> None:
    nodes = [2**40 + number for number in reversed(range(12))]
    assert found_in_graphs(eager_then_graph(graph_node=nodes), "op", "module") == TRUTH


def captured_then_graph(operators: Sequence[tuple[str, str]], replayed: Sequence[str]) -> Recording:
    timeline = Timeline()
    with timeline.phase("forward"), timeline.module("blocks.0"):
        timeline.capture(operators)
    timeline.replay(replayed)
    return timeline.record()


def test_owners_come_from_a_capture_in_the_same_trace() -> None:
    operators = [(op, "cudaLaunchKernelExC") for _, op, _ in LAYER] + [("aten::zero_", "cudaMemsetAsync")]
    recording = captured_then_graph(operators, [*KERNELS, "Memset (Device)"])
    found = found_in_graphs(recording, "op", "module", "phase", "matched")
    assert found == [(op, "blocks.0", "forward", "capture") for op, _ in operators]
    assert attribute_kernels(recording).height == 5  # what was captured did not run


@pytest.mark.parametrize(
    "replayed",
    [
        [*KERNELS, "Memset (Device)", "Memset (Device)"],  # more
        ["Memset (Device)", *KERNELS],  # in another order
        [GEMM_BF16, ADD, SOFTMAX, MULTIPLY, "Memset (Device)"],  # a GEMM would come from an addition
    ],
)
def test_a_capture_of_something_else_is_not_believed(replayed: list[str]) -> None:
    operators = [(op, "cudaLaunchKernel") for _, op, _ in LAYER] + [("aten::zero_", "cudaMemsetAsync")]
    found = found_in_graphs(captured_then_graph(operators, replayed), "op", "module", "matched")
    assert set(found) == {(None, None, None)}


def test_layers_of_one_graph_are_known_from_repetition() -> None:
    timeline = Timeline()
    with timeline.phase("forward"):
        timeline.replay([COPY, FOREACH, *KERNELS * 5, COPY])
    recording = timeline.record()
    found = found_in_graphs(recording, "module", "layer", "matched", "op")
    layers = [(f"repeat of 4 kernels.{n}", n, "repetition", None) for n in range(5) for _ in KERNELS]
    nothing = (None, None, None, None)
    assert found == [nothing, nothing, *layers, nothing]
    profile = make_profile(recording)
    assert profile.coverage()["module"] == 0
    assert coverage_in_graphs(profile) == pytest.approx({"phase": 1, "layer": 20 / 23, "module": 0, "operator": 0})
    assert "layer 87.0%, module 0.0%, operator 0.0% known (87.0% from repetition, 13.0% not matched)" in headline(
        profile
    )
    remedy = "to see which operators were captured, record a step without CUDA graphs"
    assert remedy in headline(profile)
    assert remedy not in headline(make_profile(eager_then_graph()))
    assert set(label_layers(profile.kernels)) == {None, *(f"repeat of 4 kernels.{n}" for n in range(5))}
    assert [(one.matched, one.count) for one in summarise(profile, ()).graphs] == [("repetition", 20), ("unknown", 3)]


def test_a_layer_has_the_name_of_its_repeat_and_not_of_its_part() -> None:
    modules = ["model.repeat of 4 kernels.2.norm", "Model_0.repeat of 4 kernels_3.norm_0"]
    names = label_layers(pl.DataFrame({"module": modules, "layer": [2, 3]}))
    assert names.to_list() == ["model.repeat of 4 kernels.2", "Model_0.repeat of 4 kernels_3"]


def test_the_module_that_launches_a_graph_is_not_that_of_its_kernels() -> None:
    timeline = Timeline()
    with timeline.module("model"):
        timeline.replay([COPY, FOREACH])
    profile = make_profile(timeline.record())
    assert profile.kernels["module"].to_list() == ["model", "model"]
    assert profile.coverage()["module"] == 0


def test_repeats_of_backward_have_no_layer() -> None:
    """They run in the other order: the first one is the last layer."""
    timeline = Timeline()
    with timeline.phase("backward"):
        timeline.replay([COPY, FOREACH, *KERNELS * 5, COPY])
    found = found_in_graphs(timeline.record(), "module", "layer", "matched")
    assert found[2:-1] == [(f"repeat of 4 kernels.{n}", None, "repetition") for n in range(5) for _ in KERNELS]


def test_graphs_that_follow_each_other_may_be_steps() -> None:
    timeline = Timeline()
    for _ in range(6):
        timeline.replay([*KERNELS, COPY])
    assert set(found_in_graphs(timeline.record(), "module", "matched")) == {(None, None)}


def test_graphs_of_one_module_call_are_its_layers() -> None:
    """Pieces of a model between which attention is launched as usual."""
    timeline = Timeline()
    with timeline.module("model"):
        for _ in range(6):
            timeline.replay([ADD, GEMM_BF16, MULTIPLY])
            timeline.launch(SOFTMAX, 10, op="attention")
    found = found_in_graphs(timeline.record(), "module", "matched")
    assert found == [(f"model.repeat of 4 kernels.{n}", "repetition") for n in range(6) for _ in range(3)]


class TestNamesOfRepeats:
    @staticmethod
    def name(*kernels: str) -> list[str | None]:
        found = find_repeats(tuple(("kernel", kernel) for kernel in kernels))
        return [one and f"repeat of {one.period} kernels {one.number}" for one in found]

    def test_forward_and_backward_have_their_own(self) -> None:
        backward = (GEMM_BF16, GEMM_BF16, COPY, MULTIPLY, ADD)
        found = self.name(*KERNELS * 4, FOREACH, *backward * 4)
        assert found[:16] == [f"repeat of 4 kernels {n}" for n in range(4) for _ in range(4)]
        assert found[16] is None
        assert found[17:] == [f"repeat of 5 kernels {n}" for n in range(4) for _ in range(5)]

    def test_the_last_one_may_be_cut_off(self) -> None:
        assert self.name(*KERNELS * 3, *KERNELS[:2])[12:] == ["repeat of 4 kernels 3"] * 2
        assert self.name(*KERNELS * 3, KERNELS[0])[12:] == [None]

    def test_two_are_not_enough(self) -> None:
        assert set(self.name(*KERNELS * 2)) == {None}

    def test_an_optimizer_has_no_layers(self) -> None:
        assert set(self.name(*(ADD, MULTIPLY, COPY, FOREACH) * 9)) == {None}

    def test_parts_of_a_layer_are_not_layers(self) -> None:
        """Experts repeat inside a layer, which repeats as a whole."""
        layer = (*KERNELS, *(GEMM_BF16, COPY, GEMM_BF16, MULTIPLY) * 4)
        assert {one.rpartition(" ")[0] for one in self.name(*layer * 4) if one} == {"repeat of 20 kernels"}


@pytest.mark.parametrize("name", ["h200_nano_sdpa_bf16", "h200_nano_checkpoint", "h200_nano_compiled"])
def test_replays_of_a_recorded_step_are_attributed_as_the_step_was(name: str) -> None:
    """Steps of an H200. The graphs are made up: their kernels, with names, grids and order, are those of the trace."""
    replayed, truth = as_replays(kineto.read(FIXTURES / f"{name}.json.gz"))
    found = attribute_kernels(replayed)
    assert set(found["matched"]) == {"capture"}
    for column in ("op", "module", "layer", "part", "phase", "recomputed"):
        assert found[column].equals(truth[column], null_equal=True), column


def test_a_replay_that_lacks_kernels_of_the_step_has_no_wrong_owners() -> None:
    replayed, truth = as_replays(kineto.read(FIXTURES / "h200_nano_sdpa_bf16.json.gz"))
    kept = pl.int_range(replayed.captured.height, eager=True) % 40 > 0
    found = attribute_kernels(replace(replayed, captured=replayed.captured.filter(kept)))
    assert 0.9 * found.height < found["matched"].count() < found.height
    for column in ("op", "module", "layer", "recomputed"):
        known = found[column].is_not_null() & found["matched"].is_not_null()
        assert found[column].filter(known).equals(truth[column].filter(known)), column
