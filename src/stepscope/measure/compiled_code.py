"""Notes which modules the kernels of compiled code come from, while the compiler generates it.

Inductor tells a function of its own, for its debugging output, which nodes of the traced graph became which call. Each
node knows its module. Code from the compiler's cache is not generated again, so the cache of graphs is not used
meanwhile; that of kernels is, which take most of the time.

A kernel may compute parts of several modules. It belongs to the one with most of its operators; views do not count. In
backward, operators of forward that are repeated inside a kernel count only without others.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import debug
from torch._inductor.codegen import cpp, triton
from torch._inductor.virtualized import V

from stepscope.patches import replace_attribute
from stepscope.recording.rows.compiled_code import CompiledCall, CompiledGraph

_NOTED = "set_kernel_post_grad_provenance_tracing"
_VIEWS = {"view", "_unsafe_view", "reshape", "permute", "expand", "t", "transpose", "unsqueeze", "squeeze", "slice"}
_VIEWS |= {"select", "alias", "detach", "split", "split_with_sizes"}
_ITEM = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]")


@dataclass(slots=True)
class CompiledCode:
    """The graphs that were compiled, in order."""

    _graphs: dict[int, tuple[Any, list[CompiledCall]]] = field(default_factory=dict)

    def note(self, schedule: Any, kernel: str, *, is_extern: bool) -> None:
        graph = V.graph
        calls = self._graphs.setdefault(id(graph), (graph, []))[1]
        calls.append(CompiledCall(kernel, find_module(_origins(schedule, is_extern=is_extern))))

    def graphs(self, modules: Iterable[str], *, outside: str | None = None) -> tuple[CompiledGraph, ...]:
        """The graphs, with paths as the model of these `modules` has them, and `outside` for what is in none."""
        known = set(modules)
        return tuple(
            CompiledGraph(
                is_backward=bool(graph.is_backward),
                calls=tuple(CompiledCall(one.kernel, _shorten(one.module, known) or outside) for one in calls),
            )
            for graph, calls in self._graphs.values()
        )


@contextmanager
def noting_compiled_code() -> Iterator[CompiledCode]:
    """Note what is compiled within this context."""
    code = CompiledCode()
    with ExitStack() as undo:
        # Inductor's modules import it by name.
        for holder in (debug, triton, cpp):
            replace_attribute(holder, _NOTED, _noting(getattr(holder, _NOTED), code), undo)
        undo.enter_context(inductor_config.patch({"fx_graph_cache": False, "cpp.enable_kernel_profile": True}))
        undo.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield code


def _noting(function: Callable[..., int | None], code: CompiledCode) -> Callable[..., int | None]:
    def note(node_schedule: Any, kernel_name: str, is_extern: bool = False) -> int | None:
        code.note(node_schedule, kernel_name, is_extern=is_extern)
        return function(node_schedule, kernel_name, is_extern)

    return note


def _origins(schedule: Any, *, is_extern: bool) -> Sequence[fx.Node]:
    if is_extern:
        return [schedule.origin_node] if schedule.origin_node is not None else list(schedule.origins)
    computed = [one.node for one in schedule if getattr(one, "node", None) is not None]
    return list(dict.fromkeys(node for one in computed for node in one.origins))


def find_module(nodes: Sequence[fx.Node]) -> str | None:
    """The path of the module with most of these nodes, from the root of the traced function."""
    computing = [one for one in nodes if _operator(one) not in _VIEWS] or nodes
    placed = [one for one in computing if _stack(one)]
    backward = [one for one in placed if "fwd_nn_module_stack" in one.meta]
    counted = Counter(_path(one) for one in backward or placed)
    return max(counted, key=lambda path: (counted[path], path.count("."))) if counted else None


def _operator(node: fx.Node) -> str:
    return str(node.meta.get("original_aten", node.target)).removeprefix("aten.").partition(".")[0]


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]] | None:
    return node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack")


def _path(node: fx.Node) -> str:
    stack = _stack(node)
    assert stack, "the caller has checked it"
    return _ITEM.sub(lambda found: f".{found[1] or found[2]}", list(stack.values())[-1][0])


def _shorten(path: str | None, known: set[str]) -> str | None:
    """The longest end of a path that is the name of a module. A traced function refers to the model by any name."""
    labels = path.split(".") if path else []
    ends = (".".join(labels[start:]) for start in range(len(labels)))
    return next((end for end in ends if end in known), None)
