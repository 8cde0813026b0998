"""Notes which modules the kernels of compiled code come from, in the user's own process.

A script compiles when it likes, and often finds its code in Inductor's cache. `measure.compiled_code` hears of every
kernel while code is generated. Code from the cache has the same facts in comments: above each call, the names of the
traced nodes that it computes. The nodes are known in both cases, as PyTorch traces the model again in every process.

Only one cache is passed by, that of traced graphs with their gradients (AOTAutograd's): what comes from it has no nodes
at all. Without it, PyTorch traces the gradients again, and finds the generated code in the cache as before. Code for
CPUs is generated again as well, because its loops have no comments; the libraries with the loops come from their cache.

A module is known by its `id`, which the tracer keeps, so its name is the one that it has in the recorded model.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.loop.compiled.import_hook import after_import
from stepscope.patches import replace_attribute
from stepscope.recording.rows.compiled_code import CompiledCall, CompiledGraph

if TYPE_CHECKING:  # loads the compiler
    from stepscope.measure.compiled_code import FoundModule

_COMPILER = "torch._inductor.compile_fx"
_ENTRY, _INNER = "compile_fx", "_compile_fx_inner"
_SOURCES = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*)\], Original ATen: \[(.*)\]")
_CALL = re.compile(r"^\s*(?:[\w, ()]+ = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+|\w+(?=\.run\())[.(]")
_DEFINITION = "async_compile."
_LOOPS = "cpp_"  # the beginning of the names of functions that Inductor compiles for CPUs
_UNSUPPORTED = "modules of compiled code are unknown: the compiler of this version of PyTorch is not supported"


@dataclass(frozen=True, kw_only=True)
class _NotedGraph:
    key: str | None
    is_backward: bool
    calls: Sequence[tuple[str, "FoundModule | None"]]


class CompiledNotes:
    """The graphs that were compiled since `install`."""

    def __init__(self) -> None:
        self.problem = ""  # why nothing is noted, as a sentence for the page
        self._graphs: list[_NotedGraph] = []
        self._generated: list[tuple[str, FoundModule | None]] = []  # of the graph that is being compiled
        self._undo = ExitStack()
        self._is_ready = False
        self._skips_cache = False  # that of AOTAutograd, which users can force PyTorch to use

    def install(self, undo: ExitStack) -> None:
        undo.callback(self._undo.close)
        self._undo.callback(after_import(_COMPILER, self._watch))

    def graphs(self, modules: Mapping[int, tuple[str, nn.Module]]) -> tuple[CompiledGraph, ...]:
        """The graphs, with the names of `modules`, by `id`."""

        def name(found: "FoundModule | None") -> str | None:
            known = modules.get(found.number) if found is not None and found.number is not None else None
            # A module that is gone may have left its number to another one.
            return known[0] or None if known and found and type(known[1]) is found.kind else None

        return tuple(
            CompiledGraph(
                key=graph.key,
                is_backward=graph.is_backward,
                calls=tuple(CompiledCall(kernel, name(found)) for kernel, found in graph.calls),
            )
            for graph in self._graphs
        )

    def _watch(self) -> None:
        import torch._inductor.compile_fx as compiler

        holder: Any = compiler
        if not all(callable(getattr(holder, name, None)) for name in (_ENTRY, _INNER)):
            self.problem = _UNSUPPORTED
            return
        replace_attribute(holder, _ENTRY, self._watch_entry(getattr(holder, _ENTRY)), self._undo)
        replace_attribute(holder, _INNER, self._watch_inner(getattr(holder, _INNER)), self._undo)

    def _watch_entry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def compile_fx(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as undo:
                with self._as_guest():
                    self._get_ready()
                    self._skip_cache(undo)
                return original(*args, **kwargs)

        return compile_fx

    def _get_ready(self) -> None:
        """When something is compiled for the first time: only now is the whole compiler loaded."""
        if self._is_ready:
            return
        self._is_ready = True
        from torch._functorch import config

        from stepscope.measure.compiled_code import can_tell_kernels, tell_kernels

        if can_tell_kernels() and hasattr(config, "enable_autograd_cache"):
            tell_kernels(self._note, self._undo)
        else:
            self.problem = _UNSUPPORTED

    def _skip_cache(self, undo: ExitStack) -> None:
        from torch._functorch import config

        if not self.problem:
            undo.enter_context(config.patch({"enable_autograd_cache": False}))
            self._skips_cache = not config.enable_autograd_cache

    def _note(self, schedule: Any, kernel: str, *, is_extern: bool) -> None:
        from stepscope.measure.compiled_code import find_module, find_origins

        with self._as_guest():
            self._generated.append((kernel, find_module(find_origins(schedule, is_extern=is_extern))))

    @contextmanager
    def _as_guest(self) -> Iterator[None]:
        """The user's program must go on, whatever the compiler hands over."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.problem = f"modules of compiled code are unknown: {error or type(error).__name__}"

    def _watch_inner(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def _compile_fx_inner(gm: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            from torch._inductor import config

            self._generated = []
            again = not self.problem and _is_for_cpu(inputs)
            with config.patch({"fx_graph_cache": False}) if again else nullcontext():
                graph = original(gm, inputs, *args, **kwargs)
            with self._as_guest():
                self._keep(graph, gm, is_backward=bool(kwargs.get("is_backward")))
            return graph

        return _compile_fx_inner

    def _keep(self, graph: Any, traced: Any, *, is_backward: bool) -> None:
        source = getattr(graph, "source_code", "")  # a graph that computes nothing has none
        calls = self._generated or read_calls(source, traced.graph.nodes)
        key = getattr(graph, "_fx_graph_cache_key", None)
        if key is None and source and self._skips_cache:  # nothing but the profiler reads it then
            key = graph._fx_graph_cache_key = f"stepscope-{len(self._graphs)}"
        self._graphs.append(_NotedGraph(key=key, is_backward=is_backward, calls=calls))
        self._generated = []


def _is_for_cpu(inputs: Sequence[Any]) -> bool:
    return all(one.device.type == "cpu" for one in inputs if isinstance(one, torch.Tensor))


def read_calls(source: str, nodes: Sequence[Any]) -> list[tuple[str, "FoundModule | None"]]:
    """The calls in generated code, in order, with the modules of the nodes that the comment above each names: those of
    forward by the node of the user's function, those of backward by their own names."""
    from stepscope.measure.compiled_code import find_module

    by_name: dict[str, list[Any]] = {}
    for node in nodes:
        made_from = node.meta.get("from_node")
        by_name.setdefault(made_from[0].name if made_from else node.name, []).append(node)
    calls: list[tuple[str, FoundModule | None]] = []
    said: list[Any] | None = None
    for line in source.splitlines():
        if found := _SOURCES.search(line):
            operators = set(found[2].split(", "))
            named = [node for name in found[1].split(", ") for node in by_name.get(name, ())]
            said = [node for node in named if _name_operator(node) in operators] or named
        elif _DEFINITION in line:
            said = None
        elif said is not None and (call := _CALL.match(line)):
            calls.append((call[1], find_module(said)))
            said = None
    return calls


def _name_operator(node: Any) -> str:
    return str(getattr(node.meta.get("original_aten"), "_overloadpacket", ""))


@contextmanager
def naming_loops() -> Iterator[None]:
    """Make the loops of compiled code on CPUs operators of the profiler, as its kernels on GPUs are."""
    cache: Any = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    with ExitStack() as undo:
        for module in list(getattr(cache, "modules", ())):
            for name, function in list(vars(module).items()):
                if name.startswith(_LOOPS) and callable(function):
                    replace_attribute(module, name, _name_loop(function, name), undo)
        yield


def _name_loop(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def loop(*args: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(name):
            return function(*args)

    return loop
