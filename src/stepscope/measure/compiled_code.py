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
from typing import Any, NamedTuple

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import debug
from torch._inductor.codegen import cpp, triton
from torch._inductor.virtualized import V

from stepscope.patches import replace_attribute
from stepscope.recording.rows.compiled_code import CompiledCall, CompiledGraph

_NOTED = "set_kernel_post_grad_provenance_tracing"
_TELLING = (debug, triton, cpp)  # Inductor's modules import the function by name
_VIEWS = {"view", "_unsafe_view", "reshape", "permute", "expand", "t", "transpose", "unsqueeze", "squeeze", "slice"}
_VIEWS |= {"select", "alias", "detach", "split", "split_with_sizes"}
_ITEM = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]")


class FoundModule(NamedTuple):
    """A module in a traced graph: its path from the root of the traced function, its `id` (None if the tracer did not
    keep it), and its class."""

    path: str
    number: int | None
    kind: type | None


@dataclass(slots=True)
class CompiledCode:
    """The graphs that were compiled, in order."""

    _graphs: dict[int, tuple[Any, list[CompiledCall]]] = field(default_factory=dict)

    def note(self, schedule: Any, kernel: str, *, is_extern: bool) -> None:
        graph = V.graph
        calls = self._graphs.setdefault(id(graph), (graph, []))[1]
        found = find_module(find_origins(schedule, is_extern=is_extern))
        calls.append(CompiledCall(kernel, found.path if found else None))

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
        tell_kernels(code.note, undo)
        undo.enter_context(inductor_config.patch({"fx_graph_cache": False, "cpp.enable_kernel_profile": True}))
        undo.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield code


def can_tell_kernels() -> bool:
    """Whether this version of PyTorch has the functions that `tell_kernels` replaces."""
    return all(callable(getattr(holder, _NOTED, None)) for holder in _TELLING)


def tell_kernels(note: Callable[..., None], undo: ExitStack) -> None:
    """Call `note(schedule, kernel, is_extern=...)` for every call that Inductor generates."""
    for holder in _TELLING:
        replace_attribute(holder, _NOTED, _noting(getattr(holder, _NOTED), note), undo)


def _noting(function: Callable[..., int | None], note: Callable[..., None]) -> Callable[..., int | None]:
    def noting(node_schedule: Any, kernel_name: str, is_extern: bool = False) -> int | None:
        note(node_schedule, kernel_name, is_extern=is_extern)
        return function(node_schedule, kernel_name, is_extern)

    return noting


def find_origins(schedule: Any, *, is_extern: bool) -> Sequence[fx.Node]:
    """The nodes of the traced graph that a call computes."""
    if is_extern:
        return [schedule.origin_node] if schedule.origin_node is not None else list(schedule.origins)
    computed = [one.node for one in schedule if getattr(one, "node", None) is not None]
    return list(dict.fromkeys(node for one in computed for node in one.origins))


def find_module(nodes: Sequence[fx.Node]) -> FoundModule | None:
    """The module with most of these nodes."""
    computing = [one for one in nodes if _operator(one) not in _VIEWS] or nodes
    placed = [one for one in computing if _stack(one)]
    backward = [one for one in placed if "fwd_nn_module_stack" in one.meta]
    counted = Counter(_innermost(one) for one in backward or placed)
    return max(counted, key=lambda one: (counted[one], one.path.count("."))) if counted else None


def _operator(node: fx.Node) -> str:
    return str(node.meta.get("original_aten", node.target)).removeprefix("aten.").partition(".")[0]


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]] | None:
    return node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack")


def _innermost(node: fx.Node) -> FoundModule:
    stack = _stack(node)
    assert stack, "the caller has checked it"
    key, (path, kind) = list(stack.items())[-1]
    number = key.partition("@")[0]  # what follows counts the calls
    return FoundModule(
        path=_ITEM.sub(lambda found: f".{found[1] or found[2]}", path),
        number=int(number) if number.isdecimal() else None,
        kind=kind if isinstance(kind, type) else None,
    )


def _shorten(path: str | None, known: set[str]) -> str | None:
    """The longest end of a path that is the name of a module. A traced function refers to the model by any name."""
    labels = path.split(".") if path else []
    ends = (".".join(labels[start:]) for start in range(len(labels)))
    return next((end for end in ends if end in known), None)
