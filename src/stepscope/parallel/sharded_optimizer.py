"""An optimizer whose state is sharded over ranks.

Every rank keeps the state of its share of whole parameters (`assign_owners`), updates those, and receives the others
from their owners. This relies on one property of optimizers: they skip parameters without a gradient and keep no state
for them. So the optimizer on every rank has all parameters, and during its step it only sees the gradients of its
share. Param groups are its own, and a scheduler that changes them changes what the step uses; indices in a state dict
are those of an unsharded optimizer; and a new param group only needs owners.

The parameters of one owner are contiguous in memory (`Arena`), so that they are one message and need no copy. One
message per large parameter and one for all small ones together took a third more CPU time.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from stepscope.parallel.agreement import is_piece, require_agreement
from stepscope.parallel.communicator import Communicator
from stepscope.parallel.sharded_state import choose_sources, exchange_states

# Vector instructions are fastest on addresses that are multiples of this.
ALIGNMENT_BYTES = 64


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)`, with the state of each parameter on one rank only.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    Every rank must call the constructor, `step`, `add_param_group`, `state_dict` and `load_state_dict`. Gradients must
    be the same on all ranks when `step` is called (DDP ensures this), and parameters are the same afterwards; they are
    bitwise identical to those of the unsharded optimizer. The optimizer must update each parameter from its own
    gradient and state: all of torch's do, except LBFGS.

    `param_groups` and `state` are the inner optimizer's own: `state` holds this rank's share.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[Optimizer],
        *,
        communicator: Communicator | None = None,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_cls)
        listed = _list_params(params)
        self._communicator = communicator or Communicator.default()
        self._loads_bytes = [0] * self._communicator.world
        self._owners: list[int] = []
        self._arenas: list[tuple[int, Arena]] = []
        self._optimizer = optimizer_cls(listed, **kwargs)
        super().__init__(self._optimizer.param_groups, self._optimizer.defaults)
        self._adopt_inner()
        self._assign_new_params()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's share, and receive the others. A closure, if given, recomputes the loss first, and must
        average its gradients over ranks itself.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_share()
        self._share_updates()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the inner optimizer's; the new parameters go to the ranks with the least state."""
        if len(self.param_groups) < len(self._optimizer.param_groups):
            # The base class's constructor passes the groups that the inner optimizer already has.
            self.param_groups.append(param_group)
            return
        (group,) = _list_params([param_group])
        known = set(self._all_params())
        for position, param in enumerate(_tensors_of(group)):
            if param in known:
                raise ValueError(
                    f"some parameters appear in more than one parameter group: number {position} of `param_group`"
                )
        self._optimizer.add_param_group(group)
        self._assign_new_params()

    def state_dict(self, *, to: int | None = 0) -> StateDict:
        """Return the whole state, in the inner optimizer's own format: that optimizer can load it unsharded, and this
        one on any number of ranks.

        Every rank must call this. Rank `to` gets the whole state, all others a dict whose `state` is empty; with None,
        every rank gets the whole state. Tensors are copies in CPU memory: the whole state may not fit on a GPU.
        """
        world = self._communicator.world
        if to is not None and not 0 <= to < world:
            raise ValueError(f"`to` must be None or a rank below {world}, but got {to}")
        share = self._optimizer.state_dict()
        present = self._communicator.share_objects(set(share["state"]), "the indices of the optimizer's state")
        sources = {index: owner for index, owner in enumerate(self._owners) if index in present[owner]}
        wanted = to is None or to == self._communicator.rank
        whole = exchange_states(self._communicator, share["state"], sources, lambda _: wanted)
        return {**share, "state": whole}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state that `state_dict` of this class or of the inner optimizer returned, on any number of ranks.

        Every rank must call this with the same `param_groups`. The whole state may be on all ranks or on some: what the
        owner of a parameter is missing comes from the lowest rank that has it.
        """
        _check_groups(state_dict, self.param_groups)
        states = state_dict["state"]
        present = self._communicator.share_objects(set(states), "the indices of the optimizer's state")
        rank = self._communicator.rank
        sources = choose_sources(present, self._owners)
        share = {index: state for index, state in states.items() if self._owners[index] == rank}
        share |= exchange_states(self._communicator, states, sources, lambda index: self._owners[index] == rank)
        self._optimizer.load_state_dict({**state_dict, "state": share})
        self._adopt_inner()

    def _update_share(self) -> None:
        rank = self._communicator.rank
        others = [param for param, owner in zip(self._all_params(), self._owners, strict=True) if owner != rank]
        hidden = [(param, param.grad) for param in others if param.grad is not None]
        for param, _ in hidden:
            param.grad = None
        try:
            self._optimizer.step()
        finally:
            for param, grad in hidden:
                param.grad = grad

    def _share_updates(self) -> None:
        rank = self._communicator.rank
        for owner, arena in self._arenas:
            if owner == rank:
                arena.collect()
        parts = [(owner, arena.message) for owner, arena in self._arenas if arena.message.numel()]
        for pending in self._communicator.share(parts, "updated parameters"):
            pending.wait()
        for owner, arena in self._arenas:
            if owner != rank:
                arena.distribute()

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _adopt_inner(self) -> None:
        """The inner optimizer creates new objects when it loads a state."""
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state

    def _assign_new_params(self) -> None:
        """Assign owners to the parameters at the end that have none yet."""
        require_agreement(
            self._communicator,
            _describe_groups(self.param_groups),
            "optimizer",
            hint="print(optimizer)  # on both ranks",
        )
        new = self._all_params()[len(self._owners) :]
        # Frozen parameters have no state, but still get an owner, in case they are trained later.
        new_bytes = [param.nbytes if param.requires_grad else 0 for param in new]
        owners = assign_owners(new_bytes, self._loads_bytes)
        shares: dict[tuple[int, torch.device], list[Tensor]] = {}
        for param, size_bytes, owner in zip(new, new_bytes, owners, strict=True):
            self._loads_bytes[owner] += size_bytes
            shares.setdefault((owner, param.device), []).append(param)
            if owner != self._communicator.rank:
                # Some optimizers create their state immediately, for every parameter.
                self.state.pop(param, None)
        self._owners += owners
        self._arenas += [(owner, Arena(params)) for (owner, _), params in shares.items()]


def _check_class(optimizer_cls: type[Optimizer]) -> None:
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(f"`optimizer_cls` must be a subclass of torch.optim.Optimizer, but got {optimizer_cls!r}")
    if issubclass(optimizer_cls, torch.optim.LBFGS | ShardedOptimizer):
        raise ValueError(
            f"`optimizer_cls` must update each parameter independently, which {optimizer_cls.__name__} does not"
        )


def _list_params(params: ParamsT) -> list[Any]:
    """Consume iterators once, and reject what the optimizer would only warn about or mix up."""
    if isinstance(params, Tensor | set | Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            f"`params` must be an ordered iterable of tensors or param groups, but got {type(params).__name__}"
        )
    listed: list[Any] = [_list_group(entry) if isinstance(entry, dict) else entry for entry in params]
    if not listed:
        raise ValueError("optimizer got an empty parameter list: `params`")
    first_seen: dict[Tensor, int] = {}
    for position, param in enumerate(param for entry in listed for param in _tensors_of(entry)):
        if not isinstance(param, Tensor):
            raise TypeError(f"`params` must contain tensors, but number {position} is {type(param).__name__}")
        if is_piece(param):
            raise ValueError(
                f"`params` must contain whole parameters, but number {position} is a shard of an FSDP model"
            )
        if not param.is_leaf:
            raise ValueError(f"`params` must contain leaf tensors, but number {position} is not a leaf")
        if param in first_seen:
            raise ValueError(f"`params` contains duplicate parameters: numbers {first_seen[param]} and {position}")
        first_seen[param] = position
    return listed


def _list_group(group: dict[str, Any]) -> dict[str, Any]:
    if "params" not in group:
        raise ValueError("`params` has a param group without the key `params`")
    members = group["params"]
    if isinstance(members, set):
        raise TypeError("`params` has a param group with a set of parameters, which has no order; use a list")
    return {**group, "params": [members] if isinstance(members, Tensor) else list(members)}


def _tensors_of(entry: Any) -> list[Any]:
    """The tensors in a tensor, a (name, tensor) pair, or a param group of either."""
    if isinstance(entry, dict):
        return [tensor for member in entry["params"] for tensor in _tensors_of(member)]
    return [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry]


def _describe_groups(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for number, group in enumerate(groups):
        options = {key: value for key, value in sorted(group.items()) if isinstance(value, int | float | str | bool)}
        lines.append(f"param group {number}: {options}")
        lines += [
            f"its parameter {position}: {param.dtype} {tuple(param.shape)}, strides {param.stride()}"
            for position, param in enumerate(group["params"])
        ]
    return lines


def _check_groups(state_dict: StateDict, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check before anything is exchanged, so that all ranks reject together what the inner optimizer would."""
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if saved != ours:
        raise ValueError(f"loaded `state_dict` has param groups of {saved} parameters, but this optimizer has {ours}")


# --- Ownership and messages ---


def assign_owners(sizes_bytes: Sequence[int], loads_bytes: Sequence[int]) -> list[int]:
    """Assign a rank to each size, given each rank's current load. Ties go to the lower rank, so all ranks decide alike.

    Parameters stay whole: optimizers may do anything with one (take its norm, factor it), and a state can be saved and
    loaded on another number of ranks. Each goes to the rank with the smallest load so far, the largest first. In any
    order, no rank then has more than an even share plus the largest parameter; taking the largest first makes it far
    less.
    """
    if not loads_bytes:
        raise ValueError("`loads_bytes` must have one entry per rank, but is empty")
    ranks = [(load_bytes, rank) for rank, load_bytes in enumerate(loads_bytes)]
    heapq.heapify(ranks)
    owners = [0] * len(sizes_bytes)
    # A stable sort: equal sizes stay in order.
    for position in sorted(range(len(sizes_bytes)), key=sizes_bytes.__getitem__, reverse=True):
        load_bytes, rank = ranks[0]
        owners[position] = rank
        heapq.heapreplace(ranks, (load_bytes + sizes_bytes[position], rank))
    return owners


class Arena:
    """`params` of one owner, on one device, contiguous in one buffer, which is one message.

    A parameter moves into the buffer permanently if nothing else can notice: it has its own storage, and nothing else
    references it. Then it is sent and received without a copy. One that does not move, or that is later moved out again
    (`module.to`, an assignment to `.data`), is copied into its place before it is sent, and out of it afterwards. So
    the messages are the same on all ranks, whatever moved on each.
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor]) -> None:
        aligned = [-(-param.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for param in params]
        self.message = torch.empty(sum(aligned), dtype=torch.uint8, device=params[0].device)
        self._places = []
        for param, piece in zip(params, torch.split(self.message, aligned), strict=True):
            place = piece[: param.nbytes].view(param.dtype).view(param.shape)
            self._places.append((param, place))
            if _may_move(param):
                place.copy_(param)
                param.data = place

    @torch.no_grad()
    def collect(self) -> None:
        """Before sending: copy in what is elsewhere."""
        for param, place in self._places:
            if param.data_ptr() != place.data_ptr():
                place.copy_(param)

    @torch.no_grad()
    def distribute(self) -> None:
        """After receiving: copy out what is elsewhere."""
        for param, place in self._places:
            if param.data_ptr() != place.data_ptr():
                param.copy_(place)


def _may_move(param: Tensor) -> bool:
    """Whether it is dense and contiguous, with storage that no other tensor, array or process can see."""
    if type(param.data) is not Tensor or not param.is_contiguous():
        return False
    memory = param.untyped_storage()
    if not memory.is_cuda and (memory.is_shared() or not memory.resizable()):  # other processes, and numpy
        return False
    # Two references: the parameter, and `memory` itself.
    return memory.nbytes() == param.nbytes and torch._C._storage_Use_Count(memory._cdata) == 2
