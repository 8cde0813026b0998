"""A compiler backend that rewrites what `torch.compile` traced, before Inductor compiles it.

The graph is traced from the model as it is, with its parameters as inputs. When it first runs, real tensors show which
input is which parameter. `rewrites` then changes the graph, and some inputs are replaced: a parameter by its working
weight, several by one leaf. The module itself is never changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend

from stepscope.fast.rewrites import Rewrites, rewrite
from stepscope.fast.weights import WorkingWeights


def compile_code(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """A function or module under `torch.compile`, compiled for each shape. `stepscope plan` replaces this."""
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False)
    return compiled


class RewritingBackend:
    """The backend for `torch.compile`. `compiler` compiles the rewritten graph; without one, it runs as it is. `done`
    says what was rewritten."""

    def __init__(
        self, wanted: Rewrites, weights: WorkingWeights, *, dtype: torch.dtype | None, compiler: str | None = "inductor"
    ) -> None:
        self.wanted, self.weights, self.dtype, self.compiler = wanted, weights, dtype, compiler
        self.done: list[str] = []
        self.graphs = 0

    def __call__(self, graph: fx.GraphModule, _examples: Sequence[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return _RewrittenGraph(graph, self)


class _RewrittenGraph:
    def __init__(self, graph: fx.GraphModule, backend: RewritingBackend) -> None:
        self._graph, self._backend = graph, backend
        self._run: Callable[..., Any] | None = None
        self._inputs: list[int | Tensor] = []  # the position of an argument, or a leaf in its place

    def __call__(self, *arguments: Any) -> Any:
        if self._run is None:
            self._prepare(arguments)
            assert self._run is not None
        return self._run(*(arguments[one] if isinstance(one, int) else one for one in self._inputs))

    def _prepare(self, arguments: Sequence[Any]) -> None:
        backend = self._backend
        parameters = {
            number: value
            for number, value in enumerate(arguments)
            if isinstance(value, nn.Parameter) and value in backend.weights.names
        }
        self._inputs, done = rewrite(self._graph, parameters, backend.wanted, backend.weights, backend.dtype)
        backend.done += done
        if backend.compiler is None:
            self._run = self._graph
        else:
            inputs = [arguments[one] if isinstance(one, int) else one for one in self._inputs]
            # Not `torch.compile`, which would trace the graph a second time, and stumbles over autocast inside it.
            graph = fx.GraphModule(self._graph, self._graph.graph)
            graph.meta.pop("dynamo_compile_id", None)  # its inputs are no longer those that were traced
            self._run = lookup_backend(backend.compiler)(graph, inputs)
