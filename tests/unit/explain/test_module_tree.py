"""Alike layers are one node of the tree of modules, and whatever is folded, times add up to the nanosecond."""

from collections.abc import Iterator, Mapping

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.explain.trace.module_tree import (
    SELF,
    SMALLER,
    Level,
    ModuleNode,
    add_up_modules,
    choose_nodes,
    fold_modules,
    join_roles,
    label_module,
    name_nodes,
    plant_tree,
)
from stepscope.explain.trace.profile_tables import tree_table
from tests.unit.recordings import ADD, GEMM_BF16, Timeline

LLAMA = (
    "model.embed",
    *(f"model.layers.{at}.{part}" for at in range(3) for part in ("attn.q", "attn.k", "mlp")),
    "head",
)
# A profiler numbers the modules of a class throughout the model.
STACKS = (
    "Llama_0",
    *(f"Llama_0.Layer_{at}.Attention_{at}.Linear_{3 * at + part}" for at in range(3) for part in range(3)),
    *(f"Llama_0.Layer_{at}.Norm_{2 * at + part}" for at in range(3) for part in range(2)),
    "Llama_0.Norm_6",
)


def roles(*modules: str, kinds: Mapping[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    folded = fold_modules({module: (kinds or {}).get(module, "") for module in modules})
    return {module: tuple(level.role for level in levels) for module, levels in folded.items()}


def test_same_module_of_all_layers_is_one_node() -> None:
    told = roles(*LLAMA)
    assert told["model.layers.1.attn.k"] == ("model", "layers.*", "attn", "k")
    assert {told[f"model.layers.{at}.mlp"] for at in range(3)} == {("model", "layers.*", "mlp")}
    assert told["head"] == ("head",)
    single = fold_modules(dict.fromkeys(LLAMA, ""))["model.layers.1.mlp"]
    assert single == (Level("model", "model"), Level("layers.1", "layers.*"), Level("mlp", "mlp"))


def test_classes_of_a_stack_are_named_by_their_place_in_a_layer() -> None:
    told = roles(*STACKS)
    assert {told[f"Llama_0.Layer_{at}.Attention_{at}.Linear_{3 * at + 1}"] for at in range(3)} == {
        ("Llama_0", "Layer", "Attention", "Linear #2")
    }
    assert told["Llama_0.Layer_2.Norm_5"] == ("Llama_0", "Layer", "Norm #2")
    assert told["Llama_0.Norm_6"] == ("Llama_0", "Norm_6"), "outside all layers, a module has its own name"


def test_two_attentions_of_one_class_in_a_layer_have_different_roles() -> None:
    modules = [f"Net_0.Layer_{at}.Attention_{2 * at + one}.Linear_{2 * at + one}" for at in range(3) for one in (0, 1)]
    assert set(roles(*modules).values()) == {("Net_0.Layer", f"Attention #{one}.Linear") for one in (1, 2)}
    experts = [f"Net_0.Layer_{at}.Expert_{8 * at + one}.Linear_{8 * at + one}" for at in range(2) for one in range(8)]
    assert set(roles(*experts).values()) == {("Net_0.Layer.Expert.Linear",)}


def test_model_of_one_class_folds_it() -> None:
    modules = (*(f"Net_0.Linear_{at}" for at in range(4)), "Net_0.Norm_0")
    told = roles(*modules)
    assert told["Net_0.Linear_3"] == ("Net_0", "Linear")
    assert told["Net_0.Norm_0"] == ("Net_0", "Norm_0")


def test_layers_inside_layers_are_folded_twice() -> None:
    modules = [f"layers.{layer}.experts.{at}.{part}" for layer in (0, 1) for at in (0, 1, 2) for part in ("up", "down")]
    assert set(roles(*modules).values()) == {("layers.*.experts.*", "up"), ("layers.*.experts.*", "down")}


def test_names_with_a_number_are_layers_if_they_are_alike() -> None:
    modules = [f"encoder.encoder_layer_{at}.{part}" for at in range(12) for part in ("attention", "mlp")]
    assert roles(*modules, "encoder.fc_1", "encoder.fc_2") == {
        **{module: ("encoder", "encoder_layer_*", module.rpartition(".")[2]) for module in modules},
        "encoder.fc_1": ("encoder", "fc_1"),
        "encoder.fc_2": ("encoder", "fc_2"),
    }


def test_parts_of_a_sequential_keep_their_numbers() -> None:
    kinds = {"net.0": "mm", "net.1": "relu", "net.2": "mm"}
    assert roles(*kinds, kinds=kinds) == {module: ("net", module[-1]) for module in kinds}


@pytest.mark.parametrize(
    ("above", "name", "label"),
    [
        ("net", "0", "net.0"),
        ("model.layers.3", "0.up", "layers.3.0.up"),
        ("model.layers.*", "*", "layers.*.*"),
        ("model.layers.*", "mlp", "mlp"),
        ("", "0", "0"),
        ("0", "1", "0.1"),
    ],
)
def test_number_has_the_name_above_it(above: str, name: str, label: str) -> None:
    assert label_module(above, name) == label


def test_work_outside_all_modules_is_not_split() -> None:
    assert roles("(optimizer)", "(a.b)", "unknown") == {name: (name,) for name in ("(optimizer)", "(a.b)", "unknown")}


def test_deep_paths_end_somewhere() -> None:
    modules = [".".join(["a"] * depth) for depth in (*range(1, 60), 1_000)]
    folded = fold_modules(dict.fromkeys(modules, ""))
    assert max(map(len, folded.values())) == 24
    assert len({tuple(level.label for level in levels) for levels in folded.values()}) == len(modules)


# --- Sums -------------------------------------------------------------------------------------------------------------

Kernels = list[tuple[str | None, str | None, int]]
_names = st.sampled_from(("0", "1", "2", "h", "mlp", "Block_0", "Block_1", "Linear_0", "Linear_7", "", "*"))
_paths = st.none() | st.just("(optimizer)") | st.lists(_names, min_size=1, max_size=4).map(".".join)
_phases = st.none() | st.sampled_from(("forward", "backward", "optimizer"))
_kernels = st.lists(st.tuples(_paths, _phases, st.integers(0, 10**12)), min_size=1, max_size=40)


def frame(kernels: Kernels) -> pl.DataFrame:
    columns = {"module": pl.String, "phase": pl.String, "time_ns": pl.Int64}
    return pl.DataFrame(kernels, schema=columns, orient="row").with_columns(
        op=pl.lit("aten::mm"), count=pl.lit(1, pl.Int64)
    )


def walk(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from walk(child)


@settings(max_examples=150, deadline=None)
@given(kernels=_kernels, top=st.integers(1, 12))
def test_children_add_up_to_their_parent_and_roots_to_everything(kernels: Kernels, top: int) -> None:
    root = add_up_modules(frame(kernels))
    assert (root.time_ns, root.count) == (sum(time for *_, time in kernels), len(kernels))
    for node in walk(root):
        assert sum(node.phases.values()) == sum(node.copies.values()) == node.time_ns
        if node.children:
            assert sum(child.time_ns for child in node.children) == node.time_ns
            assert sum(child.count for child in node.children) == node.count
    # Every module is somewhere, once.
    modules = {"unknown" if module is None else module for module, *_ in kernels}
    leaves = [copy for node in walk(root) if not node.children or node.label == SELF for copy in node.copies]
    assert len(leaves) == len(modules)
    assert_adds_up(choose_nodes(root, top), root)


def assert_adds_up(nodes: list[ModuleNode], root: ModuleNode) -> None:
    """What is shown inside a node, which follows it and is one level deeper, adds up to it."""
    for at, node in [(-1, root), *enumerate(nodes)]:
        inside = []
        for other in nodes[at + 1 :]:
            if other.depth <= node.depth:
                break
            inside += [other] if other.depth == node.depth + 1 else []
        if inside:
            assert sum(other.time_ns for other in inside) == node.time_ns
            assert sum(other.count for other in inside) == node.count


@settings(max_examples=100, deadline=None)
@given(kernels=_kernels)
def test_tree_of_a_page_has_the_nodes_of_the_table(kernels: Kernels) -> None:
    modules = sorted({"unknown" if module is None else module for module, *_ in kernels})
    levels = fold_modules(dict.fromkeys(modules, "aten::mm"))
    # Some modules were merged over alike layers.
    shown = [
        *modules,
        *(join_roles(levels[module]) for module in modules[::2] if join_roles(levels[module]) not in modules),
    ]
    tree = plant_tree(list(dict.fromkeys(shown)), levels)
    paths = [name.rpartition(" × ")[2] for name in name_nodes(tree)]
    root = add_up_modules(frame(kernels))
    nodes = [node for node in walk(root) if node is not root and node.label != SELF]
    assert sorted(paths) == sorted(node.path for node in nodes)
    copies = {node.path: len(node.copies) for node in nodes}
    assert dict(zip(paths, tree.copies, strict=True)) == copies


# --- The table --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Three layers, the second of which is slow, and a module that runs a kernel itself."""
    timeline = Timeline()
    with timeline.step():
        for at, us in enumerate((100, 150, 100)):
            with timeline.phase("forward"), timeline.module(f"layers.{at}"):
                timeline.launch(ADD, 10)
                with timeline.module(f"layers.{at}.mlp"):
                    timeline.launch(GEMM_BF16, us)
        with timeline.phase("optimizer"):
            timeline.launch(ADD, 20)
    return timeline


def test_a_row_has_the_spread_of_its_copies(timeline: Timeline) -> None:
    table = tree_table(timeline.profile())
    keys = [column.key for column in table.columns]
    rows = {row[keys.index("module")]: dict(zip(keys, row, strict=True)) for row in table.rows}
    assert [row[0] for row in table.rows] == ["3 × layers.*", "· 3 × mlp", "· 3 × (self)", "(optimizer)"]
    layers, mlp = rows["layers.*"], rows["layers.*.mlp"]
    assert (layers["kernel_ms"], layers["forward_ms"], layers["optimizer_ms"]) == (0.38, 0.38, None)
    assert (layers["min_ms"], layers["max_ms"], layers["longest"]) == (0.11, 0.16, "layers.1")
    assert mlp["each_ms"] == pytest.approx(0.35 / 3)
    assert (mlp["copies"], mlp["depth"], mlp["count"]) == (3, 1, 3)
    assert rows["(optimizer)"]["each_ms"] is None


def test_short_table_sums_up_the_rest(timeline: Timeline) -> None:
    table = tree_table(timeline.profile(), top=1)
    assert [row[0] for row in table.rows] == ["3 × layers.*", "(optimizer)"], "one row for one hidden row"
    root = add_up_modules(frame([(f"m{at}", "forward", 100 - at) for at in range(5)]))
    assert [(node.label, node.time_ns) for node in choose_nodes(root, 2)] == [
        ("m0", 100),
        ("m1", 99),
        (SMALLER, 294 - 3),
    ]
