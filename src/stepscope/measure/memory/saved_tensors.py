"""Tensors saved for backward, read from the graph that a forward pass has built.

The walk starts at the loss and visits every node once. A node's saved tensors are read in their raw form, which shows
what is held without unpacking it: under activation checkpointing, unpacking would recompute it. `saved_tensors_hooks`
sees every tensor as it is saved, and was worse: the value a hook returns lives in place of the one autograd would have
saved, and tensors that are saved and freed before the pass ends are counted too.

Not every held tensor is in a node's list. A Python function, compiled graphs included, may attach tensors to its
context, and a checkpoint holds the inputs of what it will recompute in a frame behind its hooks. Both are read. The
random generator states that a checkpoint also keeps (5 kB each on the CPU) are not counted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from stepscope.measure.memory.marks import Places

if TYPE_CHECKING:  # loads the compiler, which a user's training process may not need
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


def audit(step: "Step", places: Places | None = None) -> tuple[SavedTensor, ...]:
    """Return everything that the graph of the step's loss holds, in forward order. Modules are known if `places`
    watched that pass.
    """
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


def held_tensors(*roots: Any) -> Iterator[tuple[Holder, str, Tensor]]:
    """Yield every tensor that the graph below some nodes holds, with its holder and role."""
    yield from tensors_of(visit(*roots))


def tensors_of(nodes: Iterable[Any]) -> Iterator[tuple[Holder, str, Tensor]]:
    """Yield every tensor that these nodes hold. A node that backward has passed holds none."""
    frames: set[int] = set()
    for node in nodes:
        holder = Holder(node._sequence_nr(), node.name().rpartition("::")[2])
        for argument, raw in _raw_tensors(node):
            # If a hook has packed it, the tensor inside (moved to the CPU, or smaller) is what is held.
            yield from ((holder, argument, tensor) for _, tensor in _tensors_in(raw.data))
            checkpoint = Holder(holder.number, "checkpoint")
            yield from ((checkpoint, *held) for held in _behind_hook(raw.unpack_hook, frames))
        yield from ((holder, f"ctx.{name}", tensor) for name, tensor in _tensors_in(getattr(node, "__dict__", {})))


def visit(*roots: Any) -> list[Any]:
    """Return every node below `roots` once, in forward order. The list keeps the nodes' Python wrappers alive, so that
    their ids stay unique.
    """
    found = {id(root): root for root in roots}
    waiting = list(found.values())
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and id(node) not in found:
                found[id(node)] = node
                waiting.append(node)
    # A node that accumulates into a parameter has the largest number of all, and holds only the parameter.
    nodes = [node for node in found.values() if not hasattr(node, "variable")]
    return sorted(nodes, key=lambda node: int(node._sequence_nr()))


def _raw_tensors(node: Any) -> Iterator[tuple[str, Any]]:
    for attribute in dir(node):
        if attribute.startswith(_RAW):
            try:
                name, value = attribute.removeprefix(_RAW), getattr(node, attribute)
            except RuntimeError:  # a custom function, or compiled code, whose backward has run
                continue
            if isinstance(value, tuple | list):
                yield from ((f"{name}[{place}]", one) for place, one in enumerate(value))
            elif value is not None:
                yield name, value


def _tensors_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value and its containers, each with its path."""
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
    """Yield what the checkpoint behind an unpacking hook holds, unless its frame is in `frames` and was read before."""
    frame = _find_frame(hook)
    if frame is not None and id(frame) not in frames:
        frames.add(id(frame))
        yield from _frame_inputs(frame, frames)


def _find_frame(hook: object) -> Any:
    """Return the frame of `torch.utils.checkpoint`, or None if the hook is missing or belongs to someone else."""
    for name, value in _closed_over(hook):
        if name == "frame" and hasattr(value, "recompute_fn"):
            return value
        if name == "unpack_hook":
            return _find_frame(value)
    return None


def _frame_inputs(frame: Any, frames: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Return the arguments that will be passed again. In nested checkpoints, the outer one has packed what the inner
    one saves.
    """
    by_place, by_name = _frame_arguments(frame)
    for place, one in enumerate(by_place):
        yield from ((f"input[{place}]{way}", tensor) for way, tensor in _tensors_in(getattr(one, "data", one)))
        yield from _behind_hook(getattr(one, "unpack_hook", None), frames)
    yield from ((f"input.{way}", tensor) for way, tensor in _tensors_in(by_name))


def _frame_arguments(frame: Any) -> tuple[Sequence[Any], object]:
    """Positional and named arguments. torch 2.13 keeps the former in the frame; 2.11 keeps both in a separate node,
    behind a dummy.
    """
    if hasattr(frame, "saved_args"):
        return frame.saved_args, dict(_closed_over(frame.recompute_fn)).get("kwargs")
    node = frame.input_saver.grad_fn
    return node._raw_saved_tensors[1:], dict(_closed_over(node.get_args))["args"][1]


# --- Whose memory it is ---------------------------------------------------------------------------------------------


def _name_storages(step: "Step") -> dict[int, tuple[Kind, str | None]]:
    """Identified by storage: a view of a parameter is the parameter's memory. Inputs are the batches and the tensors in
    the closure of the loss, such as targets.
    """
    owners: dict[int, tuple[Kind, str | None]] = {}
    for tensor in (*(one for _, one in _tensors_in(step.inputs)), *_reachable(step.measure_loss)):
        owners[tensor.untyped_storage()._cdata] = ("input", None)
    for name, buffer in step.module.named_buffers():
        owners[buffer.untyped_storage()._cdata] = ("buffer", name)
    for name, parameter in step.module.named_parameters():
        owners.setdefault(parameter.untyped_storage()._cdata, ("parameter", name))
    for name, copy in step.working_weights():
        owners.setdefault(copy.untyped_storage()._cdata, ("parameter", name))
    return owners


def _reachable(function: object, depth: int = 4) -> Iterator[Tensor]:
    """Yield tensors in a function's closure, and in the functions among it."""
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
    # A name that the enclosing function has not assigned yet has an empty cell.
    return [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]
