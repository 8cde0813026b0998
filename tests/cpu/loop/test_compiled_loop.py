"""The modules of compiled code in a loop that is recorded from inside its process."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
import torch._inductor.compile_fx as compiler
from torch import fx, nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import fresh_cache
from torch.profiler import profile

import stepscope
from stepscope.loop.compiled import notes as noted
from stepscope.loop.compiled.notes import CompiledNotes, naming_loops, read_calls
from stepscope.measure import compiled_code as compiled
from stepscope.measure.compiled_code import FoundModule
from stepscope.recording.compiled_code import name_modules
from stepscope.recording.rows.compiled_code import CompiledGraph, load_graphs
from tests.cpu.loop.loops import SHORT, no_page, read_handover, read_trace, unchanged
from tests.cpu.product_model import ProductModel

__all__ = ["no_page"]  # a fixture
LAYER = ("up", "down")
PRODUCTS = [f"blocks.{number}.{name}" for number in (0, 1) for name in LAYER]


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()


@contextmanager
def noting() -> Iterator[CompiledNotes]:
    notes = CompiledNotes()
    with ExitStack() as undo:
        notes.install(undo)
        yield notes


def named(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    return {id(module): (name, module) for name, module in model.named_modules()}


def products(graph: CompiledGraph) -> list[str | None]:
    return [one.module for one in graph.calls if one.operator == "aten::mm"]


def run(model: nn.Module) -> None:
    torch._dynamo.reset()
    torch.compile(model)(torch.randn(3, 4, requires_grad=True)).sum().backward()


def test_code_from_the_cache_has_the_modules_of_code_that_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted, "_is_for_cpu", lambda _: False)  # as on a GPU
    model = ProductModel()
    run(model)  # fills all caches, of which one has no nodes
    with noting() as cached:
        run(model)
    with noting() as generated, torch._inductor.config.patch(fx_graph_cache=False):
        run(model)
    forward, backward = cached.graphs(named(model))
    assert products(forward) == PRODUCTS
    assert sorted(map(str, products(backward))) == sorted([*PRODUCTS, *PRODUCTS])
    assert [forward.is_backward, backward.is_backward] == [False, True]
    assert None not in (forward.key, backward.key)
    assert forward.key != backward.key
    assert [graph.calls for graph in generated.graphs(named(model))] == [forward.calls, backward.calls]
    assert not cached.problem


def test_code_for_cpus_is_generated_again_because_its_loops_have_no_comments() -> None:
    model = ProductModel()
    run(model)
    with noting() as notes:
        run(model)
    assert [graph.key for graph in notes.graphs(named(model))] == ["stepscope-0", "stepscope-1"]
    assert products(notes.graphs(named(model))[0]) == PRODUCTS


def test_noting_leaves_nothing_behind_and_keeps_the_caches_of_others() -> None:
    config = torch._functorch.config
    inductor = torch._inductor
    telling = [vars(one)[compiled._NOTED] for one in (inductor.debug, inductor.codegen.triton, inductor.codegen.cpp)]
    with unchanged(compiler), noting():
        run(ProductModel())
    assert [vars(one)[compiled._NOTED] for one in compiled._TELLING] == telling
    assert config.enable_autograd_cache
    finders = list(sys.meta_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch._inductor.compile_fx")
        with noting():
            assert len(sys.meta_path) == len(finders) + 1
    assert sys.meta_path == finders


def test_a_module_that_is_gone_gives_its_number_to_nobody() -> None:
    model = ProductModel()
    with noting() as notes:
        run(model)
    others = {number: (name, nn.ReLU()) for number, (name, _) in named(model).items()}
    assert products(notes.graphs(others)[0]) == [None] * 4
    assert products(notes.graphs({})[0]) == [None] * 4


def test_an_unknown_compiler_is_left_alone_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.measure.compiled_code.can_tell_kernels", lambda: False)
    monkeypatch.setattr(noted, "_is_for_cpu", lambda _: pytest.fail("the noting goes on"))
    with noting() as notes:
        run(ProductModel())
    assert notes.problem.startswith("modules of compiled code are unknown: the compiler of this version")
    monkeypatch.delattr(compiler, "_compile_fx_inner")
    with noting() as other:
        assert other.problem == notes.problem


def test_a_compiler_without_the_cache_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("enable_autograd_cache")

    monkeypatch.setattr(CompiledNotes, "_skip_cache", fail)
    with noting() as notes:
        run(ProductModel())
    assert notes.problem == "modules of compiled code are unknown: enable_autograd_cache"


def test_an_error_of_ours_does_not_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LookupError("no such node")

    monkeypatch.setattr("stepscope.measure.compiled_code.find_origins", fail)
    monkeypatch.setattr(noted, "read_calls", fail)
    with noting() as notes:
        run(ProductModel())
    assert notes.problem == "modules of compiled code are unknown: no such node"


def _node(graph: fx.Graph, name: str, operator: Any, path: str, source: str | None = None) -> fx.Node:
    node = graph.call_function(operator, name=name)
    stack = {"1": (path, nn.Linear)}
    node.meta = {"original_aten": operator, "nn_module_stack" if source else "fwd_nn_module_stack": stack}
    if source:
        node.meta["from_node"] = [SimpleNamespace(name=source)]
    return node


def test_calls_in_generated_code_have_the_modules_of_their_comments() -> None:
    graph, aten = fx.Graph(), torch.ops.aten
    nodes = [
        _node(graph, "mm_0", aten.mm.default, "L.a", "linear"),
        _node(graph, "mul_0", aten.mul.Tensor, "L.b", "silu"),
        _node(graph, "add_0", aten.add.Tensor, "L.c", "silu"),
        _node(graph, "mm_5", aten.mm.default, "L.d"),
    ]
    source = """
# Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
triton_poi_fused_mul_0 = async_compile.triton('triton_poi_fused_mul_0', '''
def triton_poi_fused_mul_0(in_out_ptr0):
''')
def call(args):
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
        extern_kernels.mm(a, b, out=buf0)
        # Topologically Sorted Source Nodes: [silu], Original ATen: [aten.add]
        stream0 = get_raw_stream(0)
        triton_poi_fused_mul_0.run(buf0, 10, stream=stream0)
        extern_kernels.mm(c, d, out=buf1)
        # Topologically Sorted Source Nodes: [mm_5], Original ATen: [aten.mm]
        buf3 = torch.ops.aten.mm.default(buf1, c)
        # Unsorted Source Nodes: [unheard_of], Original ATen: []
        buf4, buf5 = torch.ops.own.step.default(buf3)
"""
    found = [(kernel, module.path if module else None) for kernel, module in read_calls(source, nodes)]
    assert found == [
        ("extern_kernels.mm", "L.a"),
        ("triton_poi_fused_mul_0", "L.c"),
        ("torch.ops.aten.mm.default", "L.d"),
        ("torch.ops.own.step.default", None),
    ]
    assert read_calls(source, nodes)[0][1] == FoundModule("L.a", 1, nn.Linear)


def test_loops_on_cpus_are_operators_while_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: Any = ModuleType("generated")
    generated.cpp_fused_add_0 = lambda *args: sum(args)
    monkeypatch.setattr(PyCodeCache, "modules", [generated])
    with unchanged(generated), profile() as profiler, naming_loops():
        assert generated.cpp_fused_add_0(1, 2) == 3
    assert [event.name for event in profiler.events()] == ["cpp_fused_add_0"]


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("compiled_part", ["model", "layers", "layers-in-wrappers"])
def test_a_recorded_loop_has_the_modules_of_its_compiled_code(tmp_path: Path, compiled_part: str) -> None:
    """Also if every layer is compiled on its own, and all of them have the same operators."""
    model = ProductModel()
    blocks: Any = model.blocks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stepscope.record(tmp_path / "run", **SHORT, sources=False) as recorder:
        for number, block in enumerate(blocks):
            if compiled_part == "layers":
                block.compile()
            elif compiled_part == "layers-in-wrappers":
                blocks[number] = torch.compile(block)
        net: Any = torch.compile(model) if compiled_part == "model" else model
        while not recorder._recorder.is_done:  # type: ignore[union-attr]
            net(torch.randn(3, 4, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = read_trace(tmp_path / "run")
    ranges = name_modules(trace, load_graphs(tmp_path / "run/rank-0.raw")).ranges
    counts = dict(ranges.filter(pl.col("source") == "compiled").group_by("name").len().rows())
    assert counts.keys() == {f"module:{name}" for name in PRODUCTS}
    assert len({counts[f"module:{name}"] for name in PRODUCTS}) == 1  # one of forward, two of backward per step
    assert counts["module:blocks.0.up"] % 3 == 0
    assert read_handover(tmp_path / "run").facts.notes == ()
