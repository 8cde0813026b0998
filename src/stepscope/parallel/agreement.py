"""Checks that all ranks have the same model, and batches of the same shape; if not, names the rank and the first
difference.

Ranks that disagree do not fail on their own: an all-reduce of mismatched tensors hangs, crashes in the backend, or
averages unrelated values. So they are compared before anything is exchanged. The comparison uses lines of text that
describe one thing each; a digest is exchanged first, and the lines only if digests differ.

It also checks that a module is not wrapped already: it has one wrapper at a time, and a shard of a parameter is not a
whole one.
"""

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from stepscope.errors import StepscopeError
from stepscope.parallel.communicator import Communicator

_MARK = "_stepscope_wrapper"
_PIECE = "_stepscope_piece"


def require_same_model(communicator: Communicator, module: nn.Module) -> None:
    """Raise unless names, shapes, dtypes, memory layout, `requires_grad` and tied parameters are the same on every
    rank.
    """
    require_agreement(communicator, describe_model(module), "model", hint="print(module)  # on both ranks")


class InputCheck:
    """Checks that the inputs of the first training step have the same shapes on all ranks that have any.

    They are compared at the end of that step, which all ranks reach: a rank may have no data for a forward pass.
    """

    def __init__(self, communicator: Communicator, *, wanted: bool) -> None:
        self._communicator = communicator
        self._waits = wanted
        self._lines: list[str] | None = None

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the inputs of a forward pass; the first one counts."""
        if self._waits and self._lines is None:
            self._lines = describe_inputs(args, kwargs)

    def settle(self) -> None:
        """Raise the same error on all ranks, unless they agree."""
        if not self._waits:
            return
        self._waits = False
        shared = self._communicator.share_objects(self._lines, "the shapes of inputs")
        described = {rank: lines for rank, lines in enumerate(shared) if lines is not None}
        if len({tuple(lines) for lines in described.values()}) > 1:
            hint = "use batches of the same shape, or pass check_inputs=False"
            raise _disagreement(described, "input", hint)


def require_agreement(communicator: Communicator, lines: Sequence[str], subject: str, *, hint: str) -> None:
    """Raise the same error on every rank, unless all ranks passed the same lines about `subject`."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = communicator.share_objects(digest, f"the {subject}'s digest")
    if len(set(digests)) > 1:
        described = communicator.share_objects(list(lines), f"the {subject}'s description")
        raise _disagreement(dict(enumerate(described)), subject, hint)


def describe_model(module: nn.Module) -> list[str]:
    """One line per parameter and buffer, under each of its names."""
    parameters = _describe_tensors("parameter", module.named_parameters(remove_duplicate=False))
    return [*parameters, *_describe_tensors("buffer", module.named_buffers(remove_duplicate=False))]


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """One line per tensor, however deep it is in tuples, lists and dicts."""
    named = [(str(position), value) for position, value in enumerate(args)] + list(kwargs.items())
    return [
        f"argument `{name}{keystr(path)}`: {_describe(leaf)}"
        for name, value in named
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    ]


def _describe_tensors(kind: str, named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    first_names: dict[Tensor, str] = {}
    for name, tensor in named:
        first = first_names.setdefault(tensor, name)
        if first != name:
            yield f"{kind} `{name}`: the same as `{first}`"
            continue
        trained = ("", ", trained" if tensor.requires_grad else ", frozen")[kind == "parameter"]
        yield f"{kind} `{name}`: {_describe(tensor)}{_describe_layout(tensor)}{trained}"


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _describe_layout(tensor: Tensor) -> str:
    return "" if tensor.is_contiguous() else f", strides {tensor.stride()}"


def _disagreement(descriptions: Mapping[int, list[str]], subject: str, hint: str) -> StepscopeError:
    """Most ranks are assumed to be right; without a majority, the lowest rank is."""
    counts = Counter(tuple(lines) for lines in descriptions.values())
    usual = list(counts.most_common(1)[0][0])
    right = next(rank for rank, lines in descriptions.items() if lines == usual)
    odd = next(rank for rank, lines in descriptions.items() if lines != usual)
    pairs = zip_longest(usual, descriptions[odd], fillvalue="nothing")
    expected, found = next(pair for pair in pairs if pair[0] != pair[1])
    return StepscopeError(
        f"{subject} mismatch: rank `{odd}` differs from rank `{right}`",
        detail=f"first difference:\nrank {right}: {expected}\nrank {odd}: {found}",
        hint=hint,
    )


# --- Ownership ---


def claim(module: nn.Module, wrapper: nn.Module) -> None:
    """Mark `module` and its submodules as the wrapper's for as long as it lives, unless another wrapper has any of
    them. Two wrappers around one module would silently take its gradients from each other.
    """
    parts = list(module.modules())
    for part in parts:
        reference = part.__dict__.get(_MARK)
        other = part if hasattr(part, "finish_gradient_synchronization") else reference and reference()
        if other is not None:
            raise ValueError(f"`module` or a submodule is already wrapped in {type(other).__name__}")
    for part in parts:
        part.__dict__[_MARK] = weakref.ref(wrapper)


def mark_piece(param: nn.Parameter) -> None:
    setattr(param, _PIECE, True)


def is_piece(param: Tensor) -> bool:
    """A shard of a parameter, whose other shards are on other ranks."""
    return getattr(param, _PIECE, False)
