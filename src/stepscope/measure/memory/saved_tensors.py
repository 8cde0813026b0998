"""What autograd keeps for backward, read off the graph that a forward pass has built.

The walk starts at the loss and visits every node once. A node's saved tensors are looked at in their raw form, which
says what is held without asking for it: under activation checkpointing to ask would be to compute it again.
`saved_tensors_hooks` would see every tensor as it is saved, and lost: what a hook returns lives in place of what
autograd would have kept, and what is saved and freed again before the pass ends is counted too.

Not every held tensor is in a node's list. A Python function may hang tensors on its context, compiled graphs among
them, and a checkpoint holds the inputs of what it will run again in a frame behind its hooks. Both are looked at. The
state of the random generators that a checkpoint keeps as well (5 kB each on the host) is not counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any, Literal

from torch import Tensor

from stepscope.measure.memory.marks import Places
from stepscope.step import Step

Kind = Literal["activation", "parameter", "buffer", "input"]
_RAW = "_raw_saved_"
_EMPTY = CellType()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One row of the table `saved`: a tensor that a node holds."""

    node: int
    op: str
    argument: str
    module: str | None
    shape: str
    dtype: str
    bytes: int
    storage: int
    storage_bytes: int
    kind: Kind
    name: str | None


def audit(step: Step, places: Places | None = None) -> tuple[SavedTensor, ...]:
    """Everything that the graph of the step's loss holds, in the order of the forward pass. Modules are known where
    `places` watched that pass."""
    if step.loss is None or step.loss.grad_fn is None:
        raise ValueError("no graph: run the step's forward phase first, in a mode other than inference")
    owners = _name_storages(step)
    storages: dict[int, int] = {}
    rows = []
    for node, argument, tensor in held_tensors(step.loss.grad_fn):
        storage = tensor.untyped_storage()
        kind, name = owners.get(storage._cdata, ("activation", None))
        rows.append(
            SavedTensor(
                node=node.number,
                op=node.op,
                argument=argument,
                module=places.find(node.number) if places else None,
                shape=json.dumps(list(tensor.shape)),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=tensor.numel() * tensor.element_size(),
                storage=storages.setdefault(storage._cdata, len(storages)),
                storage_bytes=storage.nbytes(),
                kind=kind,
                name=name,
            )
        )
    return tuple(rows)


# --- The walk -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """The node that holds a tensor."""

    number: int
    op: str


def held_tensors(root: Any) -> Iterator[tuple[Holder, str, Tensor]]:
    """Every tensor that the graph below a node holds, with who holds it and as what."""
    frames: set[int] = set()
    for node in _visit(root):
        holder = Holder(node._sequence_nr(), node.name().rpartition("::")[2])
        for argument, raw in _raw_tensors(node):
            # Where somebody's hook has packed it, a tensor in there (moved to the host, made smaller) is what is held.
            yield from ((holder, argument, tensor) for _, tensor in _tensors_in(raw.data))
            checkpoint = Holder(holder.number, "checkpoint")
            yield from ((checkpoint, *held) for held in _behind_hook(raw.unpack_hook, frames))
        yield from ((holder, f"ctx.{name}", tensor) for name, tensor in _tensors_in(getattr(node, "__dict__", {})))


def _visit(root: Any) -> list[Any]:
    """Every node below `root` once, in the order of the forward pass. The list keeps the nodes' Python sides alive, so
    that their identities stay theirs."""
    found, waiting = {id(root): root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and id(node) not in found:
                found[id(node)] = node
                waiting.append(node)
    # What accumulates into a parameter has the largest number there is, and holds the parameter alone.
    nodes = [node for node in found.values() if not hasattr(node, "variable")]
    return sorted(nodes, key=lambda node: int(node._sequence_nr()))


def _raw_tensors(node: Any) -> Iterator[tuple[str, Any]]:
    for attribute in dir(node):
        if attribute.startswith(_RAW):
            name, value = attribute.removeprefix(_RAW), getattr(node, attribute)
            if isinstance(value, tuple | list):
                yield from ((f"{name}[{place}]", one) for place, one in enumerate(value))
            elif value is not None:
                yield name, value


def _tensors_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a value and of the containers in it, each with its way there."""
    match value:
        case Tensor():
            yield name, value
        case Mapping():
            for key, one in value.items():
                yield from _tensors_in(one, f"{name}.{key}".lstrip("."))
        case list() | tuple():
            for place, one in enumerate(value):
                yield from _tensors_in(one, f"{name}[{place}]")


def _behind_hook(hook: object, frames: set[int]) -> Iterator[tuple[str, Tensor]]:
    """What the checkpoint behind an unpacking hook holds, unless its frame is among `frames` and was looked at."""
    frame = _find_frame(hook)
    if frame is not None and id(frame) not in frames:
        frames.add(id(frame))
        yield from _frame_inputs(frame, frames)


def _find_frame(hook: object) -> Any:
    """The frame of `torch.utils.checkpoint`, or None if the hook is nobody's or somebody else's."""
    for name, value in _closed_over(hook):
        if name == "frame" and hasattr(value, "recompute_fn"):
            return value
        if name == "unpack_hook":
            return _find_frame(value)
    return None


def _frame_inputs(frame: Any, frames: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The arguments that will be given again. In nested checkpoints the outer one has packed what the inner keeps."""
    by_place, by_name = _frame_arguments(frame)
    for place, one in enumerate(by_place):
        yield from ((f"input[{place}]{way}", tensor) for way, tensor in _tensors_in(getattr(one, "data", one)))
        yield from _behind_hook(getattr(one, "unpack_hook", None), frames)
    yield from ((f"input.{way}", tensor) for way, tensor in _tensors_in(by_name))


def _frame_arguments(frame: Any) -> tuple[Sequence[Any], object]:
    """Those by place and those by name. torch 2.13 keeps the former in the frame; 2.11 keeps both in a node of their
    own, which has a dummy in front."""
    if hasattr(frame, "saved_args"):
        return frame.saved_args, dict(_closed_over(frame.recompute_fn)).get("kwargs")
    node = frame.input_saver.grad_fn
    return node._raw_saved_tensors[1:], dict(_closed_over(node.get_args))["args"][1]


# --- Whose memory it is ---------------------------------------------------------------------------------------------


def _name_storages(step: Step) -> dict[int, tuple[Kind, str | None]]:
    """By storage: a view of a parameter is the parameter's memory. Inputs are the tensors that the step's own functions
    close over: the batch, and what the loss compares with."""
    owners: dict[int, tuple[Kind, str | None]] = {}
    for tensor in (*_reachable(step._call), *_reachable(step.measure_loss)):
        owners[tensor.untyped_storage()._cdata] = ("input", None)
    for name, buffer in step.module.named_buffers():
        owners[buffer.untyped_storage()._cdata] = ("buffer", name)
    for name, parameter in step.module.named_parameters():
        owners.setdefault(parameter.untyped_storage()._cdata, ("parameter", name))
    return owners


def _reachable(function: object, depth: int = 4) -> Iterator[Tensor]:
    """Tensors in what a function closes over, and in the functions among it."""
    for _, value in _closed_over(function):
        yield from (tensor for _, tensor in _tensors_in(value))
        if depth and isinstance(value, FunctionType | partial):
            yield from _reachable(value, depth - 1)


def _closed_over(function: object) -> list[tuple[str, Any]]:
    if isinstance(function, partial):
        return [("args", function.args), ("keywords", function.keywords), ("func", function.func)]
    if not isinstance(function, FunctionType):
        return []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # A name that the function around has not assigned, or not yet, has an empty cell.
    return [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]
