"""Who owns the memory of a process: found at one moment, without having watched the process before.

Every tensor, module and optimizer that Python can reach is known to the garbage collector. Parameters, gradients and
optimizer states get their names from modules and optimizers. The graphs below all tensors hold the activations, and
show their modules: a node that uses a parameter belongs to the module of the parameter, and a node between two of those
in the order of the forward pass belongs to the innermost module around both. Nothing here runs on the device or
allocates its memory.

What C++ alone holds (gradients on their way through the backward pass, workspaces) has no owner here.
"""

import gc
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepscope.measure.memory.marks import LOSS
from stepscope.measure.memory.saved_tensors import tensors_of, visit
from stepscope.recording.memory.labels import NOBODY, SavedRow, TensorFact

# Modules that others put around a model, and the names that they add to its parameters.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_PARALLEL = "module"
# Nodes between a parameter and the operator that uses it.
_VIEWS = frozenset(("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0"))
_CAST = "ToCopyBackward0"
_HOPS = 4
_STATES_OF = {
    "SGD": 0,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "Lion": 1,
}
_FEWEST_GRAPHS = 2


@dataclass(kw_only=True)
class Owners:
    """What was found. `facts` name the memory by address, `saved` is what the graphs hold."""

    facts: list[TensorFact] = field(default_factory=list)
    saved: list[SavedRow] = field(default_factory=list)
    optimizers: tuple[str, ...] = ()
    missing_gradient_bytes: int = 0
    missing_state_bytes: int = 0
    num_old_graphs: int = 0
    old_graph_bytes: int = 0


def find_owners(device: torch.device, frames: Iterable[FrameType], *, mark: int) -> Owners:
    """Return who owns the memory of `device` now. Variables of `frames` give names to other tensors."""
    search = _Search(device, mark)
    search.name_parameters()
    search.name_states()
    search.read_graphs()
    search.name_variables(frames)
    return search.owners


@dataclass(frozen=True, slots=True)
class _Reachable:
    tensors: list[Tensor]
    modules: list[nn.Module]
    optimizers: list[Optimizer]


def _reach() -> _Reachable:
    """Everything of interest that the garbage collector knows. It hides what a program has frozen."""
    if gc.get_freeze_count():
        gc.unfreeze()
    found = _Reachable([], [], [])
    for one in gc.get_objects():
        kind = type(one)  # not `isinstance`, which asks proxies for the class of what they stand for
        if kind is Tensor or kind is nn.Parameter:
            found.tensors.append(one)
        elif issubclass(kind, nn.Module):
            found.modules.append(one)
        elif issubclass(kind, Optimizer):
            found.optimizers.append(one)
    return found


class _Search:
    def __init__(self, device: torch.device, mark: int) -> None:
        self.owners = Owners()
        self._device, self._mark = device, mark
        self._reachable = _reach()
        self._seen: dict[int, str] = {}  # category by address
        self._names: dict[int, str] = {}  # of parameters, by id
        self._parameters: dict[int, nn.Parameter] = {}

    # --- Modules and optimizers ---------------------------------------------------------------------------------------

    def name_parameters(self) -> None:
        for prefix, root in _roots(self._reachable.modules):
            for name, parameter in root.named_parameters():
                self._names.setdefault(id(parameter), prefix + clean_name(name))
                self._parameters[id(parameter)] = parameter
            for name, buffer in root.named_buffers():
                self._note(buffer, "other", f"buffer {prefix}{clean_name(name)}")
        for key, parameter in self._parameters.items():
            self._note(_local(parameter), "parameters", self._names[key])
            gradient = parameter.grad if parameter.is_leaf else None
            if gradient is not None:
                self._note(_local(gradient), "gradients", self._names[key])
            elif parameter.requires_grad:
                self.owners.missing_gradient_bytes += self._bytes_here(_local(parameter))

    def name_states(self) -> None:
        optimizers = [one for one in self._reachable.optimizers if hasattr(one, "state")]
        self.owners.optimizers = tuple(dict.fromkeys(type(one).__name__ for one in optimizers))
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                name = self._names.get(id(parameter), "parameter")
                for part, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        self._note(_local(value), "optimizer state", f"{name}.{part}")
            self.owners.missing_state_bytes += self._missing_state(optimizer)

    def _missing_state(self, optimizer: Optimizer) -> int:
        copies = _STATES_OF.get(type(optimizer).__name__, 0)
        total = 0
        for group in optimizer.param_groups:
            own = copies + bool(group.get("momentum")) + bool(group.get("amsgrad"))
            lacking = [one for one in group["params"] if one.requires_grad and one not in optimizer.state]
            total += own * sum(self._bytes_here(_local(one)) for one in lacking)
        return total

    # --- Graphs -------------------------------------------------------------------------------------------------------

    def read_graphs(self) -> None:
        roots = {id(tensor): tensor.grad_fn for tensor in self._reachable.tensors if tensor.grad_fn is not None}
        nodes = visit(*roots.values())
        modules = _NodeModules(nodes, self._names)
        storages: dict[int, int] = {}
        for holder, argument, tensor in tensors_of(nodes):
            address = self._address(tensor)
            if address is None:
                continue
            module, copied = modules.find(holder.number), modules.copied_parameter(holder.number, tensor)
            known = self._seen.get(address)
            kind = {"parameters": "parameter", "other": "buffer"}.get(known or "", "activation")
            if copied is not None and known is None:
                self._note(tensor, "autocast copies", self._names[id(copied)])
            elif known is None:
                self._note(tensor, "activations", f"{holder.op}.{argument}", module)
            kind = "parameter" if self._seen.get(address) == "autocast copies" else kind
            storage = tensor.untyped_storage()
            self.owners.saved.append(
                SavedRow(
                    node=holder.number,
                    op=holder.op,
                    argument=argument,
                    module=module,
                    shape=json.dumps(list(tensor.shape)),
                    dtype=_dtype(tensor),
                    bytes=tensor.numel() * tensor.element_size(),
                    storage=storages.setdefault(address, len(storages)),
                    storage_bytes=storage.nbytes(),
                    kind=kind,
                    name=None,
                )
            )
        self._count_old_graphs(roots)

    def _count_old_graphs(self, roots: dict[int, Any]) -> None:
        """Scalars that keep a graph alive, other than the newest graph: losses in a list, or a sum of losses."""
        if not roots:
            return
        newest = max(roots.values(), key=lambda node: int(node._sequence_nr()))
        current = visit(newest)
        ids = {id(node) for node in current}
        scalars = [one for one in self._reachable.tensors if one.grad_fn is not None and one.numel() == 1]
        old = [one.grad_fn for one in scalars if id(one.grad_fn) not in ids]
        if len(old) < _FEWEST_GRAPHS:
            return
        held = {
            address: tensor.untyped_storage().nbytes()
            for _, _, tensor in tensors_of(node for node in visit(*old) if id(node) not in ids)
            if (address := self._address(tensor)) is not None and self._seen.get(address) == "activations"
        }
        self.owners.num_old_graphs, self.owners.old_graph_bytes = len(old), sum(held.values())

    # --- Other tensors ------------------------------------------------------------------------------------------------

    def name_variables(self, frames: Iterable[FrameType]) -> None:
        named = {
            id(value): f"{name} in {frame.f_code.co_name}"
            for frame in frames
            for name, value in dict(frame.f_locals).items()
            if type(value) is Tensor
        }
        for tensor in self._reachable.tensors:
            address = self._address(tensor)
            if address is not None and address not in self._seen:
                known = named.get(id(tensor))
                self._note(tensor, "temporaries" if known else "other", known or "tensor that Python holds")

    def _note(self, tensor: Tensor, category: str, name: str, module: str | None = None) -> None:
        address = self._address(tensor)
        if address is None or address in self._seen:
            return
        self._seen[address] = category
        self.owners.facts.append(
            TensorFact(
                mark=self._mark,
                operator=NOBODY,
                address=address,
                category=category,
                name=name,
                shape=tuple(tensor.shape),
                dtype=_dtype(tensor),
                module=module,
            )
        )

    def _bytes_here(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes() if self._address(tensor) is not None else 0

    def _address(self, tensor: Tensor) -> int | None:
        """Where a tensor's memory is, None if it has none of its own on this device."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(tensor)
        if not is_plain or tensor.device != self._device or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        return storage.data_ptr() if storage.nbytes() else None


def _local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, Tensor) else tensor


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _roots(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules, the largest first. Only the others have a prefix: their class."""
    several = list(modules)
    inside = {id(child) for module in several for child in module._modules.values()}
    outermost = [module for module in several if id(module) not in inside]
    sizes = {id(one): sum(parameter.numel() for parameter in one.parameters()) for one in outermost}
    outermost.sort(key=lambda one: -sizes[id(one)])
    for place, module in enumerate(outermost):
        yield f"{type(module).__name__}." if place else "", module


def clean_name(name: str) -> str:
    """Return a parameter's name without those of wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == _PARALLEL and len(parts) > 1 else parts)


# --- The module of a node ---------------------------------------------------------------------------------------------


class _NodeModules:
    """The modules of autograd's nodes, by their numbers."""

    def __init__(self, nodes: Iterable[Any], names: dict[int, str]) -> None:
        self._used: dict[int, list[Any]] = {}
        anchors: dict[int, str] = {}
        for node in nodes:
            used = [one for one in _parameters_of(node) if id(one) in names]
            if used:
                number = int(node._sequence_nr())
                self._used[number] = used
                anchors[number] = names[id(used[-1])].rpartition(".")[0]
        self._numbers = sorted(anchors)
        self._paths = [anchors[number] for number in self._numbers]

    def find(self, number: int) -> str | None:
        """Return the module of a node; the loss follows the last module of a model that is not nested."""
        if number in self._used:
            return self._paths[bisect_left(self._numbers, number)] or None
        after = bisect_right(self._numbers, number)
        before = after - 1
        if before < 0:
            return None
        if after == len(self._numbers) or self._paths[after] == self._paths[0]:  # the next pass begins
            return self._paths[before].rpartition(".")[0] or LOSS
        return _common(self._paths[before], self._paths[after])

    def copied_parameter(self, number: int, tensor: Tensor) -> Any:
        """Return the parameter that `tensor` is a copy of in another dtype, None if it is not one."""
        for parameter in self._used.get(number, ()):
            if parameter.numel() == tensor.numel() and parameter.dtype != tensor.dtype and parameter.dim() > 1:
                return parameter
        return None


def _parameters_of(node: Any) -> Iterator[Any]:
    """The parameters that a node uses, directly or through views and casts."""
    for following, _ in node.next_functions:
        one, hops = following, 0
        while one is not None and hops < _HOPS:
            if hasattr(one, "variable"):
                yield one.variable
                break
            if one.name() not in _VIEWS and one.name() != _CAST:
                break
            one, hops = one.next_functions[0][0], hops + 1


def _common(before: str, after: str) -> str | None:
    """Return the innermost module around two. A list of blocks is none: what follows a block belongs to it."""
    first, second = before.split("."), after.split(".")
    depth = 0
    while depth < min(len(first), len(second)) and first[depth] == second[depth]:
        depth += 1
    if depth < len(first) and first[depth].isdecimal():
        depth += 1
    return ".".join(first[:depth]) or None
