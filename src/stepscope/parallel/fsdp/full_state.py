"""Whole tensors from the ranks' shards, and back: for checkpoints that any number of ranks can load.

A checkpoint does not depend on the sharding. Parameters have the names and shapes of the unwrapped module; an
optimizer's state is a dictionary per parameter, in which values of the parameter's shape are whole and everything else
is unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from stepscope.parallel.communicator import Communicator
from stepscope.parallel.fsdp.flat_buffer import Flat, ParameterPlace
from stepscope.parallel.fsdp.plan import Member
from stepscope.parallel.fsdp.unit import ShardedUnit

State = dict[str, dict[str, Any]]
# A rank's description of a parameter's state: per key, the dtype of a value with the shard's shape, or None.
Kinds = dict[str, dict[str, torch.dtype | None]]


class FullTensors:
    """Every rank must call the gathering methods; `to` is the rank that gets the result, or None for all."""

    def __init__(self, units: Sequence[ShardedUnit], vectors: Sequence[Member], communicator: Communicator) -> None:
        self._flats: list[Flat] = [flat for unit in units for flat in unit.flats]
        self._vectors = vectors
        self._communicator = communicator

    @torch.no_grad()
    def gather_params(self, to: int | None) -> dict[str, Tensor]:
        wanted = self._is_wanted(to)
        params: dict[str, Tensor] = {}
        for flat in self._flats:
            whole = flat.gather_values(flat.shard, "parameters")
            for place in flat.places if wanted else ():
                full = _cut_full(whole, place)
                params.update((site.name, full) for site in place.sites)
        for member in self._vectors if wanted else ():
            full = member.parameter.detach().clone()
            params.update((site.name, full) for site in member.sites)
        return params

    @torch.no_grad()
    def load_params(self, params: Mapping[str, Tensor]) -> None:
        self._check_names(params)
        for flat, place in self._places():
            flat_part = flat.own_part(place, _find(params, [site.name for site in place.sites], place.shape))
            place.piece.copy_(flat_part)
        for member in self._vectors:
            names = [site.name for site in member.sites]
            member.parameter.copy_(_find(params, names, member.parameter.shape))

    @torch.no_grad()
    def gather_state(self, optimizer: Optimizer, to: int | None) -> State:
        wanted = self._is_wanted(to)
        ours = {place.name: optimizer.state.get(place.piece, {}) for _, place in self._places()}
        all_kinds = self._communicator.share_objects(self._describe(ours), "the optimizer's state")
        others = self._communicator.share_objects(
            self._pass_through(ours, all_kinds), "the optimizer's unsharded values"
        )
        state: State = {}
        for flat in self._flats:
            for key, dtype in _sharded_keys(flat, all_kinds):
                whole = flat.gather_values(self._shard_of_state(flat, ours, key, dtype), f"optimizer state {key}")
                for place in flat.places if wanted else ():
                    if _kind(place.name, key, all_kinds) is not None:
                        state.setdefault(place.name, {})[key] = _cut_full(whole, place)
        if not wanted:
            return {}
        for rank_values in reversed(others):
            for name, values in rank_values.items():
                state.setdefault(name, {}).update(values)
        for member in self._vectors:
            if member.parameter in optimizer.state:
                state[member.name] = {key: _copy(value) for key, value in optimizer.state[member.parameter].items()}
        return state

    @torch.no_grad()
    def load_state(self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
        known = {place.name for _, place in self._places()} | {member.name for member in self._vectors}
        _refuse_unknown("state", set(state) - known)
        values: dict[Tensor, Mapping[str, Any]] = {
            place.piece: {key: _own_state(flat, place, value) for key, value in state[place.name].items()}
            for flat, place in self._places()
            if place.piece.numel() and place.name in state
        }
        values |= {member.parameter: state[member.name] for member in self._vectors if member.name in state}
        # Through the optimizer's own `load_state_dict`, which knows the device and dtype of each value.
        groups = optimizer.state_dict()["param_groups"]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        indices = [index for group in groups for index in group["params"]]
        held = {index: values[param] for param, index in zip(params, indices, strict=True) if param in values}
        optimizer.load_state_dict({"state": held, "param_groups": groups})

    def _places(self) -> list[tuple[Flat, ParameterPlace]]:
        return [(flat, place) for flat in self._flats for place in flat.places]

    def _is_wanted(self, to: int | None) -> bool:
        if to is not None and not 0 <= to < self._communicator.world:
            raise ValueError(f"`to` must be None or a rank below {self._communicator.world}, but got {to}")
        return to is None or to == self._communicator.rank

    def _check_names(self, params: Mapping[str, Tensor]) -> None:
        groups = [place.sites for _, place in self._places()] + [member.sites for member in self._vectors]
        _refuse_unknown("params", set(params) - {site.name for sites in groups for site in sites})
        for sites in groups:
            if not any(site.name in params for site in sites):
                raise ValueError(f"missing key in `params`: `{sites[0].name}`")

    def _describe(self, ours: State) -> Kinds:
        return {
            place.name: {key: _dtype_if_sharded(value, place) for key, value in ours[place.name].items()}
            for _, place in self._places()
            if place.piece.numel()
        }

    def _pass_through(self, ours: State, all_kinds: Sequence[Kinds]) -> State:
        return {
            name: {key: _copy(value) for key, value in values.items() if _kind(name, key, all_kinds) is None}
            for name, values in ours.items()
            if values
        }

    def _shard_of_state(self, flat: Flat, ours: State, key: str, dtype: torch.dtype) -> Tensor:
        shard = torch.zeros(flat.slice_numel, dtype=dtype, device=flat.device)
        for place in flat.places:
            if place.piece.numel() and key in ours[place.name]:
                shard[place.piece_start : place.piece_stop] = ours[place.name][key]
        return shard


def _dtype_if_sharded(value: object, place: ParameterPlace) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) and value.shape == place.piece.shape else None


def _kind(name: str, key: str, all_kinds: Sequence[Kinds]) -> torch.dtype | None:
    """A shard of one element has the shape of unsharded values too: then a longer shard decides."""
    kinds = [kinds[name][key] for kinds in all_kinds if key in kinds.get(name, {})]
    return kinds[0] if kinds and None not in kinds else None


def _sharded_keys(flat: Flat, all_kinds: Sequence[Kinds]) -> list[tuple[str, torch.dtype]]:
    """Return each key that any parameter of the buffer has sharded, in the same order on all ranks."""
    keys = dict.fromkeys(key for kinds in all_kinds for place in flat.places for key in kinds.get(place.name, {}))
    found = [(key, [_kind(place.name, key, all_kinds) for place in flat.places]) for key in keys]
    return [(key, next(kind for kind in kinds if kind)) for key, kinds in found if any(kinds)]


def _own_state(flat: Flat, place: ParameterPlace, value: object) -> object:
    if isinstance(value, Tensor) and value.shape == place.shape:
        return flat.own_part(place, value)
    return value


def _cut_full(whole: Tensor, place: ParameterPlace) -> Tensor:
    """With its own storage: a view would keep, and save, its whole unit."""
    return whole[place.start : place.stop].view(place.shape).clone()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _find(params: Mapping[str, Tensor], names: list[str], shape: torch.Size) -> Tensor:
    name = next(name for name in names if name in params)
    if params[name].shape != shape:
        raise ValueError(
            f"size mismatch for `{name}` in `params`: expected {tuple(shape)}, but got {tuple(params[name].shape)}"
        )
    return params[name]


def _refuse_unknown(argument: str, unknown: set[str]) -> None:
    if unknown:
        raise ValueError(f"unexpected key in `{argument}`: `{min(unknown)}`")
